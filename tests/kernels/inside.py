"""Runs inside the small machine: the agent beside an emulated job, as a user starts both; prints what came out."""

import csv
import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from stallscope.capture.drivers import Driver
from stallscope.capture.operations import SYMBOLS
from stallscope.capture.optional import IOCTL_WAYS
from stallscope.capture.program import Options, Program
from stallscope.capture.stacks.looking import Stacks
from stallscope.capture.stacks.memory import Memory, Unreadable
from stallscope.demo import live
from stallscope.demo.job import N_BUCKETS
from stallscope.demo.plan import Plan
from stallscope.store import node

RANKS, STEPS = 2, 100
DB, SAID = Path("/tmp/trace.db"), Path("/tmp/said")
PATIENCE_S = 240
MEMORY_MAJOR, RM_CONTROL, N_IOCTLS = 1, 0xC020462A, 30


def main() -> None:
    """One line of JSON after the word RESULT; what went wrong before it."""
    plan = live.plan_for("healthy", ranks=RANKS, seconds=60)
    with live.started(Plan(**(vars(plan) | {"steps": STEPS}))) as job:
        flags = [word for pid in job.pids for word in ("--pid", str(pid))]
        command = [sys.executable, "-P", "-c", "from stallscope.cli import main; main()"]
        with SAID.open("w") as out:
            agent = subprocess.Popen(
                [*command, "trace", "--db", str(DB), "--node", "here", *flags], stdout=out, stderr=out
            )
        try:
            ended = _traced(agent, job)
        finally:
            print(SAID.read_text())
            agent.kill()
        trace = node.read(DB)
        steps = [len(list(csv.DictReader((job.folder / f"rank{r}.csv").open()))) for r in range(RANKS)]
        of_rank = [trace.collectives[trace.collectives["pid"] == pid]["seq"].tolist() for pid in job.pids]
        result = {
            "kernel": platform.release(),
            "mode": _mode(),
            "exit_code": ended,
            "steps": steps,
            "rounds": [len(seqs) for seqs in of_rank],
            "expected": [n * (N_BUCKETS + 1) for n in steps],
            "in_order": all(seqs == list(range(len(seqs))) for seqs in of_rank),
            "n_snapshots": len(trace.snapshots),
            "lost": trace.lost,
            "driver_calls": {way: _driver_calls(way) for way in IOCTL_WAYS},
            "under_yama": _under_yama(),
        }
        print("RESULT", json.dumps(result), flush=True)


def _traced(agent: "subprocess.Popen[bytes]", job: live.Job) -> int:
    """Lets the job run once the agent has attached. Returns the agent's exit code."""
    end_s = time.monotonic() + PATIENCE_S
    while SAID.read_text().count("attached to") < 2 and agent.poll() is None and time.monotonic() < end_s:
        time.sleep(0.1)
    job.go()
    job.wait(PATIENCE_S)
    agent.send_signal(signal.SIGINT)
    return agent.wait(PATIENCE_S)


def _driver_calls(way: str) -> int:
    """Calls into a driver that were counted in this way, of N_IOCTLS; memory devices stand for the GPU's."""
    with Program.load(Options(ioctl_ways=(way,))) as program:
        program.know_drivers({MEMORY_MAJOR: Driver.NVIDIA})
        if (child := os.fork()) == 0:
            fd = os.open("/dev/null", os.O_RDONLY)
            for _ in range(N_IOCTLS):
                with suppress(OSError):
                    fcntl.ioctl(fd, RM_CONTROL, bytes(32))
            os._exit(0)
        os.waitpid(child, 0)
        found = program.operations()
    of_control = [SYMBOLS[key["symbol"]] == "ioctl:NV_ESC_RM_CONTROL" for key in found.keys]
    return int(found.values["n_failed"][of_control].sum())


HANGS = "import time\ndef hangs(): time.sleep(600)\nprint(flush=True)\nhangs()"
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def _under_yama() -> dict[str, object]:
    """Where a thread hangs whose memory nobody may read (ptrace_scope 3, until the machine ends), and what was said."""
    PTRACE_SCOPE.write_text("3")
    said: list[str] = []
    told: list[tuple[str, ...]] = []

    def keep(_pid: int, words: tuple[str, ...]) -> int:
        told.append(words)
        return len(told)

    with (
        subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as child,
        Program.load(Options()) as program,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(1)  # until it stands in its sleep
        is_forbidden = False
        try:
            Memory(child.pid).read(1 << 20, 8)
        except Unreadable as refusal:
            is_forbidden = refusal.errno == errno.EPERM
        Stacks(1, keep, said.append, program.walk_python, program.peek).now(child.pid, [child.pid])
        child.kill()
    return {"is_forbidden": is_forbidden, "frames": [list(words) for words in told], "said": said}


def _mode() -> str:
    """How functions were hooked, as the trace says."""
    with node.reading(DB) as connection:
        facts = connection.execute("SELECT facts FROM sessions").fetchone()[0]
    return str(json.loads(facts)["hooks"])


if __name__ == "__main__":
    os.chdir("/tmp")
    main()
