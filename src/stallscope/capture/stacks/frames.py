"""The Python frames of a thread, read from outside while it runs.

The data may change during the reading, so a chain of frames is accepted only if a second reading finds the same chain.
That is correct for a thread that is blocked or inside a long call; a thread that moves is refused. Every code object
must have the type of a code object, every instruction must lie inside its code, and the chain is bounded.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.stacks.interpreter import Interpreter
from stallscope.capture.stacks.layouts import NONE
from stallscope.capture.stacks.memory import Memory

MAX_FRAMES = 256
_MAX_THREADS = 4096
_MAX_INTERPRETERS = 8
_TID_IN_PTHREAD = 0x2D0
"""Of struct pthread on x86-64 in glibc since 2.3. Only Python 3.10 needs it, and the value there must be a thread."""


class InvalidFrames(Exception):
    """The frames are not reliable: the thread moved, or the data is not valid."""


class Frame(NamedTuple):
    """A running Python function: address of its code object; which instruction, counted in units of two bytes."""

    code: int
    unit: int


def thread_states(memory: Memory, python: Interpreter, tids: Mapping[int, int]) -> dict[int, int]:
    """The address of the thread state by thread number on the machine, for the threads that Python knows.

    tids: the process's threads: number on the machine by their number in its own namespace. Raises Unreadable.
    """
    layout = python.layout
    state_of: dict[int, int] = {}
    head = python.runtime + layout.interpreters_head
    for interpreter in _chain(memory, head, layout.interpreter_next, _MAX_INTERPRETERS):
        for state in _chain(memory, interpreter + layout.threads_head, layout.thread_next, _MAX_THREADS):
            if layout.native_thread_id == NONE:
                thread_id = int.from_bytes(
                    memory.read(memory.word(state + layout.thread_id) + _TID_IN_PTHREAD, 4), "little"
                )
            else:
                thread_id = memory.word(state + layout.native_thread_id)
            if thread_id in tids:
                state_of[tids[thread_id]] = state
    return state_of


def interpreter_lock_holder(memory: Memory, python: Interpreter) -> int:
    """The address of the state of the thread that holds the interpreter lock; 0 if no thread holds it.

    Of the main interpreter, by two readings: the lock may change its holder between them. Raises Unreadable.
    """
    layout = python.layout
    lock = python.runtime
    if layout.interpreter_lock != NONE:
        lock = memory.word(memory.word(lock + layout.main_interpreter) + layout.interpreter_lock)
    is_locked = int.from_bytes(memory.read(lock + layout.lock_locked, 4), "little") == 1
    return memory.word(lock + layout.lock_holder) if is_locked else 0


def _chain(memory: Memory, head: int, next_offset: int, limit: int) -> Iterator[int]:
    """The members of a linked list. head: address of the first pointer; next_offset: offset of each next pointer."""
    at = memory.word(head)
    for _ in range(limit):
        if not at:
            return
        yield at
        at = memory.word(at + next_offset)


def frames(memory: Memory, python: Interpreter, state: int) -> list[Frame]:
    """The frames of a thread, innermost first. Raises InvalidFrames, Unreadable."""
    first = _walk(memory, python, state)
    for _ in range(3):
        second = _walk(memory, python, state)
        if second == first:
            return [frame for _, frame in first]
        first = second
    raise InvalidFrames("the thread ran while its stack was read")


def frames_once(memory: Memory, python: Interpreter, state: int) -> list[Frame]:
    """The frames of a thread by one reading, for samples: frames of a running thread may mix two moments.

    Every code object is checked, so a mixture has frames that ran within some microseconds of each other.
    Raises InvalidFrames, Unreadable.
    """
    return [frame for _, frame in _walk(memory, python, state)]


def _walk(memory: Memory, python: Interpreter, state: int) -> list[tuple[int, Frame]]:
    layout = python.layout
    holder = state if layout.cframe == NONE else memory.word(state + layout.cframe)
    at = memory.word(holder + layout.current_frame)
    frames: list[tuple[int, Frame]] = []
    while at:
        if at & 7 or len(frames) >= MAX_FRAMES:
            raise InvalidFrames(f"the chain of frames leads to {at:#x}")
        data = memory.read(at, layout.frame_bytes)
        owner = data[layout.frame_owner] if layout.frame_owner != NONE else 0
        if owner < layout.first_unowned:
            frames.append((at, _frame(memory, python, data)))
        (at,) = struct.unpack_from("<Q", data, layout.frame_previous)
    return frames


def _frame(memory: Memory, python: Interpreter, data: bytes) -> Frame:
    layout = python.layout
    code = struct.unpack_from("<Q", data, layout.frame_code)[0] & ~3
    if code & 7:
        raise InvalidFrames(f"invalid address of a code object: {code:#x}")
    head = memory.read(code, 24)
    kind, n_units = struct.unpack_from("<QQ", head, 8)
    if kind != python.code_type:
        raise InvalidFrames(f"no code object at {code:#x}")
    if layout.has_frame_objects:
        return Frame(code, struct.unpack_from("<i", data, layout.frame_instr)[0])
    index = (struct.unpack_from("<Q", data, layout.frame_instr)[0] - code - layout.code_instructions) >> 1
    if not -1 <= index < n_units:
        raise InvalidFrames(f"instruction outside the code object at {code:#x}")
    return Frame(code, max(index, 0))


def threads_of(
    pid: int, proc: Path = Path("/proc"), known: Mapping[int, int] | None = None
) -> dict[int, int]:
    """The threads of a process: number on the machine by number in its own namespace. Empty if it has ended.

    known: an earlier answer; only the numbers of later threads are read.
    """
    try:
        tids = {int(entry.name) for entry in (proc / str(pid) / "task").iterdir()}
    except OSError:
        return {}
    tid_of = {own_tid: tid for own_tid, tid in (known or {}).items() if tid in tids}
    for tid in tids.difference(tid_of.values()):
        try:
            text = (proc / str(pid) / "task" / str(tid) / "status").read_bytes()
        except OSError:
            continue
        own_tid = next((line.split()[-1] for line in text.splitlines() if line.startswith(b"NSpid:")), tid)
        tid_of[int(own_tid)] = tid
    return tid_of
