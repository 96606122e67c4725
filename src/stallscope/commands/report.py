"""The answer of the diagnosis, as every command prints it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from stallscope.errors import NotFound

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.commands.details import Details
    from stallscope.diagnose.verdict import Report
    from stallscope.events.trace import Trace
    from stallscope.settings import Settings


def print_report(trace: Trace, as_json: bool, *, settings: Settings, details: Details | None = None) -> None:
    """Diagnose the trace and print what was found. Raises NotFound for a trace in which there is nothing to judge.

    details: what is told besides.
    """
    from stallscope.diagnose import already_still, text
    from stallscope.diagnose.verdict import as_json as report_json

    has_rows = len(trace.collectives) or len(trace.calls) or len(trace.spans)
    listed = listed_price(trace, settings)
    report = diagnosed(trace, settings, listed) if has_rows or already_still.is_for(trace) else None
    if report is None or (not has_rows and report.healthy):
        raise NotFound(
            "there are no NCCL collectives or CUDA calls in this trace, or in the part asked for: "
            "widen --since, or trace longer"
        )
    if as_json:
        data = report_json(report) | ({"price": asdict(listed)} if listed else {})
        typer.echo(json.dumps(data | (details.data(trace, report) if details else {}), indent=2))
        return
    typer.echo(text.report(report))
    if listed and any(verdict.cost for verdict in report.verdicts):
        typer.echo(f"\nPrice: {listed.sentence}")
    if details and (more := details.text(trace, report)):
        typer.echo(more, nl=False)


def diagnosed(trace: Trace, settings: Settings, listed: Listed | None = None) -> Report:
    """The report on a trace, with the thresholds of the settings, and their price or a listed one."""
    from stallscope.diagnose.engine import diagnose
    from stallscope.diagnose.thresholds import thresholds

    price = listed.usd_per_hour if listed else settings.usd_per_gpu_hour
    return diagnose(trace, thresholds(settings), usd_per_gpu_hour=price)


@dataclass(frozen=True)
class Listed:
    """A price from the table of rates."""

    usd_per_hour: float
    gpu: str
    provider: str
    as_of: str
    origin: str

    @property
    def sentence(self) -> str:
        """For people."""
        return (
            f"{self.usd_per_hour:.2f} USD per GPU hour, the list price of {self.gpu} ({self.provider}) "
            f"as of {self.as_of}; yours: --usd-per-gpu-hour or --rates."
        )


def listed_price(trace: Trace, settings: Settings) -> Listed | None:
    """The price of the trace's GPU by the table of rates; None where one is given, or the GPU is not known.

    Raises NotFound for a GPU that was named and has no price, BadInput for a broken table.
    """
    gpu = settings.gpu or trace.facts.get("gpu", "")
    if settings.usd_per_gpu_hour is not None or not gpu:
        return None
    from stallscope import rates

    table = rates.load(settings.rates)
    found = rates.lookup(table, gpu=gpu, provider=settings.provider or None)
    if found is None and settings.gpu:
        raise NotFound(f"{table.origin} has no price of a {gpu!r}: `stallscope rates` lists what there is")
    if found is None:
        return None
    return Listed(found.rate.usd_per_hour, found.rate.gpu, found.rate.provider, table.as_of, table.origin)
