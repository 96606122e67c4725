"""`trace` on a terminal, with --json and with --quiet: the output, and its end with the agent."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from stallscope.store import node

from ..patience import PATIENCE_S, until
from .conftest import COMMAND

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

CONTROL = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command on a pseudo-terminal of 100 x 40, and its output so far, without control sequences."""

    def __init__(self, *words: object):
        self.process_id, self._fd = pty.fork()
        if not self.process_id:
            environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
            os.execve(COMMAND[0], [*COMMAND, *map(str, words)], environment)
        self.written = b""

    def says(self, *words: str) -> None:
        """Wait until all the words have been written."""
        end_s = time.monotonic() + PATIENCE_S
        while not all(word in self.text for word in words):
            assert time.monotonic() < end_s, self.text[-3000:]
            self._read()

    @property
    def text(self) -> str:
        return CONTROL.sub(b"", self.written).decode(errors="replace")

    def ended(self) -> int:
        """Its exit code after Ctrl-C."""
        os.write(self._fd, b"\x03")
        while self._read():
            pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.process_id, 0)[1])

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 0.1)[0]:
            return True
        try:
            new = os.read(self._fd, 65536)
        except OSError:
            return False
        self.written += new
        return bool(new)


def test_a_page_shows_the_job_and_the_verdict_and_stays_at_the_end(job, only, tmp_path):
    job = job("sleep", seconds=9)
    terminal = Terminal("trace", "--db", tmp_path / "trace.db", "--node", "here", *only(job))
    terminal.says("attached", "libnccl")
    job.go()
    terminal.says("all_reduce", "wait_gpu", "tracer", "Rank 1 (host here")
    assert terminal.ended() == 0
    assert b"\x1b[?1049l" in terminal.written  # the other screen is left ...
    last = CONTROL.sub(b"", terminal.written.split(b"\x1b[?1049l")[-1]).decode()
    assert "Rank 1 (host here" in last  # ... and the last page remains on the first screen
    assert len(node.read(tmp_path / "trace.db").collectives)


def test_json_is_a_record_a_line(agent, job, only):
    job = job(seconds=4)
    tracer = agent("--json", *only(job))
    tracer.says("attached", "libnccl")
    job.go()
    tracer.says('"record": "collectives"')
    assert job.wait(60)
    assert tracer.ended(signal.SIGINT) == 0
    datas = [json.loads(line) for line in tracer.lines() if line.startswith("{")]
    stored = node.read(tracer.db)
    by_table = {
        name: sum(entry["record"] == name for entry in datas) for name in ("collectives", "processes")
    }
    assert by_table == {"collectives": len(stored.collectives), "processes": len(stored.processes)}
    assert all(entry["op"] == "all_reduce" for entry in datas if entry["record"] == "collectives")


def test_quiet_prints_no_status_line(agent, job, only):
    job = job(seconds=3)
    tracer = agent("--quiet", *only(job))
    tracer.says("attached", "libnccl")
    job.go()
    assert job.wait(60)
    assert tracer.ended(signal.SIGINT) == 0
    assert not any("records" in line for line in tracer.lines())


def test_the_view_process_ends_when_the_agent_is_killed(agent, job, only):
    job = job(seconds=3)
    tracer = agent("--json", *only(job))
    tracer.says("attached", "libnccl")
    watching = until(lambda: children(tracer.process.pid))
    tracer.ended(signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in watching))


def children(pid: int) -> list[str]:
    done = subprocess.run(
        ["pgrep", "-P", str(pid), "-f", "live.viewer_process"], capture_output=True, text=True
    )
    return done.stdout.split()


def test_the_agent_continues_when_the_view_process_is_killed(agent, job, only):
    job = job(seconds=4)
    tracer = agent("--json", *only(job))
    tracer.says("attached", "libnccl")
    for pid in until(lambda: children(tracer.process.pid)):
        os.kill(int(pid), signal.SIGKILL)
    job.go()
    assert job.wait(60)
    assert tracer.ended(signal.SIGINT) == 0
    assert len(node.read(tracer.db).collectives)
