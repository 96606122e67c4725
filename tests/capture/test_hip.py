"""AMD: HIP's and RCCL's functions, on stub libraries. Not run on AMD hardware."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stallscope.capture.probes import elf, hip_table, operations
from stallscope.capture.probes.discovery import _LIBRARY
from stallscope.capture.probes.operations import SYMBOLS, Hook
from stallscope.capture.probes.program import Program
from stallscope.capture.rows.call_statistics import CallSums
from stallscope.events.kernel import HookGroup
from stallscope.events.names import Direction, Op

from .always_on import AlwaysOn

_STUBS = """
#include <stddef.h>
int hipMalloc(void **out, size_t n) { *out = (void *)4096; return 0; }
int hipFree(void *at) { return 0; }
int hipMemcpy(void *to, const void *from, size_t n, int kind) { return 0; }
int hipStreamSynchronize(void *stream) { return 0; }
int hipModuleLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **arguments, void **extra) { return 0; }
int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, void *comm, void *stream) { return 0; }
"""
MIB = 1 << 20
TO_HOST = 2


def test_the_libraries_of_amd_are_discovered():
    for path in (
        "/opt/rocm/lib/libamdhip64.so.6",
        "/opt/rocm/lib/librccl.so.1",
        "/x/torch/lib/libamdhip64.so",
    ):
        assert _LIBRARY.search(path)


def test_functions_of_hip_have_the_arguments_of_the_functions_of_cuda():
    entries = {entry.symbol: entry.operation for entry in operations.ENTRIES}
    for cuda, hip in hip_table._SAME_ARGUMENTS.items():
        assert entries[hip]._replace(names="") == entries[cuda]._replace(names=""), hip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stubs of both libraries in one file."""
    path = tmp_path_factory.mktemp("amd") / "libamdhip64.so"
    source = path.with_suffix(".c")
    source.write_text(_STUBS)
    command = [
        "gcc",
        "-O1",
        "-fno-omit-frame-pointer",
        "-w",
        "-shared",
        "-fPIC",
        "-o",
        str(path),
        str(source),
    ]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(scope="module")
def hooks(library: Path) -> list[Hook]:
    """All groups of hooks."""
    with elf.open_image(library) as image:
        exported = elf.exported_functions(image, operations.names(groups=HookGroup))
    return operations.hooks({name: symbol.offset for name, symbol in exported.items()}, groups=HookGroup)


@pytest.mark.bpf
@pytest.mark.compiler
@pytest.mark.live
def test_calls_of_hip_and_rccl_are_counted(tracing: Callable[..., Program], puppet, library: Path):
    program = tracing()
    puppet.does(
        "out = P()",
        f"lib.hipMalloc(ctypes.byref(out), Z({MIB}))",
        f"lib.hipMemcpy(P(1), P(2), Z({MIB}), {TO_HOST})",
        "[lib.hipStreamSynchronize(P(0)) for _ in range(3)]",
        "lib.hipModuleLaunchKernel(P(1), 1, 1, 1, 1, 1, 1, 0, P(0), P(0), P(0))",
        "lib.ncclAllReduce(P(1), P(2), Z(10), 7, 0, P(5), P(0))",
        "lib.hipFree(out)",
    )
    tallies = CallSums(1, program.operations, program.balances, AlwaysOn(time.monotonic_ns()))
    (_, rows), _ = tallies.rows(time.monotonic_ns())
    counts = {(SYMBOLS[row["symbol"]], Op(row["op"])): int(row["n"]) for row in rows}
    assert counts[("hipStreamSynchronize", Op.SYNC)] == 3
    assert counts[("hipMalloc", Op.ALLOC)] == counts[("hipFree", Op.FREE)] == 1
    assert counts[("hipModuleLaunchKernel", Op.LAUNCH)] == 1
    (copy,) = [row for row in rows if SYMBOLS[row["symbol"]] == "hipMemcpy"]
    assert (copy["count_bytes"], copy["direction"]) == (MIB, Direction.DEVICE_TO_HOST)
    (arrival,) = program.arrivals.drain()
    assert (arrival["op"], arrival["count"]) == (Op.ALL_REDUCE, 10)
