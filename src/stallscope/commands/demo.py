"""`stallscope demo`: an answer without a job of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from stallscope.commands.options import AsJson, Price, settings_from
from stallscope.commands.report import print_report

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.demo.scenarios import Scenario
    from stallscope.settings import Settings


def demo(
    name: Annotated[
        str, typer.Argument(help="A scenario; `list` tells them, `all` runs them, none explains a recording.")
    ] = "",
    live: Annotated[
        bool, typer.Option("--live", help="Only for real: a job of emulated GPUs, traced with eBPF (root).")
    ] = False,
    scenario: Annotated[str, typer.Option(help="The same as NAME, with --live.")] = "",
    no_bpf: Annotated[
        bool, typer.Option("--no-bpf", help="Made up by the simulator: no root and no kernel needed.")
    ] = False,
    as_json: AsJson = False,
    usd_per_gpu_hour: Price = None,
) -> None:
    """Explain a recording of a real 4-GPU job, or run a scenario and explain that."""
    from stallscope.errors import BadInput

    chosen = settings_from({"usd_per_gpu_hour": usd_per_gpu_hour}, None)
    if live and no_bpf:
        raise BadInput("--live and --no-bpf exclude each other: give one of them")
    name = name or scenario or ("sleep" if live else "")
    if not name and no_bpf:
        raise BadInput("--no-bpf makes up a scenario: name one, as `stallscope demo list` tells them")
    if not name:
        from stallscope.demo.recording import recorded

        print_report(recorded(), as_json, settings=chosen)
        return
    if name == "list":
        _list(as_json)
        return
    from stallscope.demo.scenarios import SCENARIOS, named

    wanted = SCENARIOS if name == "all" else (named(name),)
    is_real = not no_bpf and (live or _can_trace())
    for number, each in enumerate(wanted):
        if len(wanted) > 1 and not as_json:
            typer.echo("\n" * bool(number) + f"== {each.name}: {each.meaning}\n")
        _show(each, is_real=is_real, as_json=as_json, settings=chosen)


def _list(as_json: bool) -> None:
    from stallscope.demo.scenarios import SCENARIOS

    if as_json:
        import json

        rows = [{"name": s.name, "meaning": s.meaning, "learn": s.learn} for s in SCENARIOS]
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(len(each.name) for each in SCENARIOS)
    for each in SCENARIOS:
        typer.echo(f"{each.name:<{width}}  {each.meaning}")


def _can_trace() -> bool:
    """Whether this machine can trace now; why not is told."""
    from stallscope.capture import requirements
    from stallscope.errors import StallscopeError

    try:
        requirements.check()
    except StallscopeError as error:
        typer.echo(f"stallscope: made up by the simulator, because: {error}", err=True)
        return False
    return True


def _show(scenario: Scenario, *, is_real: bool, as_json: bool, settings: Settings) -> None:
    """Run or make up one scenario; print its answer, and what to learn from it."""
    from stallscope.demo.scenarios import made_up

    if is_real:
        from stallscope.demo import traced

        with traced.run(scenario.fault, seconds=scenario.seconds, first_step=scenario.first_step) as seen:
            print_report(seen, as_json, settings=settings)
    else:
        print_report(made_up(scenario), as_json, settings=settings)
    if scenario.learn and not as_json:
        typer.echo("\nWhat to learn from it:\n" + "\n".join(f"  - {line}" for line in scenario.learn))
