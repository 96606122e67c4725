"""`stallscope explain`: the diagnosis of a node trace."""

from __future__ import annotations

from typing import Annotated

import typer

from stallscope.commands.options import AsJson, Db, Price, SettingsFile, duration_ns, settings_from
from stallscope.commands.report import print_report


def explain(
    db: Db = None,
    since: Annotated[str | None, typer.Option(help="Only the last part of the trace: 30s, 5m, 2h.")] = None,
    as_json: AsJson = False,
    usd_per_gpu_hour: Price = None,
    min_late: Annotated[
        float | None, typer.Option("--min-late", help="Lateness in ms that is never reported.")
    ] = None,
    settings: SettingsFile = None,
) -> None:
    """Say which rank drags the job in a trace, since when, why, and what it costs."""
    from stallscope.store import node

    flags = {"db": db, "usd_per_gpu_hour": usd_per_gpu_hour, "min_late_ms": min_late}
    chosen = settings_from(flags, settings)
    since_ns = None if since is None else duration_ns(since, "--since")
    print_report(node.read(chosen.db, since_ns), as_json, settings=chosen)
