"""`stallscope demo`: an answer without a job of your own."""

from __future__ import annotations

from typing import Annotated

import typer

from stallscope.commands.options import AsJson, Price, settings_from
from stallscope.commands.report import print_report


def demo(
    live: Annotated[
        bool, typer.Option("--live", help="Trace a real job of emulated GPUs with eBPF (root).")
    ] = False,
    scenario: Annotated[str, typer.Option(help="What goes wrong in the live job.")] = "sleep",
    as_json: AsJson = False,
    usd_per_gpu_hour: Price = None,
) -> None:
    """Explain a recording of a real 4-GPU job; with --live a job that runs now."""
    chosen = settings_from({"usd_per_gpu_hour": usd_per_gpu_hour}, None)
    if live:
        from stallscope.demo import traced

        with traced.run(scenario) as seen:
            print_report(seen, as_json, settings=chosen)
        return
    from stallscope.demo.recording import recorded

    print_report(recorded(), as_json, settings=chosen)
