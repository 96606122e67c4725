"""Runs inside the virtual machine: the agent and an emulated job, as a user starts both; prints the results.

The kernel causes real faults by control groups of version 2: one rank is throttled for a while, and a process is killed
for memory that another process requested. Each part prints its start by the machine's clock.
"""

import csv
import errno
import fcntl
import io
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

from stallscope.capture.gpu.drivers import Driver
from stallscope.capture.host import HostEvents
from stallscope.capture.probes.operations import SYMBOLS
from stallscope.capture.probes.optional_programs import IOCTL_WAYS
from stallscope.capture.probes.program import Options, Program
from stallscope.capture.stacks.memory import Memory, Unreadable
from stallscope.capture.stacks.sampler import Stacks
from stallscope.cli import app
from stallscope.demo import live_demo
from stallscope.demo.job import N_BUCKETS
from stallscope.demo.plan import Plan
from stallscope.events.names import Category, HostKind, OffCpuFlag
from stallscope.events.trace import Trace
from stallscope.store import node

RANKS = 2
DB, LOG = Path("/tmp/trace.db"), Path("/tmp/log")
PATIENCE_S = 600
MEMORY_MAJOR, RM_CONTROL, N_IOCTLS = 1, 0xC020462A, 30

GROUPS = Path("/sys/fs/cgroup")
QUOTA_US, PERIOD_US = 10_000, 1_000_000
LIMITED_RANK, FIRST_STEPS, N_STAYS, N_PAUSES, FREE_STEPS = 1, 20, 7, 3, 8
"""One rank is in the group several times, for a few pauses of a second. Two ranks of an emulated machine differ by far
less. On a slow machine all pauses of a stay fall into one step, so that the number of stays exceeds chance."""
STEPS = FIRST_STEPS + N_STAYS * (4 * N_PAUSES + FREE_STEPS)
"""Enough for a rank that makes four steps in a quota: a step takes about 10 ms of an emulated CPU."""
MEMORY_BYTES, HELD_BYTES = 64 << 20, 40 << 20
"""A group has memory for one process that holds HELD_BYTES, not for two."""


class Child(NamedTuple):
    """A process that waits for its turn, does its work, and ends or waits. turn, done: ends of pipes."""

    pid: int
    turn: int
    done: int


def main() -> None:
    """Print one line of JSON after the word RESULT, and errors before it."""
    _at("the job starts")
    (GROUPS / "cgroup.subtree_control").write_text("+cpu +memory")
    plan = live_demo.plan_for("healthy", ranks=RANKS, seconds=60)
    with live_demo.started(Plan(**(vars(plan) | {"steps": STEPS}))) as job:
        flags = [word for pid in job.pids for word in ("--pid", str(pid))]
        command = [sys.executable, "-P", "-c", "from stallscope.cli import main; main()"]
        with LOG.open("w") as out:
            agent = subprocess.Popen(
                [*command, "trace", "--db", str(DB), "--node", "here", *flags], stdout=out, stderr=out
            )
        try:
            exit_code, throttled = _traced(agent, job)
        finally:
            print(LOG.read_text())
            agent.kill()
        _at("the trace is read")
        trace, mode = node.read(DB), _mode()
        steps = [_n_steps(job, rank) for rank in range(RANKS)]
        of_rank = [trace.collectives[trace.collectives["pid"] == pid]["seq"].tolist() for pid in job.pids]
        result = {
            "kernel": platform.release(),
            "mode": mode,
            "exit_code": exit_code,
            "steps": steps,
            "rounds": [len(seqs) for seqs in of_rank],
            "expected": [n * (N_BUCKETS + 1) for n in steps],
            "in_order": all(seqs == list(range(len(seqs))) for seqs in of_rank),
            "n_snapshots": len(trace.snapshots),
            "lost": trace.lost,
            "throttled": throttled,
            "recorded_throttling": {
                rank: _recorded_throttling(trace, pid) for rank, pid in enumerate(job.pids)
            },
            "verdicts": _verdicts(),
        }
    *_, last_method = IOCTL_WAYS
    for method in IOCTL_WAYS:
        _at(f"calls into a driver, by {method}")
        with Program.load(Options(ioctl_ways=(method,), pids=frozenset(), modes=(mode,))) as program:
            result.setdefault("driver_calls", {})[method] = _driver_calls(program)
            if "memory" not in result:
                result["memory"] = _short_of_memory(program)
            if method == last_method:  # until the machine ends, no memory can be read after this
                result["under_yama"] = _under_yama(program)
    _at("the end")
    print("RESULT", json.dumps(result), flush=True)


def _at(stage: str) -> None:
    print(f"at {time.monotonic():.1f} s: {stage}", flush=True)


def _traced(agent: "subprocess.Popen[bytes]", job: live_demo.Job) -> tuple[int, dict[str, int]]:
    """Run the job after the agent has attached, with one rank under a quota for some steps.

    Returns the agent's exit code, and the kernel's counts of the rank's group.
    """
    _at("the agent starts")
    _wait(lambda: LOG.read_text().count("attached to") >= 2 or agent.poll() is not None)
    _at("the ranks go")
    job.go()
    counted = _limited(job)
    job.wait(PATIENCE_S)
    _at("the agent ends")
    agent.send_signal(signal.SIGINT)
    return agent.wait(PATIENCE_S), counted


def _limited(job: live_demo.Job) -> dict[str, int]:
    """Put one rank under the quota several times. Returns the kernel's counts of the group."""
    pid = str(job.pids[LIMITED_RANK])
    n_steps = FIRST_STEPS
    with _group("limited", {"cpu.max": f"{QUOTA_US} {PERIOD_US}"}) as home:
        for stay in range(1, N_STAYS + 1):
            _wait(lambda n=n_steps: _n_steps(job, LIMITED_RANK) >= n or _has_ended(job))
            (home / "cgroup.procs").write_text(pid)
            _wait(lambda n=stay * N_PAUSES: _counted(home)["nr_throttled"] >= n or _has_ended(job))
            (GROUPS / "cgroup.procs").write_text(pid)
            n_steps = _n_steps(job, LIMITED_RANK) + FREE_STEPS
        return _counted(home)


def _counted(home: Path) -> dict[str, int]:
    lines = (home / "cpu.stat").read_text().splitlines()
    return {name: int(value) for name, value in (line.split() for line in lines)}


def _recorded_throttling(trace: Trace, pid: int) -> dict[str, Any]:
    """The trace's record of one rank: the group's rows, and the time that its GPU threads lost by the quota."""
    rows = trace.host_events[trace.host_events["kind"] == HostKind.THROTTLED]
    rows = rows[rows["pid"] == pid]
    off = trace.offcpu[(trace.offcpu["pid"] == pid) & (trace.offcpu["category"] == Category.PREEMPTED)]
    return {
        "n": int(rows["value"].sum()),
        "ns": int(rows["duration_ns"].sum()),
        "quotas": sorted({text.decode() for text in rows["detail"].tolist()}),
        "groups": sorted({text.decode() for text in rows["file"].tolist()}),
        "off_cpu_ns": int(off["duration_ns"][off["flags"] & OffCpuFlag.THROTTLED > 0].sum()),
    }


def _verdicts() -> list[dict[str, Any]]:
    """The verdicts of `stallscope explain` on the trace."""
    with redirect_stdout(io.StringIO()) as output, suppress(SystemExit):
        app(["explain", "--json", str(DB)])
    report: dict[str, Any] = json.loads(output.getvalue())
    return list(report["verdicts"])


def _driver_calls(program: Program) -> int:
    """Counted calls into a driver, of N_IOCTLS; memory devices replace the GPU's devices."""
    program.know_drivers({MEMORY_MAJOR: Driver.NVIDIA})
    child = _forked(_calls)
    program.follow([child.pid])
    _let(child)
    os.waitpid(child.pid, 0)
    operations = program.operations()
    of_control = [SYMBOLS[key["symbol"]] == "ioctl:NV_ESC_RM_CONTROL" for key in operations.keys]
    return int(operations.values["n_failed"][of_control].sum())


def _calls() -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    for _ in range(N_IOCTLS):
        with suppress(OSError):
            fcntl.ioctl(fd, RM_CONTROL, bytes(32))


def _short_of_memory(program: Program) -> dict[str, Any]:
    """Two processes request more memory than their group has; only the killed process is traced."""
    with _group("small", {"memory.max": str(MEMORY_BYTES)}) as home:
        victim, other = _forked(lambda: _reclaims(home) + _held()), _forked(lambda: _held()[:0])
        program.events.drain()
        program.follow([victim.pid])
        host = HostEvents(0, program.entries)
        for child, score in ((victim, 1000), (other, 0)):
            Path(f"/proc/{child.pid}/oom_score_adj").write_text(str(score))
            (home / "cgroup.procs").write_text(str(child.pid))
            _let(child)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) for child in (victim, other)]
        rows = host.rows(program.events.drain(), [victim.pid], time.monotonic_ns())
    names = {victim.pid: "victim", other.pid: "other"}
    kills = rows[rows["kind"] == HostKind.OOM_KILL]
    return {
        "ends": ends,
        "kills": [[names.get(row["pid"]), names.get(row["by_pid"])] for row in kills],
        "statuses": rows["value"][rows["kind"] == HostKind.EXIT].tolist(),
        "reclaim_ns": int(rows["duration_ns"][rows["kind"] == HostKind.RECLAIM].sum()),
        "traced": sorted({names.get(pid, str(pid)) for pid in rows["pid"].tolist()}),
    }


def _held() -> bytes:
    return b"x" * HELD_BYTES


def _reclaims(home: Path) -> bytes:
    """Reclaim memory like a process that reaches its group's limit; no memory can be reclaimed."""
    with suppress(OSError):
        (home / "memory.reclaim").write_text("16M")
    return b""


def _forked(work: Callable[[], bytes | None]) -> Child:
    """A child that does the work when _let() is called; it stays if the work returns a value to keep."""
    turn, done = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.read(turn[0], 1)
            kept = work()
            os.write(done[1], b".")
            if kept:
                signal.pause()
        finally:
            os._exit(0)
    os.close(done[1])
    return Child(pid, turn[1], done[0])


def _let(child: Child) -> None:
    """Let the child work; returns when the work is done, or the child has ended."""
    os.write(child.turn, b".")
    os.read(child.done, 1)


@contextmanager
def _group(name: str, limits: Mapping[str, str]) -> Iterator[Path]:
    """A control group with limits; the remaining processes leave it afterwards."""
    home = GROUPS / name
    home.mkdir()
    for file, value in limits.items():
        (home / file).write_text(value)
    yield home
    for pid in (home / "cgroup.procs").read_text().split():
        (GROUPS / "cgroup.procs").write_text(pid)


def _wait(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.1)


def _has_ended(job: live_demo.Job) -> bool:
    return job.processes[LIMITED_RANK].poll() is not None


def _n_steps(job: live_demo.Job, rank: int) -> int:
    """Number of steps of a rank, by the rank's own file."""
    clock = job.folder / f"rank{rank}.csv"
    return len(list(csv.DictReader(clock.open()))) if clock.exists() else 0


HANGS = "import time\ndef hangs(): time.sleep(600)\nprint(flush=True)\nhangs()"
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def _under_yama(program: Program) -> dict[str, object]:
    """The stack of a hanging thread whose memory no process may read (ptrace_scope 3), and the messages about it."""
    PTRACE_SCOPE.write_text("3")
    messages: list[str] = []
    stacks: list[tuple[str, ...]] = []

    def keep(_pid: int, words: tuple[str, ...]) -> int:
        stacks.append(words)
        return len(stacks)

    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        _wait(lambda: "S" in Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1][:2])
        is_forbidden = False
        try:
            Memory(child.pid).read(1 << 20, 8)
        except Unreadable as refusal:
            is_forbidden = refusal.errno == errno.EPERM
        Stacks(1, keep, messages.append, program.walk_python, program.peek).current_stacks(
            child.pid, [child.pid]
        )
        child.kill()
    return {"is_forbidden": is_forbidden, "frames": [list(words) for words in stacks], "messages": messages}


def _mode() -> str:
    """The method by which probes were attached, by the trace's facts."""
    with node.reading(DB) as connection:
        facts = connection.execute("SELECT facts FROM sessions").fetchone()[0]
    return str(json.loads(facts)["hooks"])


if __name__ == "__main__":
    os.chdir("/tmp")
    main()
