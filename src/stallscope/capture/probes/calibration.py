"""The cost of a probe on this machine, measured at the start on a function of the agent's own process.

Calls a function of the C library, with and without a probe that takes the same steps as a probe on a CUDA function. The
function starts with an instruction that need not be single-stepped, as CUDA's functions do.

The cost of a probe depends on the state of the caches: 0.9 us in a loop of calls, 7 us if the caches hold nothing of
the kernel's entry path, more on a CPU whose hyperthread is busy. But the program's own first steps, which find the
process and the thread, are a constant share of that cost: a probe with its return takes 14 to 19 times as long (from
0.9 to 7.9 us; Xeon, Linux 6.18). So this ratio is measured here, and the programs report the time of these steps, the
probe entry cost (SLOT.way_ns). The job loses more than the additional time of its calls: AFTERMATH.

The measurement takes about 0.3 s. The agent's other threads don't call the function, and no other process is probed.
"""

import ctypes
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

from stallscope.capture.probes import elf
from stallscope.capture.probes.attaching import probe_offsets
from stallscope.capture.probes.elf import Entry, NotElf
from stallscope.capture.probes.libbpf import KernelRefused
from stallscope.capture.probes.operations import Hook
from stallscope.capture.probes.program import Program

AFTERMATH = 1.7
"""The job's loss, relative to the additional time of its calls: the job's own code has to return to the caches. In a
launch-bound PyTorch loop, probes on copies cost 2.0 +- 0.7 % while they were on, where the calls reported 1.1,
and probes on launches 12.6 +- 2.9 %, where the calls reported 4.6 (an H200's host). In a loop on the CPU the cost
was 8.0 +- 1.5 % where the calls reported 6.2.
"""
ASSUMED = 16.0 * AFTERMATH
"""The ratio where it cannot be measured."""

SCHEDULER_TIMES = 3.0
"""The job's loss when its threads leave the CPU and return, relative to the time that the programs there report
(SLOT.scheduler_ns): it includes the kernel's entry path, the programs at wakeups, and cache misses afterwards. A
PyTorch loop on the CPU that switches between two threads 31 times in 5 ms was 1.1 +- 0.1 % slower where the
programs reported 0.35 (Xeon, Linux 6.18).
"""

_HARMLESS = ("lfind", "tfind", "a64l", "nrand48")
"""Functions without side effects on zeros. The build determines which of them start with a cheap instruction."""

_N_REPETITIONS = 3
_FILLS = ((1 << 20, 100), (2 << 20, 100), (8 << 20, 20))
"""(bytes, calls): bytes written between two calls, which replace none, some or all of the cache contents."""


def probe_cost_ratio(program: Program) -> float:
    """The job's loss by a probe with its return, in multiples of its program's entry cost; ASSUMED if not measured."""
    if program.mode == "perf":
        return ASSUMED
    try:
        path = _libc()
        with elf.open_image(path) as image:
            symbols = elf.exported_functions(image, _HARMLESS)
            entries = {name: elf.probe_entry(image, symbol) for name, symbol in symbols.items()}
            cheap = [name for name in _HARMLESS if name in symbols and entries[name] is not Entry.STEPPED]
            if not cheap:
                return ASSUMED
            offset = probe_offsets(symbols, entries)[cheap[0]]
            return AFTERMATH * fmean(_measure_ratios(program, image.path, cheap[0], offset))
    except (OSError, NotElf, KernelRefused, StopIteration):
        return ASSUMED


def _measure_ratios(program: Program, path: str, name: str, offset: int) -> list[float]:
    """The cost of a probe in multiples of the entry cost, for each of _FILLS. All share one probe: a detach waits
    for the kernel.
    """
    function, nothing = getattr(ctypes.PyDLL(None), name), (ctypes.c_size_t * 8)()

    def call() -> None:
        function(nothing, nothing, nothing, ctypes.c_size_t(1), nothing)

    plain_ns: list[list[float]] = [[] for _ in _FILLS]
    hooked_ns: list[list[float]] = [[] for _ in _FILLS]
    entry_ns_by_fill: list[list[float]] = [[] for _ in _FILLS]
    for _ in range(_N_REPETITIONS):
        for samples_ns, fill in zip(plain_ns, _FILLS, strict=True):
            samples_ns.append(_ns_per_call(call, *fill))
        link = program.attach(path, [Hook(offset, 0, "gauge", name)], pid=os.getpid())
        try:
            for samples_ns, entry_costs_ns, fill in zip(hooked_ns, entry_ns_by_fill, _FILLS, strict=True):
                samples_ns.append(_ns_per_call(call, *fill))
                entry_costs_ns.append(_entry_cost_ns(program))
                program.forget([os.getpid()])
        finally:
            program.release(link)
    return [
        max(min(hooked) - min(plain), 1.0) / min(entry_costs)
        for plain, hooked, entry_costs in zip(plain_ns, hooked_ns, entry_ns_by_fill, strict=True)
    ]


def _ns_per_call(call: Callable[[], None], n_bytes: int, n_calls: int) -> float:
    """The median, including the time of the clock reading."""
    buffer, durations_ns = ctypes.create_string_buffer(n_bytes), []
    for _ in range(n_calls):
        ctypes.memset(buffer, 1, n_bytes)
        begin_ns = time.perf_counter_ns()
        call()
        durations_ns.append(time.perf_counter_ns() - begin_ns)
    return median(durations_ns)


def _entry_cost_ns(program: Program) -> float:
    """The mean entry cost of the calls that the program saw, passed as their bytes. Raises StopIteration without
    calls.
    """
    operations = program.operations()
    row = next(
        row for key, row in zip(operations.keys, operations.values, strict=True) if key["tgid"] == os.getpid()
    )
    return max(float(row["count_bytes"] / row["n"]), 1.0)


def _libc() -> Path:
    """The file of our own C library. Raises StopIteration if it is linked statically."""
    maps = Path("/proc/self/maps").read_text()
    return Path(
        next(iter(re.findall(r"(/\S*/(?:libc\.so\.6|libc-[0-9.]+\.so|ld-musl-\S+))$", maps, re.MULTILINE)))
    )
