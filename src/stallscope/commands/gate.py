"""`stallscope gate`: whether a job stays within limits, for CI."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from stallscope.commands.compare import REGRESSION_EXIT_CODE, report_of
from stallscope.commands.options import AsJson, Price, SettingsFile, settings_from
from stallscope.errors import BadInput


def gate(
    trace: Annotated[str, typer.Argument(help="Trace, file of another tool, or saved `explain --json`.")],
    max_late_ms: Annotated[
        float | None, typer.Option("--max-late-ms", min=0, help="Largest accepted median lateness of a rank.")
    ] = None,
    max_usd_per_hour: Annotated[
        float | None, typer.Option("--max-usd-per-hour", min=0, help="Largest accepted cost of stalls.")
    ] = None,
    max_lost_percent: Annotated[
        float | None,
        typer.Option("--max-lost", min=0, help="Largest accepted share of lost GPU time, in percent."),
    ] = None,
    usd_per_gpu_hour: Price = None,
    as_json: AsJson = False,
    settings: SettingsFile = None,
) -> None:
    """Check a job against limits, in one line.

    Exit codes: 0 within the limits, 21 the data cannot show it, 23 a limit is exceeded; others: an error.
    """
    from stallscope.diagnose import Answer, measures

    if max_late_ms is None and max_usd_per_hour is None and max_lost_percent is None:
        raise BadInput("gate needs a limit: --max-late-ms, --max-usd-per-hour or --max-lost")
    chosen = settings_from({"usd_per_gpu_hour": usd_per_gpu_hour}, settings)
    if max_usd_per_hour is not None and chosen.usd_per_gpu_hour is None:
        raise BadInput("--max-usd-per-hour needs a price: give --usd-per-gpu-hour")
    report = report_of(trace, chosen)
    measured = measures(report)
    lost_share = measured.lost_share or 0.0
    usd_per_hour = lost_share * measured.n_ranks * (chosen.usd_per_gpu_hour or 0.0)
    checks = (
        ("lateness", measured.late_ms or 0.0, max_late_ms, "{:,.1f} ms"),
        ("cost", usd_per_hour, max_usd_per_hour, "${:,.2f} per hour"),
        ("lost GPU time", lost_share * 100, max_lost_percent, "{:.1f} %"),
    )
    exceeded = [
        f"{name} {form.format(value)} exceeds {form.format(limit)}"
        for name, value, limit, form in checks
        if limit is not None and value > limit
    ]
    if exceeded:
        answer, line, code = "exceeded", "; ".join(exceeded), REGRESSION_EXIT_CODE
    elif report["answer"] == Answer.INCONCLUSIVE:
        gap = report["gaps"][0]["reason"] if report["gaps"] else "the data show no cause"
        answer, line, code = "inconclusive", f"the data cannot show it: {gap}", Answer.INCONCLUSIVE.exit_code
    else:
        answer, line, code = "within", "within the limits", 0
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "answer": answer,
                    "late_ms": measured.late_ms,
                    "lost_share": measured.lost_share,
                    "usd_per_hour": round(usd_per_hour, 4) if chosen.usd_per_gpu_hour is not None else None,
                    "reason": line,
                }
            )
        )
    else:
        typer.echo(f"gate: {line}")
    raise typer.Exit(code)
