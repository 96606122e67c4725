"""What a hook costs on this machine: measured at the start, on a function of the agent's own process.

Calls a function of the C library, with and without a hook that takes the same steps as one on a CUDA function. The
function starts with an instruction that need not be single-stepped, as CUDA's do. Between two calls the caches are
filled with something else, as they are between two calls of a framework: where they still hold the kernel's way into
the hook, it costs half of what a real job pays. Takes about 0.2 s; the agent's other threads don't call the function,
and no other process is hooked.
"""

import ctypes
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from stallscope.capture import elf
from stallscope.capture.attaching import hooked_at
from stallscope.capture.elf import Entry, NotElf
from stallscope.capture.libbpf import Refused
from stallscope.capture.operations import Hook
from stallscope.capture.program import Program

ASSUMED_NS = 2000.0
"""Where it cannot be measured: what a slow machine needs."""

_HARMLESS = ("lfind", "tfind", "a64l", "nrand48")
"""Do nothing that matters to zeros. Which of them starts with a cheap instruction depends on the build."""

_N_CALLS, _N_TURNS = 300, 5
_CACHE_BYTES = 2 << 20
"""As much as the second cache of a core. Beside real jobs on an H200's host (Xeon) a hook with its return took 1.8
to 1.9 us (a loop of launches and one of requests, with hooks on all calls); half as much told 1.2 to 1.5, twice as
much 3.0.
"""


def hook_cost_ns(program: Program) -> float:
    """ns that a hook with its return adds to a call; ASSUMED_NS where it cannot be measured."""
    if program.mode == "perf":
        return ASSUMED_NS
    try:
        path = _libc()
        with elf.opened(path) as image:
            found = elf.exported(image, _HARMLESS)
            entries = {name: elf.entry(image, symbol) for name, symbol in found.items()}
            cheap = [name for name in _HARMLESS if name in found and entries[name] is not Entry.STEPPED]
            if not cheap:
                return ASSUMED_NS
            offset = hooked_at(found, entries)[cheap[0]]
            return _measured(program, image.path, cheap[0], offset)
    except (OSError, NotElf, Refused, StopIteration):
        return ASSUMED_NS


def _measured(program: Program, path: str, name: str, offset: int) -> float:
    call = getattr(ctypes.PyDLL(None), name)
    nothing = (ctypes.c_size_t * 8)()
    arguments = (nothing, nothing, nothing, ctypes.c_size_t(1), nothing)
    plain, hooked = [], []
    for _ in range(_N_TURNS):
        plain.append(_ns_per_call(call, arguments))
        link = program.attach(path, [Hook(offset, 0, "gauge", name)], pid=os.getpid())
        try:
            hooked.append(_ns_per_call(call, arguments))
        finally:
            program.release(link)
    program.forget([os.getpid()])
    return max(min(hooked) - min(plain), 1.0)


def _ns_per_call(call: Callable[..., int], arguments: tuple[object, ...]) -> float:
    """The median of calls that find the caches full of something else; with what the clock takes."""
    other, took_ns = ctypes.create_string_buffer(_CACHE_BYTES), []
    for _ in range(_N_CALLS):
        ctypes.memset(other, 1, _CACHE_BYTES)
        begin_ns = time.perf_counter_ns()
        call(*arguments)
        took_ns.append(time.perf_counter_ns() - begin_ns)
    return median(took_ns)


def _libc() -> Path:
    """The file of our own C library. Raises StopIteration where it is linked in."""
    maps = Path("/proc/self/maps").read_text()
    return Path(
        next(iter(re.findall(r"(/\S*/(?:libc\.so\.6|libc-[0-9.]+\.so|ld-musl-\S+))$", maps, re.MULTILINE)))
    )
