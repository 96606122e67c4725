"""The viewer process: reads the rows that the agent commits, and ends when the agent ends.

viewer.py starts it. Standard input carries the agent's notes; its end means that the agent ended.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stallscope.diagnose import diagnose, text
from stallscope.errors import StallscopeError
from stallscope.events.counted import counted
from stallscope.events.trace import Clock, Trace
from stallscope.live.host_load import System
from stallscope.live.job_totals import LiveState
from stallscope.live.keyboard import opened
from stallscope.live.page_view import Panel, View
from stallscope.live.request_lines import RequestState
from stallscope.live.tail import TraceTail
from stallscope.live.terminal_page import Page, VerdictLine, drawn, n_jobs, shown_ranks
from stallscope.live.trace_records import records, verdict_record
from stallscope.store import node

_EVERY_S = 1.0
_KEY_EVERY_S = 0.2
_MAX_VERDICTS = 20
_LATE = "the job ran before the trace began: the lateness of its ranks is an estimate"
_LAST_HEIGHT = 60
"""The last screen may be longer than the terminal: it scrolls."""


Verdicts = list[tuple[int, dict[str, Any]]]
"""Changes of incidents, see TraceTail.verdicts()."""


@dataclass(frozen=True)
class ViewerTask:
    """Contents to show. since_ns: ignore older rows. agent: its process. is_json: records instead of the page."""

    db: Path
    since_ns: int
    agent: int
    is_json: bool


@dataclass
class AgentNotes:
    """The agent's notes; is_over once the agent has ended."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    is_over: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Read lines from standard input until it ends."""
        for line in sys.stdin:
            self.lines.append(line.rstrip("\n"))
        self.is_over.set()


def main() -> None:
    """Show the trace until the agent ends. Ctrl-C is ignored: the agent handles it and then ends this process."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    arguments = json.loads(sys.argv[1])
    task = ViewerTask(**(arguments | {"db": Path(arguments["db"])}))
    notes = AgentNotes()
    threading.Thread(target=notes.read, daemon=True, name="notes").start()
    try:
        watch(task, notes)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except StallscopeError as error:
        print(f"stallscope: {error}", file=sys.stderr)


def watch(task: ViewerTask, notes: AgentNotes) -> None:
    """Follow the trace and show it. Raises StallscopeError, BrokenPipeError."""
    if not _has_begun(task.db, notes):
        return
    with ExitStack() as stack:
        db = stack.enter_context(node.reading(task.db))
        following = TraceTail(db, task.since_ns)
        show = _Records() if task.is_json else stack.enter_context(_Screen(task, notes))
        is_last = False
        while not is_last:
            is_last = show.wait(notes.is_over, _EVERY_S)
            show.show(following.batch(), following.verdicts())


def _has_begun(db: Path, notes: AgentNotes) -> bool:
    """Wait until the trace exists; False if the agent ended before. On a busy machine this may take a minute."""
    while not notes.is_over.is_set():
        try:
            with node.reading(db):
                return True
        except StallscopeError:
            notes.is_over.wait(0.1)
    return False


class _Records:
    """Prints one record per line."""

    def __init__(self) -> None:
        self._clock: Clock | None = None

    def wait(self, is_over: threading.Event, seconds: float) -> bool:
        """Wait for the next rows. Returns whether the agent has ended."""
        return is_over.wait(seconds)

    def show(self, batch: Trace, verdicts: Verdicts) -> None:
        """Print new rows and changes."""
        self._clock = batch.clocks[-1] if batch.clocks else self._clock
        changes = (verdict_record(at_ns, verdict) for at_ns, verdict in verdicts)
        for record in (*records(batch, self._clock), *changes):
            sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()


class _Screen:
    """Draws the page on the terminal; the last page stays visible at the end."""

    def __init__(self, task: ViewerTask, notes: AgentNotes):
        from rich.console import Console
        from rich.live import Live

        self._task, self._notes = task, notes
        self._state, self._requests, self._system = LiveState(), RequestState(), System(task.agent)
        self._verdicts: dict[str, VerdictLine] = {}
        self._begin_s = time.monotonic()
        self._console = Console(highlight=False)
        self._view = View()
        self._report = ""
        self._page = self._current_page()
        self._keys = opened()
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, get_renderable=self._drawn, transient=True
        )

    def __enter__(self) -> "_Screen":
        self._keyboard = self._keys.__enter__()
        self._live.__enter__()
        signal.signal(signal.SIGWINCH, lambda number, frame: self._live.refresh())
        return self

    def __exit__(self, *raised: object) -> None:
        signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        self._live.__exit__(None, None, None)
        self._keys.__exit__(None, None, None)
        self._console.print(drawn(self._current_page(), self._console.width, _LAST_HEIGHT))

    def wait(self, is_over: threading.Event, seconds: float) -> bool:
        """React to keys until the next rows are due. Returns whether the agent has ended."""
        end_s = time.monotonic() + seconds
        while not is_over.is_set() and (left_s := end_s - time.monotonic()) > 0:
            for key in self._keyboard.keys(min(left_s, _KEY_EVERY_S)):
                self._react(key)
        return is_over.is_set()

    def _react(self, key: str) -> None:
        if key == "q":
            os.kill(self._task.agent, signal.SIGINT)
            return
        pids = [line.pid for line in shown_ranks(self._page, self._view)]
        self._view = self._view.after(key, pids, n_jobs(self._page))
        if key == "e" and self._view.panel is Panel.EXPLAIN:
            self._report = ""
            threading.Thread(target=self._explain, daemon=True, name="explain").start()
        self._page = replace(self._page, report=self._report)
        self._live.refresh()

    def _explain(self) -> None:
        """The report on the trace so far, in a thread of its own: it may take seconds."""
        try:
            report = text.report(diagnose(node.read(self._task.db)))
        except StallscopeError as error:
            report = str(error)
        self._report = report
        self._page = replace(self._page, report=report)
        self._live.refresh()

    def show(self, batch: Trace, verdicts: Verdicts) -> None:
        """Draw the current state."""
        self._state.feed(batch)
        self._requests.feed(batch)
        for at_ns, verdict in verdicts:
            self._take(at_ns, verdict)
        if not self._view.is_paused:
            self._page = self._current_page()
        self._live.refresh()

    def _take(self, at_ns: int, verdict: dict[str, Any]) -> None:
        """One line for each incident, with the time at which it opened; newest last, at most twenty."""
        known = self._verdicts.get(verdict["incident"])
        moment = known.time if known else time.strftime("%H:%M:%S", time.gmtime(at_ns / 1e9))
        is_over = verdict["state"] == "closed"
        summary = verdict["summary"] + (f" Over: {verdict['closed_because']}." if is_over else "")
        pids = tuple(verdict.get("pids", ()))
        self._verdicts[verdict["incident"]] = VerdictLine(moment, is_over, summary, verdict["severity"], pids)
        while len(self._verdicts) > _MAX_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]

    def _current_page(self) -> Page:
        state = self._state
        ranks = state.ranks()
        n = sum(line.is_alive for line in ranks)
        runs = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - self._begin_s))
        rounds = max(state.n_rounds.values(), default=0)
        return Page(
            title=f"stallscope  {self._task.db}  {runs}",
            job=f"{counted(n, 'process', 'processes')}, {counted(state.n_communicators, 'communicator')}, "
            f"{counted(rounds, 'round')}, {counted(state.n_records, 'record')}",
            system=self._system.line(),
            ranks=ranks,
            operations=state.operations(),
            host_lines=[
                *([_LATE] if state.was_late else []),
                *(f"CPU taken by {name} {pid}: {ms:,.0f} ms in 10 s" for name, pid, ms in state.hosts()),
                *state.machine(),
            ],
            verdicts=list(self._verdicts.values()),
            n_lost=state.n_lost,
            lost=state.lost,
            notes=list(self._notes.lines),
            report=self._report,
            endpoints=self._requests.endpoints(),
            open_requests=self._requests.open_requests(),
        )

    def _drawn(self) -> Any:
        return drawn(self._page, self._console.width, self._console.height, self._view)


if __name__ == "__main__":
    main()
