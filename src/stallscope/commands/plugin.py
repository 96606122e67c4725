"""`stallscope plugin`: the profiler plugin of NCCL: its path, and a record of the running job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.errors import NotFound

if TYPE_CHECKING:
    from stallscope.capture.gpu import PluginState

_NOT_LOADED = (
    "no process has loaded the plugin, or this user may not read it: start the job with NCCL_PROFILER_PLUGIN"
    " (stallscope plugin path), and read it as the job's user or as root"
)

plugin_app = typer.Typer(
    help="Find the late GPU when all hosts look the same.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@plugin_app.command()
def path() -> None:
    """Print the variable that loads the plugin into a job.

    Set it with: export $(stallscope plugin path)

    The plugin costs nothing measurable until `stallscope plugin record` asks for records. NCCL loads one profiler
    plugin; STALLSCOPE_NCCL_CHAIN names another plugin that receives the same calls.
    """
    from stallscope.capture.gpu import plugin_library

    typer.echo(f"NCCL_PROFILER_PLUGIN={plugin_library()}")


@plugin_app.command("list")
def states() -> None:
    """List the processes that have loaded the plugin.

    Each line states whether the plugin records now.
    A process that is missing has not loaded the plugin, has no communicator yet, or belongs to another user.
    """
    from stallscope.capture.gpu import plugin_states

    found = plugin_states()
    if not found:
        raise NotFound(_NOT_LOADED)
    typer.echo(f"{'pid':>8} {'rank':>5} {'operations':>11} {'dropped':>8}  state, process")
    for each in found:
        rank = "-" if each.rank < 0 else str(each.rank)
        typer.echo(
            f"{each.pid:>8} {rank:>5} {each.n_records:>11,} {each.n_dropped:>8,}  {_state(each)}, {each.name}"
        )


@plugin_app.command()
def record(
    db: Annotated[Path, typer.Option("--db", help="The node trace to write; must not exist yet.")],
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=600, help="Record for this time.")
    ] = 10.0,
    pids: Annotated[
        list[int] | None, typer.Option("--pid", help="Only this process; may be repeated (default: all).")
    ] = None,
) -> None:
    """Record when collectives start on the GPUs of this machine.

    The job runs with the plugin (see `stallscope plugin path`). Kernel times cost the job up to a few percent while
    they are recorded.
    """
    import socket

    from stallscope.capture.gpu import recorded_trace
    from stallscope.store import node

    trace = recorded_trace(pids or [], seconds=seconds, node=socket.gethostname())
    if not len(trace.processes):
        raise NotFound(_NOT_LOADED)
    node.write(db, trace)
    typer.echo(f"{len(trace.processes)} ranks: {len(trace.gpu_kernels):,} operations -> {db}")
    typer.echo(f"next: stallscope explain --db {db}")


def _state(plugin: PluginState) -> str:
    if not plugin.has_thread:
        return "cannot be switched on: the process could not start one more thread"
    return "records" if plugin.is_recording else "off"
