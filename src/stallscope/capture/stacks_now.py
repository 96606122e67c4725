"""The present stacks of the processes of this machine that have a GPU library mapped, without probes.

Python frames of the main thread; where it only waits for another thread, the frames of the thread with the most CPU
time. A process that does not run Python has no frames here: native frames need the probes, see `stallscope trace`.
"""

import re
import time
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.probes.discovery import Discovery
from stallscope.capture.process.process_identity import identity, small_file, stat_fields
from stallscope.capture.process.wait_objects import WaitObjects
from stallscope.capture.stacks.code_map import Files, MappedCode
from stallscope.capture.stacks.codes import Codes
from stallscope.capture.stacks.interpreter import interpreter_in
from stallscope.capture.stacks.layouts import UnknownLayout
from stallscope.capture.stacks.memory import Memory, Unreadable
from stallscope.capture.stacks.stack_target import Target

__all__ = ["CurrentStack", "stacks_now"]


_JOINS = re.compile(r"/threading\.py:\d+ |/concurrent/futures/[a-z_]+\.py:\d+ ")
_CPU_FIELDS = slice(11, 13)
"""utime and stime in the fields of stat after the command."""


class CurrentStack(NamedTuple):
    """A process's stack. state: the kernel's letter for its thread. waits_for: the object of its system call."""

    pid: int
    rank: int
    command: str
    state: str
    waits_for: str
    frames: tuple[str, ...]


def stacks_now(proc: Path = Path("/proc")) -> list[CurrentStack]:
    """The stacks of all GPU processes that may be read."""
    discovery = Discovery()
    discovery.scan(time.monotonic_ns())
    objects, files = WaitObjects(time.monotonic_ns, proc), Files()
    stacks = [_current_stack(pid, objects, files, proc) for pid in discovery.gpu_processes()]
    return [stack for stack in stacks if stack.state]  # a process that has just ended has no state


def _current_stack(pid: int, objects: WaitObjects, files: Files, proc: Path) -> CurrentStack:
    memory = Memory(pid)
    try:
        python = interpreter_in(pid, proc)
    except UnknownLayout:
        python = None
    target = Target(
        pid, memory, MappedCode(pid, files, proc), python, Codes(memory, python) if python else None
    )
    tid, frames = _main_or_busiest(target, proc)
    blocked = objects.blocked_call(pid, tid, memory)
    stat = stat_fields(f"{proc}/{pid}/task/{tid}")
    return CurrentStack(
        pid=pid,
        rank=identity(pid, proc).rank,
        command=small_file(f"{proc}/{pid}/comm").decode("utf-8", "replace").strip(),
        state=stat[0].decode() if stat else "",
        waits_for=blocked.object if blocked else "",
        frames=frames,
    )


def _main_or_busiest(target: Target, proc: Path) -> tuple[int, tuple[str, ...]]:
    """The main thread and its frames; while it waits for another thread, the thread with the most CPU time."""
    pid = target.pid
    try:
        frames = target.current_stacks([pid], peek=None, proc=proc).get(pid, ())
        if frames and not _JOINS.search(frames[0]):
            return pid, frames
        others = target.current_stacks(set(target.python_threads(proc)) - {pid}, peek=None, proc=proc)
    except Unreadable:
        return pid, ()
    tid = max(others, key=lambda tid: _cpu_ticks(pid, tid, proc), default=pid)
    return (tid, others[tid]) if tid in others else (pid, frames)


def _cpu_ticks(pid: int, tid: int, proc: Path) -> int:
    return sum(map(int, stat_fields(f"{proc}/{pid}/task/{tid}")[_CPU_FIELDS]))
