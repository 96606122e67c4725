"""The answer of the diagnosis, as every command prints it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from stallscope.errors import NotFound

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.diagnose.thresholds import Thresholds
    from stallscope.diagnose.verdict import Report
    from stallscope.events.trace import Trace
    from stallscope.settings import Settings


def print_report(trace: Trace, as_json: bool, *, settings: Settings) -> None:
    """Diagnose the trace and print what was found. Raises NotFound for a trace in which there is nothing to judge."""
    from stallscope.diagnose import text
    from stallscope.diagnose.verdict import as_json as report_json

    if not len(trace.collectives) and not len(trace.calls) and not len(trace.spans):
        raise NotFound(
            "there are no NCCL collectives or CUDA calls in this trace, or in the part asked for: "
            "widen --since, or trace longer"
        )
    report = diagnosed(trace, settings)
    typer.echo(json.dumps(report_json(report), indent=2) if as_json else text.report(report))


def diagnosed(trace: Trace, settings: Settings) -> Report:
    """The report on a trace, with the thresholds and the price of the settings."""
    from stallscope.diagnose.engine import diagnose

    return diagnose(trace, thresholds(settings), usd_per_gpu_hour=settings.usd_per_gpu_hour)


def thresholds(settings: Settings) -> Thresholds:
    """The thresholds of the diagnosis, as far as the settings change them."""
    from dataclasses import replace

    from stallscope.diagnose.thresholds import Thresholds

    return replace(
        Thresholds(),
        min_late_ns=int(settings.min_late_ms * 1e6),
        min_late_steps=settings.min_late_steps,
        cause_share=settings.cause_share,
        hang_after_ns=int(settings.hang_after_s * 1e9),
        hang_gap_factor=settings.hang_gap_factor,
    )
