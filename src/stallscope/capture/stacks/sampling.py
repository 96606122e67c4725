"""Samples a running thread at a tick of its CPU time: registers in user mode and a copy of its stack.

    thread = sample_thread(tid)         # native.StoppedThread, or None if it does not run, or if the kernel refuses

By a sampling event on that single thread (perf_event_open), open for some milliseconds: it costs the thread one
interrupt. Registers and stack are taken together, so they are consistent. Return addresses that probes have replaced
stay replaced: a stack ends there. x86-64 only. Layout: perf_event_open(2), PERF_RECORD_SAMPLE;
arch/x86/include/uapi/asm/perf_regs.h.
"""

import ctypes
import mmap
import os
import platform
import struct
import time

from stallscope.capture.stacks.eh_frame import BP, BX, IP, SP
from stallscope.capture.stacks.native import StoppedThread

_SYSCALL, _ATTR_BYTES = 298, 120
_SOFTWARE, _CPU_CLOCK = 1, 0
_REGISTERS, _STACK = 1 << 12, 1 << 13
_NUMBERS = {1: BX, 6: BP, 7: SP, 8: IP, 20: 12, 21: 13, 22: 14, 23: 15}
"""Our register numbers, in the order of the kernel's list."""
_STACK_BYTES = 24 << 10
_EVERY_NS = 1_000_000
_CLOEXEC = 8
_HEAD_AT = 1024
_PAGES = 16
_RECORD_SAMPLE = 9
_POLL_EVERY_S, _N_POLLS = 0.004, 8


def sample_thread(tid: int) -> StoppedThread | None:
    """The thread at one moment; None if it did not run, has ended, or may not be sampled."""
    if platform.machine() != "x86_64":
        return None
    attributes = ctypes.create_string_buffer(_ATTR_BYTES)
    struct.pack_into(
        "=IIQQQ", attributes, 0, _SOFTWARE, _ATTR_BYTES, _CPU_CLOCK, _EVERY_NS, _REGISTERS | _STACK
    )
    struct.pack_into("=QI", attributes, 80, sum(1 << number for number in _NUMBERS), _STACK_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_SYSCALL, attributes, tid, -1, -1, _CLOEXEC)
    if fd < 0:
        return None
    try:
        with mmap.mmap(fd, (1 + _PAGES) * mmap.PAGESIZE) as ring:
            for _ in range(_N_POLLS):
                time.sleep(_POLL_EVERY_S)
                if struct.unpack_from("=Q", ring, _HEAD_AT)[0]:
                    return _parse_sample(ring[mmap.PAGESIZE :])
    except OSError:
        return None
    finally:
        os.close(fd)
    return None


def _parse_sample(data: bytes) -> StoppedThread | None:
    """The first record, if it is a sample of a thread with registers in user mode."""
    kind, _, n_bytes = struct.unpack_from("=IHH", data)
    if kind != _RECORD_SAMPLE or n_bytes < 8 + 8 + 8 * len(_NUMBERS) + 8:
        return None
    abi, *values = struct.unpack_from(f"=Q{len(_NUMBERS)}Q", data, 8)
    if abi != 2:  # PERF_SAMPLE_REGS_ABI_64
        return None
    at = 16 + 8 * len(_NUMBERS)
    (n_stack_bytes,) = struct.unpack_from("=Q", data, at)
    if not n_stack_bytes or at + 8 + n_stack_bytes + 8 > n_bytes:
        return None
    (n_copied,) = struct.unpack_from("=Q", data, at + 8 + n_stack_bytes)
    registers = dict(zip(_NUMBERS.values(), values, strict=True))
    return StoppedThread(registers, data[at + 8 : at + 8 + min(n_copied, n_stack_bytes)])
