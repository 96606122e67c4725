"""An agent as a user starts it, and jobs on the emulated libraries for it to trace."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stallscope.capture.probes.program import OBJECT
from stallscope.demo import live_demo
from stallscope.demo.live_demo import Job
from stallscope.demo.plan import Plan
from stallscope.errors import BadTrace, NotFound
from stallscope.events.trace import Trace
from stallscope.store import node

from ..patience import PATIENCE_S, until

COMMAND = (sys.executable, "-c", "from stallscope.cli import main; main()")


def begun(db: Path) -> Trace | None:
    """The trace in a file; None until an agent has created its tables."""
    with suppress(BadTrace, NotFound):
        return node.read(db)
    return None


class Agent:
    """A running `stallscope trace`: its process, its output, its trace."""

    def __init__(self, db: Path, *arguments: str, prefix: tuple[str, ...] = ()):
        self.db = db
        self.said = db.with_name(f"{db.name}-{time.monotonic_ns()}.said")
        command = [*prefix, *COMMAND, "trace", "--db", str(db), "--node", "here", *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self.said.open("w") as out:
            self.process = subprocess.Popen(command, stdin=-3, stdout=out, stderr=out, env=environment)

    def says(self, *words: str) -> None:
        """Wait until one of its lines has all the words."""

        def is_said() -> bool:
            has_ended = self.process.poll() is not None  # asked first: the last line may precede the end
            result = any(all(word in line for word in words) for line in self.lines())
            assert result or not has_ended, self.lines()
            return result

        until(is_said, state=self.lines)

    def stores(self, *, more_than: int = 0) -> int:
        """Wait until the trace has more collectives than this; their number."""

        def n_stored() -> int:
            has_ended = self.process.poll() is not None
            trace = begun(self.db)
            n = len(trace.collectives) if trace else 0
            assert n > more_than or not has_ended, self.lines()
            return n if n > more_than else 0

        return until(n_stored, state=self.lines)

    def lines(self) -> list[str]:
        return self.said.read_text().splitlines()

    def ended(self, signal_number: int = 0) -> int:
        """Its exit code, after a signal if one is given."""
        if signal_number:
            self.process.send_signal(signal_number)
        return self.process.wait(PATIENCE_S)


@pytest.fixture(scope="session", autouse=True)
def built(repository: Path) -> None:
    """The BPF object, built if it is missing or older than its sources."""
    if os.geteuid() == 0:
        subprocess.run(["make", "--silent", "bpf"], cwd=repository, check=False)
    if not OBJECT.exists():
        pytest.skip("bpf: the BPF programs are not built (make bpf)")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """Starts agents on this test's trace; none is left at the end."""
    started: list[Agent] = []

    def start(*arguments: str, **options: object) -> Agent:
        started.append(Agent(tmp_path / "trace.db", *arguments, **options))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.send_signal(signal.SIGKILL)
            each.process.wait()


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    """Starts jobs, which wait at their gate; none is left at the end."""
    running = []

    def start(scenario: str = "healthy", *, ranks: int = 2, seconds: float = 3.0, **changes: object) -> Job:
        plan = live_demo.plan_for(scenario, ranks=ranks, seconds=seconds)
        context = live_demo.started(Plan(**(vars(plan) | changes)))
        running.append(context)
        return context.__enter__()

    yield start
    for context in running:
        context.__exit__(None, None, None)


def pid_flags(job: Job) -> list[str]:
    """The flags that make an agent trace only this job: other tests may run jobs at the same time."""
    return [word for pid in job.pids for word in ("--pid", str(pid))]


@pytest.fixture
def only() -> Callable[[Job], list[str]]:
    """Flags for an agent that shall trace one job only."""
    return pid_flags
