"""Calls of C functions in a thread of another process, by ptrace (x86-64). The other threads keep running.

The thread must wait in a system call that the kernel restarts, and around which the C library holds no lock: a sleep, a
poll, a condition variable or a read. Its registers are restored afterwards, so the thread never notices the calls.
Signals that arrive during a call are delivered afterwards.
"""

import ctypes as c
import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stallscope.errors import CannotTrace, NotAllowed, NotFound

_SEIZE, _INTERRUPT, _CONTINUE, _DETACH, _GET, _SET = 0x4206, 0x4207, 7, 17, 12, 13
_GET_SET, _SET_SET, _XSTATE = 0x4204, 0x4205, 0x202
_WALL = 0x40000000
_EVENT_STOP = 128
_RESTARTED = (-512, -513, -514, -516)  # linux/errno.h: ERESTARTSYS, -NOINTR, -NOHAND, _RESTARTBLOCK
_FUTEX, _WAIT_BITSET, _FUTEX_COMMAND = 202, 9, 0x7F
_WAITS = (35, 230, 7, 271, 23, 270, _FUTEX, 61, 0, 43, 288, 45, 47)
"""System calls in the order of preference: sleeps, polls, condition variables, wait4, read, accept, receive."""

_USER_CODE_64 = 0x33
_RED_ZONE_BYTES = 4096
_CALL_S = 10.0
_SEARCH_S = 3.0
_NAMES = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)


class _Registers(c.Structure):
    """struct user_regs_struct, sys/user.h."""

    _fields_ = tuple((name, c.c_ulonglong) for name in _NAMES)


class _Vector(c.Structure):
    _fields_ = (("base", c.c_void_p), ("n_bytes", c.c_size_t))


_ptrace = c.CDLL(None, use_errno=True).ptrace
_ptrace.restype = c.c_long
_ptrace.argtypes = (c.c_long, c.c_long, c.c_void_p, c.c_void_p)


class RemoteThread:
    """A stopped thread of another process."""

    def __init__(self, pid: int, tid: int):
        self.pid, self.tid = pid, tid
        self._registers, self._state = _Registers(), c.create_string_buffer(1 << 14)
        self._n_state_bytes = 0
        self._pending: list[int] = []

    def call(self, address: int, *arguments: int | bytes) -> int:
        """The result of a function of the process, as an int of C. bytes: a pointer to them, with a final zero.

        Raises CannotTrace if the function does not return within 10 s, or crashes.
        """
        top = (self._registers.rsp - _RED_ZONE_BYTES) & ~15
        words = []
        for argument in arguments:
            if isinstance(argument, bytes):
                top = (top - len(argument) - 1) & ~15
                self._write(top, argument + b"\0")
                argument = top
            words.append(argument)
        self._write(top - 8, bytes(8))  # the return address: a jump to 0 stops the thread
        registers = _Registers.from_buffer_copy(self._registers)
        for name, word in zip(("rdi", "rsi", "rdx", "rcx"), words, strict=False):
            setattr(registers, name, word)
        registers.rsp, registers.rip, registers.rax, registers.orig_rax = top - 8, address, 0, (1 << 64) - 1
        _request(_SET, self.tid, c.addressof(registers))
        _request(_CONTINUE, self.tid)
        self._await_return()
        _request(_GET, self.tid, c.addressof(registers))
        if registers.rip:
            raise CannotTrace(
                f"a call in process {self.pid} crashed at {registers.rip:#x}; the thread was restored"
            )
        return c.c_int32(registers.rax & 0xFFFFFFFF).value

    def _write(self, address: int, data: bytes) -> None:
        memory = os.open(f"/proc/{self.pid}/mem", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(memory, data, address)
        finally:
            os.close(memory)

    def _await_return(self) -> None:
        end_s = time.monotonic() + _CALL_S
        while True:
            status = _stopped(self.tid, end_s)
            if status is None:
                _request(_INTERRUPT, self.tid)
                _stopped(self.tid, time.monotonic() + _CALL_S)
                raise CannotTrace(f"a call in process {self.pid} did not return in {_CALL_S:.0f} s")
            if os.WSTOPSIG(status) == signal.SIGSEGV:
                return
            self.note_signal(status)
            _request(_CONTINUE, self.tid)

    def note_signal(self, status: int) -> None:
        """Keep the signal of a stop that a signal caused, to deliver it at the end."""
        if status >> 16 != _EVENT_STOP:
            self._pending.append(os.WSTOPSIG(status))

    def save(self) -> bool:
        """Keep the registers. Returns whether the thread waits in a system call that is restarted."""
        _request(_GET, self.tid, c.addressof(self._registers))
        vector = _Vector(c.addressof(self._state), len(self._state))
        _request(_GET_SET, self.tid, c.addressof(vector), _XSTATE)
        self._n_state_bytes = vector.n_bytes
        is_64 = self._registers.cs == _USER_CODE_64
        result = c.c_int64(self._registers.rax).value
        return is_64 and self._registers.orig_rax in _WAITS and result in _RESTARTED

    def restore(self) -> None:
        """Restore the registers and let the thread continue."""
        if self._n_state_bytes:
            vector = _Vector(c.addressof(self._state), self._n_state_bytes)
            _request(_SET_SET, self.tid, c.addressof(vector), _XSTATE)
            _request(_SET, self.tid, c.addressof(self._registers))
        _request(_DETACH, self.tid)
        for number in self._pending:
            signal.pidfd_send_signal(os.pidfd_open(self.pid), number)


@contextmanager
def remote_thread(pid: int) -> Iterator[RemoteThread]:
    """A thread of the process that may make calls, stopped inside the with block.

    Raises NotFound, NotAllowed, CannotTrace if the process has a tracer or no thread waits in a suitable call.
    """
    if os.uname().machine != "x86_64":
        raise CannotTrace(f"calls in other processes need x86-64, not {os.uname().machine}")
    end_s = time.monotonic() + _SEARCH_S
    while True:
        for tid in _waiting_threads(pid):
            thread = RemoteThread(pid, tid)
            if not _attach(thread):
                continue
            try:
                is_suitable = thread.save()
                if is_suitable:
                    yield thread
            finally:
                with suppress(ProcessLookupError):
                    thread.restore()
            if is_suitable:
                return
        if time.monotonic() > end_s:
            raise CannotTrace(
                f"no thread of process {pid} waits in a system call: all of them compute; try again later"
            )
        time.sleep(0.02)


def _attach(thread: RemoteThread) -> bool:
    """Stop the thread. Returns False if it has ended."""
    try:
        _request(_SEIZE, thread.tid)
        _request(_INTERRUPT, thread.tid)
        status = _stopped(thread.tid, time.monotonic() + 1)
        if status is not None:
            thread.note_signal(status)
        return status is not None
    except ProcessLookupError:
        return False
    except PermissionError as error:
        if tracer := _tracer(thread.pid):
            raise CannotTrace(
                f"process {thread.pid} is traced by process {tracer}, a debugger for example: end it first"
            ) from error
        raise NotAllowed(
            f"this user may not attach to process {thread.pid}: run as root; in a container, add the capability"
            " SYS_PTRACE; kernel.yama.ptrace_scope must be less than 3"
        ) from error


def _tracer(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("TracerPid:")), 0)


def _waiting_threads(pid: int) -> list[int]:
    """The threads that wait in a suitable system call, the most suitable first. Raises NotFound, NotAllowed."""
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                words = (task / "syscall").read_text().split()
                if words and words[0].isdecimal() and _is_suitable(int(words[0]), words[1:]):
                    found.append((_WAITS.index(int(words[0])), int(task.name)))
    except FileNotFoundError:
        raise NotFound(f"no process {pid} on this machine") from None
    except PermissionError:
        raise NotAllowed(f"this user may not read the threads of process {pid}: run as root") from None
    return [tid for _, tid in sorted(found)]


def _is_suitable(number: int, arguments: list[str]) -> bool:
    """Condition variables wait with FUTEX_WAIT_BITSET. Locks of the C library, malloc's too, use FUTEX_WAIT."""
    if number != _FUTEX:
        return number in _WAITS
    return len(arguments) > 1 and int(arguments[1], 16) & _FUTEX_COMMAND == _WAIT_BITSET


def _stopped(tid: int, end_s: float) -> int | None:
    """The status of the thread's next stop; None after the time. Raises ProcessLookupError if the thread has ended."""
    while True:
        which, status = os.waitpid(tid, _WALL | os.WNOHANG)
        if which and os.WIFSTOPPED(status):
            return status
        if which:
            raise ProcessLookupError(errno.ESRCH, f"thread {tid} has ended")
        if time.monotonic() > end_s:
            return None
        time.sleep(0.0002)


def _request(request: int, tid: int, data: int = 0, address: int = 0) -> None:
    """Raises OSError."""
    c.set_errno(0)
    if _ptrace(request, tid, address, data) == -1 and (number := c.get_errno()):
        raise OSError(number, f"ptrace {request:#x} of thread {tid}: {os.strerror(number)}")
