"""The present stacks of the processes of this machine that have a GPU library mapped, without probes.

Python frames of the main thread and of the other threads that Python knows; the main thread comes first. A process that
does not run Python has no frames here: native frames need the probes, see `stallscope trace`.
"""

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


class CurrentStack(NamedTuple):
    """A process's stack. state: the kernel's letter for its main thread. waits_for: the object of its system call."""

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
    return [_current_stack(pid, objects, files, proc) for pid in discovery.gpu_processes()]


def _current_stack(pid: int, objects: WaitObjects, files: Files, proc: Path) -> CurrentStack:
    memory = Memory(pid)
    try:
        python = interpreter_in(pid, proc)
    except UnknownLayout:
        python = None
    target = Target(
        pid, memory, MappedCode(pid, files, proc), python, Codes(memory, python) if python else None
    )
    try:
        stacks = target.current_stacks([pid], peek=None, proc=proc)
    except Unreadable:
        stacks = {}
    blocked = objects.blocked_call(pid, pid, memory)
    stat = stat_fields(f"{proc}/{pid}")
    return CurrentStack(
        pid=pid,
        rank=identity(pid, proc).rank,
        command=small_file(f"{proc}/{pid}/comm").decode("utf-8", "replace").strip(),
        state=stat[0].decode() if stat else "",
        waits_for=blocked.object if blocked else "",
        frames=stacks.get(pid, ()),
    )
