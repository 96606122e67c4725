"""`stallscope stacks`: the stacks of all GPU processes, grouped by similarity, outliers first."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.fleet import (
    NODES_TIMEOUT,
    CaCert,
    ClientCert,
    ClientKey,
    FleetOptions,
    Nodes,
    NodesTimeout,
    NoTls,
    TokenFile,
    fleet_trace,
    is_fleet,
    missing_data,
    refuse_partial,
)
from stallscope.commands.options import AsJson, SettingsFile, settings_from
from stallscope.errors import NotFound
from stallscope.events.counted import counted
from stallscope.terminal_text import echo_text

if TYPE_CHECKING:  # importing it here would slow every command
    from stallscope.diagnose.views import ProcessStack, StackGroup
    from stallscope.query.remote_nodes import Failure

_NO_STACKS_NOW = (
    "no stacks: no process has a GPU library, or its memory cannot be read; run as root, or give a trace"
)
_NO_STACKS_RECORDED = "the trace has no stacks: trace without --no-stacks while the job runs"
_MAX_FRAMES = 24
_LETTERS = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk or a driver",
    "T": "stopped",
    "Z": "ended",
}


def stacks(
    file: Annotated[
        Path | None,
        typer.Argument(help="A node trace; without it the current processes of this machine."),
    ] = None,
    as_json: AsJson = False,
    nodes: Nodes = None,
    timeout: NodesTimeout = NODES_TIMEOUT,
    token_file: TokenFile = None,
    ca_cert: CaCert = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    no_tls: NoTls = False,
    settings: SettingsFile = None,
) -> None:
    """Print the stacks of all GPU processes, outliers first.

    With --nodes, the exit code is 22 if nodes are missing, and --json prints an object with `groups` and `missing`.
    """
    from stallscope.diagnose.views import groups, latest_stacks
    from stallscope.store import node

    fleet = FleetOptions(nodes, token_file, ca_cert, client_cert, client_key, no_tls, timeout)
    chosen = settings_from(fleet.flags(), settings)
    failures: list[Failure] = []
    of_nodes = is_fleet(chosen, fleet, file)
    if of_nodes:
        trace, failures = fleet_trace(chosen, fleet, 60 * 10**9)
        stack_list = latest_stacks(trace)
    else:
        stack_list = latest_stacks(node.read(file)) if file else _live()
    if not stack_list:
        raise NotFound(_NO_STACKS_RECORDED if file or of_nodes else _NO_STACKS_NOW)
    grouped = groups(stack_list)
    if as_json:
        data = [_data(group) for group in grouped]
        answer = {"missing": missing_data(failures), "groups": data} if of_nodes else data
        typer.echo(json.dumps(answer, indent=2))
    else:
        echo_text(_text(grouped))
    refuse_partial(failures, chosen.nodes.count(",") + 1)


def _live() -> list[ProcessStack]:
    import platform

    from stallscope.capture.stacks_now import stacks_now
    from stallscope.diagnose.views import ProcessStack
    from stallscope.events.layout import UNKNOWN

    return [
        ProcessStack(
            node=platform.node(),
            pid=entry.pid,
            rank=None if entry.rank == UNKNOWN else entry.rank,
            command=entry.command,
            state=_LETTERS.get(entry.state, "unknown"),
            waits_for=entry.waits_for,
            frames=entry.frames,
        )
        for entry in stacks_now()
    ]


def _data(group: StackGroup) -> dict[str, object]:
    return {"processes": [asdict(process) for process in group.members], "frames": group.frames}


def _text(grouped: list[StackGroup]) -> str:
    n = sum(len(group.members) for group in grouped)
    n_groups = counted(len(grouped), "group")
    lines = [f"{counted(n, 'process')} in {n_groups} of similar stacks, smallest group first"]
    for number, group in enumerate(grouped, 1):
        names = ", ".join(_name(process) for process in group.members[:8])
        more = f" and {len(group.members) - 8} more" if len(group.members) > 8 else ""
        states = {
            f"{process.state}{f': {process.waits_for}' if process.waits_for else ''}"
            for process in group.members
        }
        lines += [
            "",
            f"[{number}/{len(grouped)}] {len(group.members)}: {names}{more} ({'; '.join(sorted(states)[:3])})",
        ]
        frames = [frame for frame in group.frames if not frame.startswith("<frozen ")]
        lines += [f"    {frame}" for frame in frames[:_MAX_FRAMES]] or ["    (no frames)"]
        if len(frames) > _MAX_FRAMES:
            lines.append(f"    {len(frames) - _MAX_FRAMES} more frames")
    return "\n".join(lines)


def _name(process: ProcessStack) -> str:
    of = f"rank {process.rank}" if process.rank is not None else process.command or "process"
    return f"{of} ({process.node} {process.pid})"
