"""The live demo: a job with a fault, and the agent next to it as a user would start it.

The agent is a separate process, so that the demo shows the behaviour of `stallscope trace`.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from stallscope.demo import build, live_demo
from stallscope.demo.faults import FAULTS
from stallscope.demo.plan import Plan
from stallscope.demo.real_gpu import GpuLibraries
from stallscope.errors import CannotTrace
from stallscope.events.trace import Trace
from stallscope.store import node
from stallscope.terminal_text import echo_text

COMMAND = (
    sys.executable,
    "-c",
    "import signal; from stallscope.demo.plan import end_with_parent; end_with_parent(signal.SIGINT); "
    "from stallscope.cli import main; main()",
)
"""The command line of the agent, which ends as by Ctrl-C if the demo is killed."""

SECONDS = 12.0
HANG_SECONDS = 20.0
"""The duration of a scenario; a hang is reported only after the agent has observed it for a while."""

MIN_OCCURRENCES = 10
"""Of a periodic fault. On a busy machine a job of 12 s may have so few steps that its fault does not occur."""

ATTACH_S = 90.0
END_S = 90.0
SLACK_S = 60.0
"""On a machine with ten times as many tasks as CPUs, the agent needs up to a minute to attach, and to end."""


def _print_line(line: str) -> None:
    echo_text(line, err=True)


def described(plan: Plan) -> str:
    """The fault and its victim, in one line."""
    if plan.fault == "healthy":
        return f"{plan.ranks} ranks, none disturbed"
    return f"rank {plan.victim} of {plan.ranks} {FAULTS[plan.fault].meaning}"


@contextmanager
def run(
    scenario: str,
    *,
    ranks: int = 4,
    seconds: float | None = None,
    first_step: int | None = None,
    trace_db: Path | None = None,
    gpus: GpuLibraries | None = None,
    note: Callable[[str], None] = _print_line,
) -> Iterator[Trace]:
    """Runs a scenario under the agent and yields the trace; see trace_job.

    trace_db: file for the trace; None: not kept. gpus: real GPUs, a rank on each; None: emulated GPUs.
    """
    with tempfile.TemporaryDirectory(prefix="stallscope-demo-") as folder:
        libraries = None
        if gpus:
            libraries = gpus.linked_in(Path(folder))
            ranks = min(gpus.n_gpus, 8)
        db = trace_job(
            scenario,
            ranks=ranks,
            seconds=seconds,
            first_step=first_step,
            trace_db=trace_db or Path(folder) / "trace.db",
            libraries=libraries,
            note=note,
        )
        yield node.read(db)


def trace_job(
    scenario: str,
    *,
    ranks: int = 4,
    seconds: float | None = None,
    first_step: int | None = None,
    trace_db: Path,
    libraries: Path | None = None,
    note: Callable[[str], None] = lambda line: None,
    command: Sequence[str] = COMMAND,
) -> Path:
    """Runs a scenario under the agent and returns the node trace.

    first_step: no fault before it; None: the fault's own. libraries: a folder of real libraries; None: emulated. note
    gets each line of the agent. command starts stallscope. Raises BadInput for an unknown scenario, CannotTrace when
    the agent does not attach or fails, NotFound without a C compiler.
    """
    if seconds is None:
        seconds = HANG_SECONDS if scenario == "hang" else SECONDS
    plan = live_demo.plan_for(scenario, ranks=ranks, seconds=seconds, libraries=libraries)
    plan = replace(plan, min_occurrences=MIN_OCCURRENCES)
    if first_step is not None:
        plan = replace(plan, first_step=first_step)
    where = "the GPUs of this machine" if libraries else "emulated GPUs"
    note(f"a job on {where}, {seconds:.0f} s: {described(plan)}")
    with (
        _ended_by_sigterm(),
        live_demo.started(plan) as job,
        _tracing(job.pids, trace_db=trace_db, note=note, command=command),
    ):
        job.go()
        # A job that hangs is still there when the agent ends: it is ended afterwards.
        job.wait(seconds if scenario == "hang" else seconds + SLACK_S)
    return trace_db


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the demo by an exception, so that it cleans up. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _tracing(
    pids: Sequence[int], *, trace_db: Path, note: Callable[[str], None], command: Sequence[str]
) -> Iterator[None]:
    """The agent, attached to both libraries; at the end it is stopped as by Ctrl-C."""
    named = [word for pid in pids for word in ("--pid", str(pid))]
    agent = subprocess.Popen(
        [*command, "trace", "--db", str(trace_db), *named],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    lines: list[str] = []
    reader = threading.Thread(target=_read, args=(agent, lines, note), name="agent-output")
    reader.start()
    try:
        _await_attached(agent, lines)
        yield
    finally:
        code = _code_after_ctrl_c(agent)
        reader.join()
        if agent.stdout:
            agent.stdout.close()
    if code:
        raise CannotTrace(f"the agent ended with code {code}: {_last(lines)}")


def _code_after_ctrl_c(agent: "subprocess.Popen[str]") -> int:
    """Ends the agent like Ctrl-C, by force if that takes too long; returns its exit code."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGINT)
    try:
        return agent.wait(END_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        return agent.wait()


def _read(agent: "subprocess.Popen[str]", lines: list[str], note: Callable[[str], None]) -> None:
    for line in agent.stdout or ():
        lines.append(line.rstrip("\n"))
        note(lines[-1])


def _await_attached(agent: "subprocess.Popen[str]", lines: list[str]) -> None:
    names = [name.partition(".so")[0] for name in build.LIBRARIES]  # real ones may have another version
    end_s = time.monotonic() + ATTACH_S
    while time.monotonic() < end_s and agent.poll() is None:
        if all(any("attached" in line and name in line for line in lines) for name in names):
            return
        time.sleep(live_demo.POLL_S)
    time.sleep(live_demo.POLL_S)  # its last lines may still be in the pipe
    raise CannotTrace(f"the agent did not attach to the libraries of the demo: {_last(lines)}")


def _last(lines: list[str]) -> str:
    printed = [line for line in lines if line.strip()]
    return printed[-1] if printed else "it printed nothing"
