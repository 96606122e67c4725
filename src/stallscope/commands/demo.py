"""`stallscope demo`: a diagnosis without a job of your own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.options import AsJson, Price, settings_from
from stallscope.commands.report import print_report
from stallscope.events.counted import counted
from stallscope.terminal_text import echo_text

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.demo.real_gpu import GpuLibraries
    from stallscope.demo.scenarios import Scenario
    from stallscope.events.trace import Trace


def _scenario_names(incomplete: str) -> list[str]:
    """The names for the completion of the shell."""
    from stallscope.demo.faults import FAULTS
    from stallscope.demo.scenarios import SCENARIOS

    names = ("list", "all", "data", *(scenario.name for scenario in SCENARIOS), *FAULTS)
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


def demo(
    name: Annotated[
        str,
        typer.Argument(
            help="A scenario; `list`: list all, `all`: run all, `data`: write sample data; none: explain a recording.",
            autocompletion=_scenario_names,
        ),
    ] = "",
    folder: Annotated[
        Path | None, typer.Argument(help="With `data`: the folder for three node traces and a hub's folder.")
    ] = None,
    live: Annotated[
        bool,
        typer.Option("--live", help="Require a real run: a job of emulated GPUs, traced with eBPF (root)."),
    ] = False,
    scenario: Annotated[
        str, typer.Option(help="Same as NAME, with --live.", autocompletion=_scenario_names)
    ] = "",
    no_bpf: Annotated[
        bool, typer.Option("--no-bpf", help="Use the simulator: needs no root and no kernel support.")
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="Require a real run on this machine's GPUs: one rank per GPU (root, CUDA, NCCL)."
        ),
    ] = False,
    db: Annotated[
        Path | None,
        typer.Option("--db", help="Keep the scenario's trace in this file, for further commands."),
    ] = None,
    as_json: AsJson = False,
    usd_per_gpu_hour: Price = None,
) -> None:
    """Explain a recording of a real job, or run a scenario."""
    from stallscope.errors import BadInput

    chosen = settings_from({"usd_per_gpu_hour": usd_per_gpu_hour}, None)
    if no_bpf and (live or gpu):
        raise BadInput(f"--{'gpu' if gpu else 'live'} and --no-bpf exclude each other; give only one")
    if folder is not None and name != "data":
        raise BadInput("only `stallscope demo data` takes a folder")
    name = name or scenario or ("sleep" if live or gpu else "")
    if not name and no_bpf:
        raise BadInput("--no-bpf simulates a scenario; give a name from `stallscope demo list`")
    if db and name in ("", "all", "list", "data"):
        raise BadInput("--db keeps the trace of one scenario; give a name from `stallscope demo list`")
    if db and db.exists():
        raise BadInput(f"--db: {db} exists already; choose another name, or remove it first")
    if not name:
        from stallscope.demo.recorded_job import recorded

        print_report(recorded(), as_json, settings=chosen)
        return
    if name == "list":
        _list(as_json)
        return
    if name == "data":
        _write_data(folder)
        return
    from stallscope.demo.scenarios import SCENARIOS, named

    wanted: tuple[Scenario, ...] = SCENARIOS if name == "all" else (named(name),)
    gpus = _gpus() if gpu else None
    if gpus:
        wanted = _on_real_gpus(wanted)
    is_real = not no_bpf and (live or gpu or _can_trace())
    for number, each in enumerate(wanted):
        if len(wanted) > 1 and not as_json:
            echo_text("\n" * bool(number) + f"== {each.name}: {each.meaning}\n")
        trace = _traced(each, db, gpus) if is_real else _made_up(each, db)
        print_report(trace, as_json, settings=chosen)
        if each.learn and not as_json:
            echo_text("\nLessons:\n" + "\n".join(f"  - {line}" for line in each.learn))


def _list(as_json: bool) -> None:
    from stallscope.demo.scenarios import SCENARIOS

    if as_json:
        import json

        rows = [{"name": s.name, "meaning": s.meaning, "learn": s.learn} for s in SCENARIOS]
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(len(each.name) for each in SCENARIOS)
    for each in SCENARIOS:
        echo_text(f"{each.name:<{width}}  {each.meaning}")


def _write_data(folder: Path | None) -> None:
    from stallscope.commands import demo_data
    from stallscope.errors import BadInput, remedy_for_extra

    if folder is None:
        raise BadInput("name a folder: stallscope demo data FOLDER")
    written = demo_data.write(folder)
    for path in written:
        typer.echo(path)
    if written[-1].name != demo_data.HUB_FOLDER:
        echo_text(f"stallscope: no hub folder was written: {remedy_for_extra('hub')}", err=True)
    traces = " ".join(str(path) for path in written if path.suffix == ".db")
    echo_text(f"next: stallscope merge {traces} -o {folder / 'all.db'}")
    echo_text(f"      stallscope explain {folder / 'all.db'}; {folder / 'answer.json'} contains the answer")


def _can_trace() -> bool:
    """Whether this machine can trace now; the reason against it is printed."""
    from stallscope.capture.probes import preflight
    from stallscope.demo import build
    from stallscope.errors import StallscopeError

    try:
        preflight.check()
        build.build()
    except StallscopeError as error:
        echo_text(f"stallscope: simulated, because a live job cannot be traced here: {error}", err=True)
        return False
    return True


def _gpus() -> GpuLibraries:
    """The GPUs, after checking that this machine can trace. Raises NotFound, CannotTrace."""
    from stallscope.capture.probes import preflight
    from stallscope.demo import real_gpu

    gpus = real_gpu.libraries()
    preflight.check()
    versions = f"{counted(gpus.n_gpus, 'GPU')}, {gpus.cudart}, {gpus.nccl}"
    echo_text(f"stallscope: {versions}", err=True)
    if gpus.n_gpus == 1:
        echo_text(
            "stallscope: with one GPU no rank waits for another; only the rank's own calls are reported",
            err=True,
        )
    return gpus


def _on_real_gpus(wanted: tuple[Scenario, ...]) -> tuple[Scenario, ...]:
    """The scenarios that need no emulated device. Raises BadInput if none remain."""
    from stallscope.errors import BadInput

    remaining = tuple(each for each in wanted if each.fault != "gpu-steal")
    if not remaining:
        raise BadInput("gpu-steal runs on an emulated GPU; omit --gpu")
    return remaining


def _traced(scenario: Scenario, db: Path | None, gpus: GpuLibraries | None) -> Trace:
    """Run the scenario as real processes under the agent. Raises CannotTrace before the job starts."""
    from stallscope.capture.probes import preflight
    from stallscope.demo import traced

    preflight.check()
    with traced.run(
        scenario.fault, seconds=scenario.seconds, first_step=scenario.first_step, trace_db=db, gpus=gpus
    ) as trace:
        return trace


def _made_up(scenario: Scenario, db: Path | None) -> Trace:
    from stallscope.demo.scenarios import simulated
    from stallscope.store import node

    trace = simulated(scenario)
    if db:
        node.write(db, trace)
    return trace
