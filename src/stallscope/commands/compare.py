"""`stallscope compare`: two traces, two windows of one trace, or two jobs of a hub."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stallscope.commands.options import (
    AsJson,
    CaFile,
    SettingsFile,
    TokenFile,
    check_no_hub_options,
    settings_from,
)
from stallscope.errors import BadInput
from stallscope.terminal_text import echo_text

if TYPE_CHECKING:
    from stallscope.settings import Settings

REGRESSION_EXIT_CODE = 23
"""After 0, 20, 21 and 22, the exit codes of `explain`."""


def compare(
    before: Annotated[
        str, typer.Argument(help="Trace, file of another tool, saved `explain --json`; with --hub: job.")
    ],
    after: Annotated[str, typer.Argument(help="The same. PATH@14:00..14:10 is a window of a trace (UTC).")],
    max_growth: Annotated[
        float, typer.Option("--max-growth", min=0, help="Accepted growth of the step time, in percent.")
    ] = 5.0,
    hub: Annotated[
        str | None,
        typer.Option("--hub", help="Address of the hub of both jobs: https://HOST:8081."),
    ] = None,
    token_file: TokenFile = None,
    ca_cert: CaFile = None,
    as_json: AsJson = False,
    settings: SettingsFile = None,
) -> None:
    """Compare two jobs, or one job before and after a change.

    Exit codes: 0 no regression, 21 inconclusive, 23 a regression; others: an error.
    """
    from stallscope.commands.ask import client_from
    from stallscope.commands.hub_job import report_of_job
    from stallscope.diagnose import Answer, compared

    chosen = settings_from({}, settings)
    if not math.isfinite(max_growth):
        raise BadInput(f"--max-growth is {max_growth}; give a number of percent")
    if hub is None:
        check_no_hub_options(token_file, ca_cert, needs="--hub")

    def report(text: str) -> dict[str, Any]:
        if hub is None:
            return report_of(text, chosen)
        return report_of_job(client_from(hub, token_file, ca_cert, settings=settings), text)

    comparison = compared(report(before), report(after), max_growth=max_growth / 100)
    if as_json:
        typer.echo(json.dumps(comparison.as_json(), indent=2))
    else:
        echo_text(comparison.text())
    codes = {"regression": REGRESSION_EXIT_CODE, "inconclusive": Answer.INCONCLUSIVE.exit_code}
    raise typer.Exit(codes.get(comparison.answer, 0))


def report_of(text: str, settings: Settings) -> dict[str, Any]:
    """The JSON report on PATH, PATH@FROM..TO, or a saved report. Raises StallscopeError."""
    from stallscope.commands.explain_files import is_node_trace
    from stallscope.commands.part import part_from
    from stallscope.store import node

    path, begin, end = _window(text)
    if not path.exists() or is_node_trace(path):
        trace = node.read(path, part=part_from(None, begin, end, step=None, phase=None))
        return report_on(trace, settings)
    if begin or end:
        raise BadInput(f"{text}: only a node trace has windows; import {path} first")
    if (saved := _saved(path)) is not None:
        return saved
    from stallscope.importers.reading import read_files

    traces = read_files([path]).traces
    if len(traces) > 1:
        raise BadInput(f"{path} contains {len(traces)} kinds of data that cannot be compared as one job")
    return report_on(traces[0], settings)


def report_on(trace: Any, settings: Settings) -> dict[str, Any]:
    """The JSON report on a trace."""
    from stallscope.commands.report import diagnosed
    from stallscope.diagnose import as_json

    return as_json(diagnosed(trace, settings))


def _window(text: str) -> tuple[Path, str | None, str | None]:
    """PATH@FROM..TO; either end may be empty. An @ in the name of an existing file starts no window."""
    name, at, window = text.rpartition("@")
    has_window = at and ".." in window and not Path(text).exists()
    path, window = (name, window) if has_window else (text, "")
    if not path.strip():
        raise BadInput(f"{text!r}: the path of the trace is empty; check the variable that contains it")
    begin, _, end = window.partition("..")
    return Path(path), begin or None, end or None


def _saved(path: Path) -> dict[str, Any] | None:
    """A saved answer of `explain --json`; None for another file."""
    if path.is_dir():
        return None
    try:
        with path.open("rb") as stream:
            if stream.read(1) != b"{":
                return None
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and {"answer", "examined", "verdicts"} <= data.keys() else None
