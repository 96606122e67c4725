"""The bytes that bpf/peek.bpf.c writes about a thread: its registers, and memory of its process.

Reading memory in this way needs no permission to trace a process, only permission to load BPF programs: it works under
Yama's ptrace_scope 3. A reading takes 0.1 ms; process_vm_readv takes a microsecond.
"""

from collections.abc import Callable

import numpy as np

from stallscope.events import kernel
from stallscope.events.layout import Array

_ROW = kernel.PEEK_THREAD.itemsize

Peek = Callable[[int, int, int], bytes]
"""As Program.peek: (thread, address, pieces)."""


def thread_rows(data: bytes) -> tuple[Array, Array] | None:
    """The two rows of kernel.PEEK_THREAD, before and after; None if the kernel side wrote nothing."""
    if len(data) < 2 * _ROW:
        return None
    return np.frombuffer(data[:_ROW], kernel.PEEK_THREAD)[0], np.frombuffer(data[-_ROW:], kernel.PEEK_THREAD)[
        0
    ]


def memory_in(data: bytes, address: int) -> bytes:
    """The memory from an address on."""
    pieces = data[_ROW:-_ROW]
    first = kernel.PEEK_BYTES - address % kernel.PEEK_BYTES
    return pieces[: min(first, len(pieces))] + pieces[kernel.PEEK_BYTES :]


def read_memory(peek: Peek, tid: int, address: int, n_bytes: int) -> bytes:
    """n_bytes of the memory of a thread's process; fewer if the mapping ends or cannot be read."""
    data = b""
    while len(data) < n_bytes:
        at = address + len(data)
        remaining = n_bytes - len(data) + at % kernel.PEEK_BYTES
        n_pieces = min(-(-remaining // kernel.PEEK_BYTES), kernel.PEEK_PIECES)
        chunk = memory_in(peek(tid, at, n_pieces), at)
        if not chunk:
            break
        data += chunk
    return data[:n_bytes]
