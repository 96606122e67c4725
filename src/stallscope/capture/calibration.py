"""What a hook costs on this machine: measured at the start, on a function of the agent's own process.

Calls a function of the C library, with and without a hook that takes the same steps as one on a CUDA function. The
function starts with an instruction that need not be single-stepped, as CUDA's do. Between two calls the caches are
filled with something else, as they are between two calls of a framework: where they still hold the kernel's way into
the hook, it costs an eighth of what it costs where they hold nothing of it. What the programs themselves do is a tenth
of either. Takes about 0.3 s; the agent's other threads don't call the function, and no other process is hooked.
"""

import ctypes
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from stallscope.capture import elf
from stallscope.capture.attaching import hooked_at
from stallscope.capture.elf import Entry, NotElf
from stallscope.capture.libbpf import Refused
from stallscope.capture.operations import Hook
from stallscope.capture.program import Program


class HookCost(NamedTuple):
    """ns that a hook with its return adds to a call: in a row of calls, and where none has come for long."""

    warm_ns: float
    cold_ns: float

    def lost_ns(self, n_hits: float, n_cold: float) -> float:
        """What so many hits have cost, two for a hook with its return; n_cold: calls that came after long."""
        return n_hits / 2 * self.warm_ns + n_cold * (self.cold_ns - self.warm_ns)


ASSUMED = HookCost(2000.0, 8000.0)
"""Where it cannot be measured: what a slow machine needs."""

_BESIDE_A_JOB = 1.3
"""What a job loses to a hook is more than its call takes longer: what comes after it finds its caches filled by the
kernel. Hooks on all of 67 calls a request took 3.1 us each where this loop told 2.4 (an H200's host, PyTorch).
"""

_HARMLESS = ("lfind", "tfind", "a64l", "nrand48")
"""Do nothing that matters to zeros. Which of them starts with a cheap instruction depends on the build."""

_N_TURNS = 3
_WARM_BYTES, _N_WARM = 2 << 20, 300
"""As much as the second cache of a core. Beside real jobs on an H200's host (Xeon) a hook with its return took 1.8
to 3.1 us (a loop of launches and two of requests, with hooks on all calls); half as much told 1.2 to 1.5, this 2.0 to
2.5, twice as much 3.0.
"""
_COLD_BYTES, _N_COLD = 8 << 20, 30
"""More than any core's second cache: more tells no more."""


def hook_cost(program: Program) -> HookCost:
    """What a hook costs here; ASSUMED where it cannot be measured."""
    if program.mode == "perf":
        return ASSUMED
    try:
        path = _libc()
        with elf.opened(path) as image:
            found = elf.exported(image, _HARMLESS)
            entries = {name: elf.entry(image, symbol) for name, symbol in found.items()}
            cheap = [name for name in _HARMLESS if name in found and entries[name] is not Entry.STEPPED]
            if not cheap:
                return ASSUMED
            offset = hooked_at(found, entries)[cheap[0]]
            return _measured(program, image.path, cheap[0], offset)
    except (OSError, NotElf, Refused, StopIteration):
        return ASSUMED


def _measured(program: Program, path: str, name: str, offset: int) -> HookCost:
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
    warm_ns, cold_ns = (
        _BESIDE_A_JOB * max(min(on) - min(off), 1.0)
        for off, on in zip(zip(*plain, strict=True), zip(*hooked, strict=True), strict=True)
    )
    return HookCost(warm_ns, max(warm_ns, cold_ns))


def _ns_per_call(call: Callable[..., int], arguments: tuple[object, ...]) -> tuple[float, float]:
    """The medians of calls that find the caches full of something else, little and much; with what the clock takes."""
    other, medians_ns = ctypes.create_string_buffer(_COLD_BYTES), []
    for n_bytes, n_calls in ((_WARM_BYTES, _N_WARM), (_COLD_BYTES, _N_COLD)):
        took_ns = []
        for _ in range(n_calls):
            ctypes.memset(other, 1, n_bytes)
            begin_ns = time.perf_counter_ns()
            call(*arguments)
            took_ns.append(time.perf_counter_ns() - begin_ns)
        medians_ns.append(median(took_ns))
    return medians_ns[0], medians_ns[1]


def _libc() -> Path:
    """The file of our own C library. Raises StopIteration where it is linked in."""
    maps = Path("/proc/self/maps").read_text()
    return Path(
        next(iter(re.findall(r"(/\S*/(?:libc\.so\.6|libc-[0-9.]+\.so|ld-musl-\S+))$", maps, re.MULTILINE)))
    )
