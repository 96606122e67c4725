"""The command line. Each command is a few lines; what it needs is imported when it runs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stallscope import __version__
from stallscope.errors import BadInput, NotFound, StallscopeError

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.events.trace import Trace
    from stallscope.settings import Settings

app = typer.Typer(
    help="Which rank drags a GPU job, since when, why, and what does it cost?",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Db = Annotated[
    Path | None, typer.Option("--db", help="The node trace (default: STALLSCOPE_DB or the settings).")
]
Price = Annotated[float | None, typer.Option("--usd-per-gpu-hour", help="Price of one GPU for one hour.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
SettingsFile = Annotated[Path | None, typer.Option("--settings", help="Settings file (YAML).")]

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command()
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
    chosen = _settings(flags, settings)
    since_ns = None if since is None else _duration_ns(since, "--since")
    _print_report(node.read(chosen.db, since_ns), as_json, settings=chosen)


@app.command("import")
def import_(
    path: Annotated[
        Path,
        typer.Argument(help="A recording folder, flight-recorder dumps, or an operation trace (Parquet)."),
    ],
    db: Annotated[Path, typer.Option("--db", help="The node trace to write; must not exist yet.")],
) -> None:
    """Make a node trace from what others recorded."""
    from stallscope.importers import importer_for
    from stallscope.store import node

    importer = importer_for(path)
    trace = importer.read(path)
    node.write(db, trace)
    n_rows = {name: len(getattr(trace, name)) for name in ("collectives", "calls", "offcpu")}
    told = ", ".join(f"{n:,} {name}" for name, n in n_rows.items())
    typer.echo(f"{importer.name} {path}: {told} -> {db}")
    typer.echo(f"next: stallscope explain --db {db}")


@app.command()
def demo(
    live: Annotated[
        bool, typer.Option("--live", help="Trace a real job of emulated GPUs with eBPF (root).")
    ] = False,
    scenario: Annotated[str, typer.Option(help="What goes wrong in the live job.")] = "sleep",
    as_json: AsJson = False,
    usd_per_gpu_hour: Price = None,
) -> None:
    """Explain a recording of a real 4-GPU job; with --live a job that runs now."""
    chosen = _settings({"usd_per_gpu_hour": usd_per_gpu_hour}, None)
    if live:
        from stallscope.demo import traced

        with traced.run(scenario) as seen:
            _print_report(seen, as_json, settings=chosen)
        return
    from stallscope.demo.recording import recorded

    _print_report(recorded(), as_json, settings=chosen)


@app.command()
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
    settings: SettingsFile = None,
) -> None:
    """Trace the GPU jobs of this machine with eBPF until Ctrl-C (root)."""
    from stallscope import agent

    chosen = _settings({"db": db, "max_db_bytes": max_db, "node": node}, settings)
    agent.trace(
        agent.Options(
            db=chosen.db,
            node=chosen.node,
            max_db_bytes=chosen.max_db_bytes,
            pids=tuple(pid or ()),
            duration_s=None if duration is None else _duration_ns(duration, "--duration") / 1e9,
            record_all=record_all,
        )
    )


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"stallscope {__version__}")


def main() -> None:
    """Run the command line; an error is one line on stderr and an exit code, never a traceback."""
    with _one_line_errors():
        app()


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except StallscopeError as error:
        print(f"stallscope: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone (a pager, head): what is left would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)


def _settings(flags: Mapping[str, object], path: Path | None) -> Settings:
    from stallscope.settings import effective

    return effective(flags, os.environ, path).settings


def _print_report(trace: Trace, as_json: bool, *, settings: Settings) -> None:
    from dataclasses import replace

    from stallscope.diagnose import text
    from stallscope.diagnose.engine import diagnose
    from stallscope.diagnose.thresholds import Thresholds
    from stallscope.diagnose.verdict import as_json as report_json

    if not len(trace.collectives):
        raise NotFound(
            "there are no NCCL collectives in this trace, or in the part asked for: widen --since, or trace longer"
        )
    limits = replace(
        Thresholds(),
        min_late_ns=int(settings.min_late_ms * 1e6),
        min_late_steps=settings.min_late_steps,
        cause_share=settings.cause_share,
        hang_after_ns=int(settings.hang_after_s * 1e9),
        hang_gap_factor=settings.hang_gap_factor,
    )
    report = diagnose(trace, limits, usd_per_gpu_hour=settings.usd_per_gpu_hour)
    typer.echo(json.dumps(report_json(report), indent=2) if as_json else text.report(report))


def _duration_ns(text: str, option: str) -> int:
    """Nanoseconds of "90s", "5m" and the like; a bare number is seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", text.strip())
    if not found or float(found[1]) <= 0:
        raise BadInput(f"{option}: {text!r} is no duration; give for example 30s, 5m or 2h")
    return int(float(found[1]) * _UNITS_S[found[2] or "s"] * 1e9)
