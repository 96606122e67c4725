"""`stallscope trace --ras`: watches a running job through NCCL's RAS service, without root and without eBPF."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from stallscope.terminal_text import echo_text

if TYPE_CHECKING:  # importing these here would slow every command
    from stallscope.diagnose import Report
    from stallscope.importers.ras_answer import Answer
    from stallscope.settings import Settings

_POLL_S = 15.0
_KEPT = 8  # answers: at most two minutes


def watch(
    address: str,
    *,
    settings: Settings,
    duration_s: float | None,
    as_json: bool,
    poll_s: float = _POLL_S,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Poll the service until the time is up or Ctrl-C, and print each new finding once.

    Nothing is printed while the counters move. Raises Unreachable if the first poll fails, BadInput.
    """
    from stallscope.importers.ras_client import ask, host_and_port

    host_and_port(address)  # before the first line
    if not as_json:
        typer.echo(f"polling NCCL's RAS service at {address} every {poll_s:.0f} s; Ctrl-C stops", err=True)
    begin_s, printed, answers = time.monotonic(), "", [ask(address)]
    try:
        while duration_s is None or time.monotonic() - begin_s + poll_s <= duration_s or len(answers) < 2:
            sleep(poll_s)
            answers = _with_next(answers, address)
            if len(answers) > 1:
                printed = _print_new(answers, printed, settings=settings, as_json=as_json)
    except KeyboardInterrupt:
        return


def _with_next(answers: list[Answer], address: str) -> list[Answer]:
    """The answers with a new answer; a failed poll is reported, and the next poll may succeed."""
    from stallscope.errors import BadTrace, Unreachable
    from stallscope.importers.ras_client import ask

    try:
        return [*answers[-_KEPT:], ask(address)]
    except (Unreachable, BadTrace) as error:
        typer.echo(f"stallscope: {error}", err=True)
        return answers[:1]


def _print_new(answers: list[Answer], printed: str, *, settings: Settings, as_json: bool) -> str:
    """Print the report on the answers if it differs from the last report. Returns the finding that is now known."""
    from stallscope.commands.report import diagnosed
    from stallscope.diagnose import as_json as report_json
    from stallscope.diagnose import text
    from stallscope.importers.ras_status import trace_of_answers

    report = diagnosed(trace_of_answers(answers), settings)
    finding = _finding(report)
    if finding == printed:
        return printed
    if not finding:
        typer.echo("the counters increase again" if not as_json else json.dumps({"answer": "moving"}))
    elif as_json:
        typer.echo(json.dumps(report_json(report)))
    else:
        echo_text(f"{text.report(report)}\n")
    return finding


def _finding(report: Report) -> str:
    """The kind and the ranks of each verdict, or the reason why there is none; "" while the counters move."""
    if report.verdicts:
        return "; ".join(f"{verdict.kind} {verdict.ranks} {verdict.comm_hash}" for verdict in report.verdicts)
    reasons = [gap.reason for gap in report.gaps if not gap.reason.startswith("no two answers")]
    return reasons[0].split(" within ")[0] if reasons else ""
