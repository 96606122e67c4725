"""Another process's memory, read while it runs, without a stop and without attaching.

The process may change the data or write misleading data: the caller bounds every length.
"""

import ctypes as c
import errno
import os
from pathlib import Path

from stallscope.capture.stacks.peek_abi import Peek, read_memory

_MAX_BYTES = 1 << 20
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_NO_ATTACH = 3


class Unreadable(Exception):
    """The memory does not exist, may not be read, or its process has ended. errno distinguishes these."""

    def __init__(self, message: str, errno: int = 0):
        super().__init__(message)
        self.errno = errno


class _Vector(c.Structure):
    _fields_ = (("base", c.c_void_p), ("n_bytes", c.c_size_t))


class Memory:
    """The memory of one process. An address that it has not mapped raises Unreadable.

    peek: reads where process_vm_readv may not.
    """

    def __init__(self, pid: int, peek: Peek | None = None):
        self.pid, self._peek = pid, peek
        self._read = c.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = c.c_ssize_t
        self._read.argtypes = (c.c_int, c.c_void_p, c.c_ulong, c.c_void_p, c.c_ulong, c.c_ulong)

    def read(self, address: int, n_bytes: int) -> bytes:
        """n_bytes from an address, all or none. Raises Unreadable."""
        if not 0 < n_bytes <= _MAX_BYTES or not 0 < address < 1 << 56:
            raise Unreadable(f"{n_bytes} bytes at {address:#x}", errno.EFAULT)
        error, data = self._by_system_call(address, n_bytes)
        if error == errno.EPERM and self._peek:
            data = read_memory(self._peek, self.pid, address, n_bytes)
        if len(data) != n_bytes:
            error = error or errno.EFAULT
            raise Unreadable(f"{n_bytes} bytes at {address:#x}: {os.strerror(error)}", error)
        return data

    def _by_system_call(self, address: int, n_bytes: int) -> tuple[int, bytes]:
        """Error number and the data read."""
        buffer = c.create_string_buffer(n_bytes)
        local, remote = _Vector(c.addressof(buffer), n_bytes), _Vector(address, n_bytes)
        n_read = self._read(self.pid, c.byref(local), 1, c.byref(remote), 1, 0)
        return (c.get_errno(), b"") if n_read < 0 else (0, buffer.raw[:n_read])

    def word(self, address: int) -> int:
        """The 64-bit number at an address. Raises Unreadable."""
        return int.from_bytes(self.read(address, 8), "little")


def read_restriction(yama: Path = _YAMA) -> str:
    """The reason that the memory of other processes cannot be read by a system call; empty where it can."""
    try:
        scope = int(yama.read_text())
    except (OSError, ValueError):
        return ""
    if scope < _NO_ATTACH:
        return ""
    return "kernel.yama.ptrace_scope is 3, which forbids reading other processes' memory even to root"
