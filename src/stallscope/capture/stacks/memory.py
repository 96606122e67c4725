"""Another process's memory, read while it runs: nothing is stopped, nothing is attached.

What is read belongs to somebody else and may change or lie: every length is bounded by who asks.
"""

import ctypes as c
import errno
import os
from pathlib import Path

_MAX_BYTES = 1 << 20
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_NOBODY_READS = 3


class Unreadable(Exception):
    """The memory is not there, may not be read, or its process has gone. errno tells which."""

    def __init__(self, message: str, errno: int = 0):
        super().__init__(message)
        self.errno = errno


class _Vector(c.Structure):
    _fields_ = (("base", c.c_void_p), ("n_bytes", c.c_size_t))


class Memory:
    """The memory of one process. An address that it has not mapped raises Unreadable."""

    def __init__(self, pid: int):
        self.pid = pid
        self._read = c.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = c.c_ssize_t
        self._read.argtypes = (c.c_int, c.c_void_p, c.c_ulong, c.c_void_p, c.c_ulong, c.c_ulong)

    def read(self, address: int, n_bytes: int) -> bytes:
        """n_bytes from an address, all of them. Raises Unreadable."""
        if not 0 < n_bytes <= _MAX_BYTES or not 0 < address < 1 << 56:
            raise Unreadable(f"{n_bytes} bytes at {address:#x}", errno.EFAULT)
        buffer = c.create_string_buffer(n_bytes)
        here, there = _Vector(c.addressof(buffer), n_bytes), _Vector(address, n_bytes)
        n_read = self._read(self.pid, c.byref(here), 1, c.byref(there), 1, 0)
        if n_read != n_bytes:
            code = c.get_errno() if n_read < 0 else errno.EFAULT
            raise Unreadable(f"{n_bytes} bytes at {address:#x}: {os.strerror(code)}", code)
        return buffer.raw

    def word(self, address: int) -> int:
        """The 64-bit number at an address. Raises Unreadable."""
        return int.from_bytes(self.read(address, 8), "little")


def forbidden(yama: Path = _YAMA) -> str:
    """Why no memory of other processes can be read on this machine, in words; empty where it can."""
    try:
        scope = int(yama.read_text())
    except (OSError, ValueError):
        return ""
    if scope < _NOBODY_READS:
        return ""
    return "kernel.yama.ptrace_scope is 3, which forbids reading other processes' memory even to root"
