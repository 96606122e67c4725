"""`stallscope idle`: the GPUs of this machine that jobs hold without using them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stallscope.commands.options import Db, SettingsFile, settings_from
from stallscope.events.counted import counted
from stallscope.terminal_text import echo_text

if TYPE_CHECKING:
    from stallscope.diagnose import IdleHolder

_FRESH_NS = 180_000_000_000
_SHOWN = ("job_name", "user", "account", "partition", "namespace", "workload", "unit")


def idle(
    db: Db = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    settings: SettingsFile = None,
) -> None:
    """List GPUs that are held without use: owner, since when, price.

    The holder is a job, a pod or a process. A job that waits for its peers, or that prepares data, is not listed.
    """
    from stallscope.diagnose import idle_holders, wall_text
    from stallscope.diagnose.timeline import wall_ns
    from stallscope.store import node

    chosen = settings_from({"db": db}, settings)
    trace = node.read(chosen.db)
    ends_ns = dict(enumerate(trace.ends_ns))
    holders = [
        holder
        for holder in idle_holders(trace.idle_gpus)
        if ends_ns.get(holder.node, -1) - holder.until_ns <= _FRESH_NS
    ]
    rows = [
        {
            "node": trace.nodes[holder.node],
            "holder": holder.holder,
            "gpus": list(holder.gpus),
            "reason": holder.reason,
            "since": wall_text(wall_ns(trace, holder.node, holder.since_ns)),
            "gpu_hours": round(holder.gpu_ns / 3.6e12, 3),
            "usd_per_hour": _price(holder, chosen.usd_per_gpu_hour),
            "owner": holder.owner,
        }
        for holder in holders
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    for row, holder in zip(rows, holders, strict=True):
        echo_text(_line(row, holder))
    if not rows:
        typer.echo("no GPU in this trace is held without use")


def _line(row: Mapping[str, Any], holder: IdleHolder) -> str:
    shown = [f"{label} {holder.owner[label]}" for label in _SHOWN if label in holder.owner]
    cost = f", ${row['usd_per_hour']:,.2f} per hour" if row["usd_per_hour"] is not None else ""
    gpus = counted(len(holder.gpus), "GPU")
    return (
        f"{row['node']}: {holder.holder} ({', '.join(shown) or 'owner unknown'}) holds {gpus}"
        f" ({', '.join(holder.gpus)}) without use since {row['since']}: {holder.reason}{cost}"
    )


def _price(holder: IdleHolder, usd_per_gpu_hour: float | None) -> float | None:
    return None if usd_per_gpu_hour is None else round(usd_per_gpu_hour * len(holder.gpus), 4)
