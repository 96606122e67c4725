"""`stallscope gate`: whether a job stays within limits, for CI."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.ask import DEFAULT_HUB, client_from
from stallscope.commands.compare import REGRESSION_EXIT_CODE, report_of
from stallscope.commands.options import (
    AsJson,
    CaFile,
    HubUrl,
    Price,
    SettingsFile,
    TokenFile,
    check_no_hub_options,
    settings_from,
)
from stallscope.errors import BadInput

if TYPE_CHECKING:  # importing it here would slow every command
    from stallscope.diagnose import Measures


def gate(
    trace: Annotated[
        str | None, typer.Argument(help="Trace, file of another tool, or saved `explain --json`.")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job", help="Job of the hub instead of a trace, as `stallscope ask summary` lists it."
        ),
    ] = None,
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
    hub: HubUrl = DEFAULT_HUB,
    token_file: TokenFile = None,
    ca_cert: CaFile = None,
    as_json: AsJson = False,
    settings: SettingsFile = None,
) -> None:
    """Check a job against limits, in one line.

    Exit codes: 0 within the limits, 21 inconclusive, 23 a limit is exceeded; others: an error.
    """
    from stallscope.commands.hub_job import report_of_job
    from stallscope.diagnose import Answer, measures

    if (trace is None) == (job is None):
        raise BadInput("give a trace, or the job of a hub with --job (stallscope ask summary lists the jobs)")
    if job is None:
        check_no_hub_options(token_file, ca_cert, needs="--job")
    limits = {
        "--max-late-ms": max_late_ms,
        "--max-usd-per-hour": max_usd_per_hour,
        "--max-lost": max_lost_percent,
    }
    for option, limit in limits.items():
        if limit is not None and not math.isfinite(limit):
            raise BadInput(f"{option} is {limit}; give a number")
    if max_late_ms is None and max_usd_per_hour is None and max_lost_percent is None:
        raise BadInput("gate needs a limit: --max-late-ms, --max-usd-per-hour or --max-lost")
    chosen = settings_from({"usd_per_gpu_hour": usd_per_gpu_hour}, settings)
    if trace is not None and max_usd_per_hour is not None and chosen.usd_per_gpu_hour is None:
        raise BadInput("--max-usd-per-hour needs a price: give --usd-per-gpu-hour")
    if trace is not None:
        measured = measures(report_of(trace, chosen))
    else:
        measured = measures(
            report_of_job(client_from(hub, token_file, ca_cert, settings=settings), job or "")
        )
    lost, max_lost = measured.lost_share, measured.max_lost_share
    cost, max_cost = _usd_per_hour(measured, chosen.usd_per_gpu_hour)
    checks = (
        _Check("lateness", "{:,.1f} ms", max_late_ms, measured.late_ms or 0.0, measured.late_ms or 0.0),
        _Check("cost", "${:,.2f} per hour", max_usd_per_hour, cost, max_cost),
        _Check("lost GPU time", "{:.1f} %", max_lost_percent, lost, max_lost, 100.0),
    )
    exceeded = [text for check in checks if (text := check.excess())]
    doubts = [text for text in (measured.doubt, *(check.doubt() for check in checks)) if text]
    if max_usd_per_hour is not None and cost is None and lost:
        doubts.insert(0, "no price is known for the GPUs of the fault; give --usd-per-gpu-hour")
    if measured.stopped:
        exceeded.insert(0, f"the job makes no progress: {measured.stopped}")
    if exceeded:
        answer, line, code = "exceeded", "; ".join(exceeded), REGRESSION_EXIT_CODE
    elif doubts:
        answer, line, code = "inconclusive", f"inconclusive: {doubts[0]}", Answer.INCONCLUSIVE.exit_code
    else:
        answer, line, code = "within", "within the limits", 0
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "answer": answer,
                    "late_ms": measured.late_ms,
                    "lost_share": measured.lost_share,
                    "usd_per_hour": None if cost is None else round(cost, 4),
                    "reason": line,
                }
            )
        )
    else:
        typer.echo(f"gate: {line}")
    raise typer.Exit(code)


def _usd_per_hour(measured: Measures, usd_per_gpu_hour: float | None) -> tuple[float | None, float | None]:
    """Both ends of the cost: at a given price, otherwise at the hub's prices."""
    if usd_per_gpu_hour is None:
        return measured.usd_per_hour, measured.max_usd_per_hour
    scale = measured.n_ranks * usd_per_gpu_hour
    low, high = measured.lost_share, measured.max_lost_share
    return None if low is None else low * scale, None if high is None else high * scale


@dataclass(frozen=True)
class _Check:
    """A measure and its limit, None without a limit. low, high: its bounds, None where unknown, in units of `scale`."""

    name: str
    form: str
    limit: float | None
    low: float | None
    high: float | None
    scale: float = 1.0

    def excess(self) -> str:
        """A clause if the measure exceeds the limit, otherwise empty."""
        if self.limit is None or self.low is None or self.low * self.scale <= self.limit:
            return ""
        return f"{self.name} {self.form.format(self.low * self.scale)} exceeds {self.form.format(self.limit)}"

    def doubt(self) -> str:
        """A clause if the measure may exceed the limit, otherwise empty."""
        if self.limit is None or (self.high is not None and self.high * self.scale <= self.limit):
            return ""
        if self.low is None:
            return f"the {self.name} of the fault is not known"
        low = self.form.format(self.low * self.scale)
        high = " or more" if self.high is None else f" to {self.form.format(self.high * self.scale)}"
        return f"{self.name} is {low}{high}, and the limit is {self.form.format(self.limit)}"
