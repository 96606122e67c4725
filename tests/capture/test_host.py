"""What the machine does to traced processes: faults made for real, each named by its kind and whose doing it is.

And nothing of it where it happens to a process that is not traced.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stallscope.capture.host import HostEvents
from stallscope.capture.program import Program
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.names import HostKind

pytestmark = [pytest.mark.bpf, pytest.mark.compiler]

CALL = "lib.cudaMalloc(0, Z(64))"
SENDER = "import os, sys; os.kill(int(sys.argv[1]), int(sys.argv[2]))"


class Watch:
    """Rows of HOST_EVENTS of the processes that the test calls traced."""

    def __init__(self, program: Program, *pids: int):
        self.pids = pids
        self._program = program
        self._host = HostEvents(0, program.entries)
        self._rows = [layout.empty(layout.HOST_EVENTS)]
        self.look()

    def look(self) -> Array:
        """All rows so far."""
        events = self._program.events.drain()
        self._rows.append(self._host.rows(events, self.pids, time.monotonic_ns()))
        return np.concatenate(self._rows)

    def of(self, kind: HostKind, pid: int) -> Array:
        """Rows of one kind of a process."""
        rows = self.look()
        return rows[(rows["kind"] == kind) & (rows["pid"] == pid)]

    def until(self, kind: HostKind, pid: int, *, n: int = 1) -> Array:
        """Waits for that many."""
        for _ in range(100):
            if len(rows := self.of(kind, pid)) >= n:
                return rows
            time.sleep(0.05)
        raise AssertionError(f"no {kind.name} of {pid} in {self.look()}")


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[str]]:
    """A process that makes no traced call."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys\nfor line in sys.stdin: exec(line); print('done', flush=True)"],
        stdin=-1,
        stdout=-1,
        text=True,
    ) as process:
        yield process
        process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Have the stranger do it."""
    assert process.stdin and process.stdout
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def send(pid: int, number: int) -> int:
    """Another process sends the signal; its number."""
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(pid), str(number)])
    assert sender.wait() == 0
    return sender.pid


def test_this_kernel_tells_everything(tracing: Callable[..., Program]):
    assert tracing().missing == ()


def test_who_stops_a_process_is_named(tracing: Callable[..., Program], puppet, stranger):
    program = tracing()
    puppet.does(CALL)
    watch = Watch(program, puppet.pid)
    sender = send(puppet.pid, signal.SIGSTOP)
    send(puppet.pid, signal.SIGCONT)
    send(stranger.pid, signal.SIGSTOP)
    send(stranger.pid, signal.SIGCONT)
    rows = watch.until(HostKind.SIGNAL, puppet.pid, n=2)
    assert rows["value"].tolist() == [signal.SIGSTOP, signal.SIGCONT]
    assert (rows["by_pid"][0], rows["by_comm"][0]) == (sender, Path(sys.executable).name.encode())
    assert not len(watch.of(HostKind.SIGNAL, stranger.pid))


def test_a_process_ends_once_however_many_threads_it_has(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        CALL,
        "import threading, time, os",
        "[threading.Thread(target=time.sleep, args=(60,)).start() for _ in 'x' * 9]",
    )
    watch = Watch(program, puppet.pid)
    killer = send(puppet.pid, signal.SIGKILL)
    puppet.process.wait()
    (end,) = watch.until(HostKind.EXIT, puppet.pid)
    assert end["value"] == 128 + signal.SIGKILL
    (kill,) = watch.of(HostKind.SIGNAL, puppet.pid)
    assert (kill["value"], kill["by_pid"]) == (signal.SIGKILL, killer)


def test_children_are_followed_and_not_threads(tracing: Callable[..., Program], puppet, stranger):
    program = tracing()
    puppet.does(CALL, "import subprocess, threading")
    watch = Watch(program, puppet.pid)
    puppet.does("thread = threading.Thread(target=int)", "thread.start()", "thread.join()")
    puppet.does("child = subprocess.Popen(['/bin/sh', '-c', 'exit 3'])", "child.wait()")
    tell(stranger, "import subprocess; subprocess.run(['/bin/sh', '-c', 'exit 4'])")
    rows = watch.look()
    (born,) = rows[rows["kind"] == HostKind.FORK]
    assert born["by_pid"] == puppet.pid
    (became,) = watch.of(HostKind.EXEC, int(born["pid"]))
    assert became["comm"] == b"sh"
    ends = rows[rows["kind"] == HostKind.EXIT]
    assert (ends["pid"].tolist(), ends["value"].tolist()) == ([born["pid"]], [3])
    assert os.getpid() not in rows["pid"]
