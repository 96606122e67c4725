"""What a hook costs on this machine: measured at the start, on a function of the agent's own process.

Calls a function of the C library, with and without a hook that takes the same steps as one on a CUDA function. The
function starts with an instruction that need not be single-stepped, as CUDA's do.

What a hook adds to a call depends on what has gone before: 0.9 us in a loop of calls, 7 us where the caches hold
nothing of the kernel's way into it, more on a CPU whose other half is busy. But the program's own first steps, which
find the process and the thread, take the same part of it everywhere: a hook with its return takes 14 to 19 times as
long (from 0.9 to 7.9 us; Xeon, Linux 6.18). So this number is measured here, and the programs tell how long these steps
took them (SLOT.way_ns). What the job loses is more than the call takes longer: AFTERMATH.

Takes about 0.3 s; the agent's other threads don't call the function, and no other process is hooked.
"""

import ctypes
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

from stallscope.capture.probes import elf
from stallscope.capture.probes.attaching import hooked_at
from stallscope.capture.probes.elf import Entry, NotElf
from stallscope.capture.probes.libbpf import Refused
from stallscope.capture.probes.operations import Hook
from stallscope.capture.probes.program import Program

AFTERMATH = 1.7
"""What a job loses, over what its calls take longer: its own code has to come back into the caches. Of a loop of
PyTorch that launches bound hooks on copies took 2.0 +- 0.7 % while they were on, where the calls told 1.1, those on
launches 12.6 +- 2.9 %, where they told 4.6 (an H200's host); of a loop on the CPU 8.0 +- 1.5 % where they told 6.2.
"""
ASSUMED = 16.0 * AFTERMATH
"""Where it cannot be measured."""

SCHEDULER_TIMES = 3.0
"""What a job loses where its threads leave the CPU and come back, over what the programs there tell
(SLOT.scheduler_ns): the kernel's way to them, those at wakeups, and what comes after. A loop of PyTorch on the CPU that
goes from one thread to the other 31 times in 5 ms was 1.1 +- 0.1 % slower where they told 0.35 (Xeon, Linux 6.18).
"""

_HARMLESS = ("lfind", "tfind", "a64l", "nrand48")
"""Do nothing that matters to zeros. Which of them starts with a cheap instruction depends on the build."""

_N_TURNS = 3
_FILLS = ((1 << 20, 100), (2 << 20, 100), (8 << 20, 20))
"""Bytes that are written between two calls, so that the caches hold something else, a little or all; calls."""


def times_way_in(program: Program) -> float:
    """What a job loses to a hook with its return, in times of its program's way in; ASSUMED where not measured."""
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
            return AFTERMATH * fmean(_measured(program, image.path, cheap[0], offset))
    except (OSError, NotElf, Refused, StopIteration):
        return ASSUMED


def _measured(program: Program, path: str, name: str, offset: int) -> list[float]:
    """A hook in ways in, for each of _FILLS. One hook for all of them: to take it off waits for the kernel."""
    function, nothing = getattr(ctypes.PyDLL(None), name), (ctypes.c_size_t * 8)()

    def call() -> None:
        function(nothing, nothing, nothing, ctypes.c_size_t(1), nothing)

    plain_ns: list[list[float]] = [[] for _ in _FILLS]
    hooked_ns: list[list[float]] = [[] for _ in _FILLS]
    way_ns: list[list[float]] = [[] for _ in _FILLS]
    for _ in range(_N_TURNS):
        for told_ns, fill in zip(plain_ns, _FILLS, strict=True):
            told_ns.append(_ns_per_call(call, *fill))
        link = program.attach(path, [Hook(offset, 0, "gauge", name)], pid=os.getpid())
        try:
            for told_ns, ways_ns, fill in zip(hooked_ns, way_ns, _FILLS, strict=True):
                told_ns.append(_ns_per_call(call, *fill))
                ways_ns.append(_way_in_ns(program))
                program.forget([os.getpid()])
        finally:
            program.release(link)
    return [
        max(min(hooked) - min(plain), 1.0) / min(ways)
        for plain, hooked, ways in zip(plain_ns, hooked_ns, way_ns, strict=True)
    ]


def _ns_per_call(call: Callable[[], None], n_bytes: int, n_calls: int) -> float:
    """The median, with what the clock takes."""
    other, took_ns = ctypes.create_string_buffer(n_bytes), []
    for _ in range(n_calls):
        ctypes.memset(other, 1, n_bytes)
        begin_ns = time.perf_counter_ns()
        call()
        took_ns.append(time.perf_counter_ns() - begin_ns)
    return median(took_ns)


def _way_in_ns(program: Program) -> float:
    """The mean of the calls that the program has seen, told as their bytes. Raises StopIteration: it saw none."""
    told = program.operations()
    row = next(row for key, row in zip(told.keys, told.values, strict=True) if key["tgid"] == os.getpid())
    return max(float(row["count_bytes"] / row["n"]), 1.0)


def _libc() -> Path:
    """The file of our own C library. Raises StopIteration where it is linked in."""
    maps = Path("/proc/self/maps").read_text()
    return Path(
        next(iter(re.findall(r"(/\S*/(?:libc\.so\.6|libc-[0-9.]+\.so|ld-musl-\S+))$", maps, re.MULTILINE)))
    )
