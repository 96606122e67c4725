"""Prints the report of the diagnosis, in the same form for every command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stallscope.errors import NotFound
from stallscope.events.counted import counted
from stallscope.terminal_text import echo_text

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.commands.details import Details
    from stallscope.diagnose import Answer, Report
    from stallscope.events.trace import Trace
    from stallscope.rates import ListedPrice
    from stallscope.settings import Settings


def print_report(
    trace: Trace,
    as_json: bool,
    *,
    settings: Settings,
    details: Details | None = None,
    missing: list[dict[str, str]] | None = None,
    html: Path | None = None,
) -> Answer:
    """Diagnose the trace and print the report. Raises NotFound for a trace without usable data.

    details: tables to print after the report. missing: the nodes of --nodes without an answer; None: without --nodes.
    html: also write the report to this file, with the heat map and the evidence.
    """
    return print_reports([trace], as_json, settings=settings, details=details, missing=missing, html=html)


def _without_calls(traces: Sequence[Trace]) -> str:
    """The error message for traces without calls: it names the processes that were traced."""
    text = "the trace, or the selected part of it, has no NCCL collectives or CUDA calls"
    processes = [(int(row["pid"]), int(row["rank"])) for trace in traces for row in trace.processes]
    if not processes:
        return f"{text}; widen --since, or trace longer"
    names = ", ".join(f"{pid}{f' (rank {rank})' if rank >= 0 else ''}" for pid, rank in processes[:4])
    more = ", ..." if len(processes) > 4 else ""
    return (
        f"{text}, only {counted(len(processes), 'process')} with a GPU library: {names}{more}; trace longer. Ranks "
        "that use the CPU only, by gloo, MPI or UCX, are not traced: `stallscope stacks` prints their stacks"
    )


def print_reports(
    traces: Sequence[Trace],
    as_json: bool,
    *,
    settings: Settings,
    details: Details | None = None,
    missing: list[dict[str, str]] | None = None,
    html: Path | None = None,
) -> Answer:
    """As print_report, for several sources of one job: one report. Tables and the price are of the first source."""
    from stallscope.diagnose import as_json as report_json
    from stallscope.diagnose import joint, text

    trace = traces[0]
    listed = listed_price(trace, settings)
    reports = [report for each in traces if (report := _usable_report(each, settings, listed))]
    if not reports:
        raise NotFound(_without_calls(traces))
    report = joint(reports)
    if html is not None:
        _write_html(html, trace, report)
    if as_json:
        data = report_json(report) | ({"price": asdict(listed)} if listed else {})
        data |= {} if missing is None else {"missing": missing}
        typer.echo(json.dumps(data | (details.data(trace, report) if details else {}), indent=2))
        return report.answer
    echo_text(text.report(report))
    if listed and any(verdict.cost for verdict in report.verdicts):
        echo_text(f"\nPrice: {listed.sentence}")
    if details and (more := details.text(trace, report)):
        echo_text(more, newline=False)
    return report.answer


def _write_html(path: Path, trace: Trace, report: Report) -> None:
    from stallscope.dashboard.html_file import write_html

    n_bytes = write_html(path, trace, report, name=path.stem)
    typer.echo(f"{path}: {n_bytes:,} bytes; it contains host names", err=True)


def _usable_report(trace: Trace, settings: Settings, listed: ListedPrice | None) -> Report | None:
    """The report on a trace; None for a trace without usable data."""
    from stallscope.diagnose import can_diagnose, has_calls
    from stallscope.events.exported_verdicts import EXPORTED

    report = diagnosed(trace, settings, listed) if can_diagnose(trace) else None
    has_ranks = report and (report.examined.get("n_ranks") or EXPORTED in trace.facts)
    is_empty = not has_calls(trace) or (report and not has_ranks)
    if report is None or (is_empty and not report.verdicts and not trace.coverage.gaps):
        return None
    return report


def diagnosed(trace: Trace, settings: Settings, listed: ListedPrice | None = None) -> Report:
    """The report on a trace, with the thresholds of the settings, and the price of the settings or the listed price."""
    from stallscope.diagnose import diagnose, thresholds_of

    price = listed.usd_per_hour if listed else settings.usd_per_gpu_hour
    return diagnose(trace, thresholds_of(settings), usd_per_gpu_hour=price)


def listed_price(trace: Trace, settings: Settings) -> ListedPrice | None:
    """The listed price of the trace's GPU; None if the settings have a price, or the GPU is unknown.

    Raises NotFound for a named GPU without a price, BadInput for an invalid price file.
    """
    if settings.usd_per_gpu_hour is not None:
        return None
    from stallscope import rates

    traced_gpu = trace.facts.get("gpu", "")
    if (settings.rates or settings.provider) and not (settings.gpu or traced_gpu):
        option = "--rates" if settings.rates else "--provider"
        typer.echo(
            f"stallscope: {option} has no effect: the trace does not name its GPU model; give the model with --gpu",
            err=True,
        )
    return rates.listed(traced_gpu, settings.rates, named_gpu=settings.gpu, provider=settings.provider)
