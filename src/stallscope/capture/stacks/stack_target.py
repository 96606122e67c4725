"""A process whose stacks are read: its interpreter, if it runs Python, and its mapped code.

A stack in words lists native frames, innermost first, down to the interpreter, then Python frames. CUT marks frames
that could not be determined.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from stallscope.capture.stacks.code_map import MappedCode
from stallscope.capture.stacks.codes import Codes
from stallscope.capture.stacks.eh_frame import IP
from stallscope.capture.stacks.frames import InvalidFrames, frames, thread_states, threads_of
from stallscope.capture.stacks.interpreter import Interpreter
from stallscope.capture.stacks.memory import Memory, Unreadable
from stallscope.capture.stacks.native import (
    MAX_FRAMES,
    Calls,
    StoppedThread,
    is_still,
    stopped_thread,
    unwind,
)
from stallscope.capture.stacks.peek_abi import Peek
from stallscope.capture.stacks.sampling import sample_thread
from stallscope.events.kernel import N_RETURNS

MAX_KEPT_FRAMES = 64
CUT = "..."
"""Marks frames that are left out or could not be determined."""

Words = tuple[str, ...]


@dataclass
class Target:
    """python, codes: None if the process does not run a known Python version."""

    pid: int
    memory: Memory
    code: MappedCode
    python: Interpreter | None = None
    codes: Codes | None = None

    def current_stacks(self, tids: Iterable[int], *, peek: Peek | None, proc: Path) -> dict[int, Words]:
        """The present stacks of these threads; threads without known frames are left out. Raises Unreadable."""
        by_tid = thread_states(self.memory, self.python, threads_of(self.pid, proc)) if self.python else {}
        self.code.refresh()
        stacks = {tid: self._thread_stack(tid, by_tid.get(tid), peek) for tid in tids}
        return {tid: words for tid, words in stacks.items() if words}

    def python_threads(self, proc: Path) -> list[int]:
        """The threads that Python knows. Raises Unreadable."""
        return (
            list(thread_states(self.memory, self.python, threads_of(self.pid, proc))) if self.python else []
        )

    def _thread_stack(self, tid: int, state: int | None, peek: Peek | None) -> Words:
        if peek is None:
            return self._python_frames(state) if state else ()
        thread = stopped_thread(peek, tid)
        python = self._python_frames(state) if state else ()
        if thread is None or not is_still(peek, tid, thread):
            thread = sample_thread(tid)
            if thread is None or (state and self._python_frames(state) != python):
                return python
        return self.names(self._unwind(thread, has_python=bool(python)), python)

    def calls(self, thread: StoppedThread, *, has_python: bool) -> Calls:
        """The native calls in a stack that the kernel side has copied, down to the last call that it can recognise."""
        if not self.code.region(thread.registers[IP]):
            self.code.refresh()
        return self._unwind(thread, has_python=has_python, max_frames=N_RETURNS)

    def names(self, calls: Calls, python: Words) -> Words:
        """Native frames, then Python's."""
        return (*map(self.code.name, calls.addresses), *(CUT,) * calls.is_cut, *python)

    def _unwind(self, thread: StoppedThread, *, has_python: bool, max_frames: int = MAX_FRAMES) -> Calls:
        until = self.code.is_interpreter if has_python else _never
        return unwind(self.code, thread, until=until, max_frames=max_frames)

    def _python_frames(self, state: int) -> Words:
        """The Python frames of a thread; empty if they are not reliable."""
        if self.python is None or self.codes is None:
            return ()
        try:
            python_frames = frames(self.memory, self.python, state)
            words = tuple(str(self.codes.name_frame(frame)) for frame in python_frames[:MAX_KEPT_FRAMES])
        except (InvalidFrames, Unreadable):
            return ()
        return words + (CUT,) * (len(python_frames) > MAX_KEPT_FRAMES)


def _never(_address: int) -> bool:
    return False
