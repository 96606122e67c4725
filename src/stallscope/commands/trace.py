"""`stallscope trace`: the agent of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from stallscope.commands.options import Db, SettingsFile, duration_ns, settings_from


def trace(
    db: Db = None,
    pid: Annotated[
        list[int] | None, typer.Option(help="Only this process and its children; may be repeated.")
    ] = None,
    duration: Annotated[str | None, typer.Option(help="Stop after this time: 30s, 5m.")] = None,
    max_db: Annotated[
        str | None, typer.Option("--max-db", help="Size at which the oldest rows go: 500MB, 10GB.")
    ] = None,
    node: Annotated[str | None, typer.Option(help="Name of this machine in the trace.")] = None,
    record_all: Annotated[
        bool, typer.Option("--record-all", help="Keep every raw event (much data).")
    ] = False,
    prometheus: Annotated[
        str, typer.Option(help="Serve metrics for Prometheus at this address: 0.0.0.0:9464.")
    ] = "",
    otlp: Annotated[
        str, typer.Option(help="Send metrics and incidents by OTLP: http://HOST:4318, grpc://HOST:4317.")
    ] = "",
    settings: SettingsFile = None,
) -> None:
    """Trace the GPU jobs of this machine with eBPF until Ctrl-C (root)."""
    from stallscope import agent

    chosen = settings_from({"db": db, "max_db_bytes": max_db, "node": node}, settings)
    agent.trace(
        agent.Options(
            db=chosen.db,
            node=chosen.node,
            max_db_bytes=chosen.max_db_bytes,
            pids=tuple(pid or ()),
            duration_s=None if duration is None else duration_ns(duration, "--duration") / 1e9,
            record_all=record_all,
            prometheus=prometheus,
            otlp=otlp,
        )
    )
