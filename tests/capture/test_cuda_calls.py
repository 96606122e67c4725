"""Arguments, counts and memory balance of CUDA calls: probes on functions with CUDA's signatures."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stallscope.capture.probes import elf, operations
from stallscope.capture.probes.operations import SYMBOLS, Hook
from stallscope.capture.probes.program import MODES, Program
from stallscope.capture.rows import records
from stallscope.capture.rows.call_statistics import CallSums
from stallscope.events.kernel import HookGroup, Kind
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, Direction, HostMemory, MemoryKind, Op

from .always_on import AlwaysOn
from .conftest import TARGETS

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

MIB = 1 << 20
PREPARE = (
    "out, pitch = P(), Z()",
    "class Dim(ctypes.Structure): _fields_ = [(c, ctypes.c_uint) for c in 'xyz']",
    "class Extent(ctypes.Structure): _fields_ = [(c, Z) for c in 'whd']",
    "def words(*them): return (ctypes.c_ulonglong * len(them))(*them)",
    "def malloc(call, n, *more): getattr(lib, call)(ctypes.byref(out), Z(n), *more); return P(out.value)",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The emulated functions."""
    path = tmp_path_factory.mktemp("cuda") / "libcudart.so"
    subprocess.run(
        ["gcc", "-O1", "-Wno-unused-parameter", "-shared", "-fPIC", "-o", path, TARGETS / "cuda.c"],
        check=True,
    )
    return path


@pytest.fixture(scope="module")
def hooks(library: Path) -> list[Hook]:
    """All groups of hooks."""
    with elf.open_image(library) as image:
        exported = elf.exported_functions(image, operations.names(groups=HookGroup))
    return operations.hooks({name: symbol.offset for name, symbol in exported.items()}, groups=HookGroup)


def tallies(program: Program) -> CallSums:
    return CallSums(1, program.operations, program.balances, AlwaysOn(time.monotonic_ns()))


def counted(program: Program, pid: int) -> dict[str, Array]:
    """Rows of operations of one process, by function; where one has several directions, by both."""
    (_, rows), _ = tallies(program).rows(time.monotonic_ns())
    own_rows = rows[rows["pid"] == pid]
    names = [SYMBOLS[row["symbol"]] for row in own_rows]
    return {
        name if names.count(name) == 1 else f"{name} {Direction(row['direction']).name}": row
        for name, row in zip(names, own_rows, strict=True)
    }


def held(program: Program, pid: int) -> dict[tuple[MemoryKind, int], tuple[int, int, int]]:
    """(live bytes, live, peak bytes) by kind and device."""
    _, (_, rows) = tallies(program).rows(time.monotonic_ns())
    return {
        (MemoryKind(row["kind"]), int(row["device"])): (
            int(row["live_bytes"]),
            int(row["n_live"]),
            int(row["peak_bytes"]),
        )
        for row in rows[rows["pid"] == pid]
    }


def calls(program: Program, pid: int) -> Array:
    events = program.events.drain()
    return records.of_kind(events[events["pid"] == pid], Kind.CALL)


@pytest.mark.parametrize("mode", MODES)
def test_every_call_is_counted_with_its_bytes(tracing: Callable[..., Program], puppet, mode: str):
    program = tracing(modes=(mode,))
    copy = "[lib.{}(P(1), P(2), Z({}), {}, P(0)) for _ in range(100)]"
    puppet.does(
        copy.format("cudaMemcpy", MIB, 1),
        copy.format("cudaMemcpy", 2 * MIB, 2),
        copy.format("cudaMemcpy", 4 * MIB, 3),
        copy.format("cudaMemcpyAsync", 8 * MIB, 1),
        "lib.cudaMemcpyPeer(P(1), 0, P(2), 1, Z(5))",
    )
    result = counted(program, puppet.pid)
    assert {name: (row["n"], row["count_bytes"]) for name, row in result.items()} == {
        "cudaMemcpy HOST_TO_DEVICE": (100, 100 * MIB),
        "cudaMemcpy DEVICE_TO_HOST": (100, 200 * MIB),
        "cudaMemcpy DEVICE_TO_DEVICE": (100, 400 * MIB),
        "cudaMemcpyAsync": (100, 800 * MIB),
        "cudaMemcpyPeer": (1, 5),
    }
    assert result["cudaMemcpyPeer"]["direction"] == Direction.PEER
    assert all(row["op"] == Op.COPY for row in result.values())
    assert all(n == 0 for name, n in program.losses().items() if name.startswith("lost_"))


def test_a_row_has_the_durations_of_its_calls(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        "lib.set_sleep(20000); lib.cudaFree(P(0)); lib.set_sleep(5000)",
        "lib.cudaFree(P(0)); lib.set_sleep(0)",
    )
    puppet.does("[lib.cudaFree(P(0)) for _ in range(7)]")
    row = counted(program, puppet.pid)["cudaFree"]
    assert row["first_ns"] >= 20_000_000
    assert 5_000_000 <= row["max_ns"] < row["first_ns"]
    assert row["total_ns"] >= row["first_ns"] + row["max_ns"]
    histogram = {int(edge): n for edge, n in json.loads(row["histogram"]).items()}
    assert sum(histogram.values()) == row["n"] == row["n_seen"] == 9
    assert sum(n for edge, n in histogram.items() if edge > 5_000_000) >= 2
    assert min(histogram) < 1_000_000


def test_rows_count_only_calls_since_the_previous_row(tracing: Callable[..., Program], puppet):
    program = tracing()
    output = tallies(program)
    puppet.does("[lib.cudaFree(P(0)) for _ in range(3)]")
    assert output.rows(time.monotonic_ns())[0][1]["n"].tolist() == [3]
    assert not len(output.rows(time.monotonic_ns())[0][1])
    puppet.does("[lib.cudaFree(P(0)) for _ in range(2)]")
    (row,) = output.rows(time.monotonic_ns())[0][1]
    assert (row["n"], row["first_ns"], row["is_estimate"]) == (2, UNKNOWN, 0)


def test_copies_in_two_and_three_dimensions_have_their_bytes(tracing: Callable[..., Program], puppet):
    program = tracing(slow_call_ns=0)
    runtime = "words(0, 0,0,0, 0xa0,512,64,8, 0, 0,0,0, 0xb0,512,64,8, 64,8,4, 2)"
    driver_2d = "words(0,0, 1, 0xc0,0,0,64, 0,0, 2, 0,0xd0,0,64, 100,30)"
    driver_3d = "words(0,0,0,0, 2, 0,0xe0,0,0,64,1, 0,0,0,0, 1, 0xf0,0,0,0,64,1, 10,20,30)"
    puppet.does(
        *PREPARE,
        "lib.cudaMemcpy2D(P(7), Z(512), P(8), Z(512), Z(100), Z(30), 1)",
        "lib.cudaMemcpy2DAsync(P(7), Z(512), P(8), Z(512), Z(100), Z(31), 2, P(99))",
        f"lib.cudaMemcpy3D({runtime})",
        f"lib.cuMemcpy2D_v2({driver_2d})",
        f"lib.cuMemcpy3D_v2({driver_3d})",
    )
    result = calls(program, puppet.pid)
    assert result["count_bytes"].tolist() == [3000, 3100, 64 * 8 * 4, 3000, 6000]
    assert result["direction"].tolist() == [
        Direction.HOST_TO_DEVICE,
        Direction.DEVICE_TO_HOST,
        Direction.DEVICE_TO_HOST,
        Direction.HOST_TO_DEVICE,
        Direction.DEVICE_TO_HOST,
    ]
    assert result["address"].tolist() == [7, 7, 0xB0, 0xD0, 0xF0]
    assert result["stream"][1] == 99


def test_launches_are_recorded_with_grid_and_block(tracing: Callable[..., Program], puppet):
    program = tracing(slow_call_ns=0)
    config = "(ctypes.c_uint * 16)(5, 6, 7, 8, 9, 10, 0, 0, 77)"
    puppet.does(
        *PREPARE,
        "lib.cudaLaunchKernel(P(3), Dim(1, 2, 3), Dim(32, 4, 2), P(0), Z(0), P(55))",
        "lib.cuLaunchKernel(P(4), 11, 12, 13, 14, 15, 16, 0, P(66), P(0), P(0))",
        f"lib.cudaLaunchKernelExC({config}, P(5), P(0))",
        "lib.cudaGraphLaunch(P(6), P(88))",
    )
    result = calls(program, puppet.pid)
    assert result["op"].tolist() == [Op.LAUNCH] * 3 + [Op.GRAPH_LAUNCH]
    assert result["grid"].tolist() == [[1, 2, 3], [11, 12, 13], [5, 6, 7], [0, 0, 0]]
    assert result["block"].tolist() == [[32, 4, 2], [14, 15, 16], [8, 9, 10], [0, 0, 0]]
    assert result["handle"].tolist() == [3, 4, 5, 6]
    assert result["stream"].tolist() == [55, 66, 77, 88]
    assert (result["category"] == Category.NONE).all()
    rows = records.call_arguments(result, node=3)
    assert rows["grid_y"].tolist() == [2, 12, 6, 0] and (rows["node"] == 3).all()


def test_the_balance_of_memory_is_exact(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        *PREPARE,
        "lib.cudaSetDevice(2)",
        "some = [malloc('cudaMalloc', 1000) for _ in range(5)]",
        "[lib.cudaFree(p) for p in some[:3]]",
        "managed, host = malloc('cudaMallocManaged', 300, 1), malloc('cudaHostAlloc', 400, 0)",
        "lib.cudaHostRegister(P(0x5000), Z(500), 0)",
        "pool = malloc('cudaMallocAsync', 600, P(1)), malloc('cudaMallocFromPoolAsync', 60, P(5), P(1))",
        "lib.cudaFreeAsync(pool[1], P(1))",
        "made = malloc('cuMemCreate', 700, words(1, 4 << 32 | 1), ctypes.c_ulonglong(0))",
        "lib.cudaMallocPitch(ctypes.byref(out), ctypes.byref(pitch), Z(100), Z(3))",
        "lib.cudaMalloc3D(words(0, 0, 0, 0), Extent(100, 4, 5))",
    )
    device = 2 * 1000 + 512 * 3 + 512 * 20
    assert held(program, puppet.pid) == {
        (MemoryKind.DEVICE, 2): (device, 4, device),
        (MemoryKind.MANAGED, -1): (300, 1, 300),
        (MemoryKind.HOST, -1): (400, 1, 400),
        (MemoryKind.REGISTERED, -1): (500, 1, 500),
        (MemoryKind.POOL, 2): (600, 1, 660),
        (MemoryKind.VMM, 4): (700, 1, 700),
    }
    puppet.does(
        "lib.cudaFreeHost(host); lib.cudaHostUnregister(P(0x5000)); lib.cuMemRelease(made); lib.cudaFree(managed)",
        "[lib.cudaFree(p) for p in some[3:]]",
    )
    result = held(program, puppet.pid)
    assert [
        result[kind, -1][:2] for kind in (MemoryKind.HOST, MemoryKind.REGISTERED, MemoryKind.MANAGED)
    ] == [(0, 0)] * 3
    assert result[MemoryKind.VMM, 4] == (0, 0, 700)
    assert result[MemoryKind.DEVICE, 2] == (device - 2000, 2, device)


def test_failed_and_unknown_frees_do_not_change_the_memory_balance(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        *PREPARE, "p = malloc('cudaMalloc', 1000)", "lib.set_failure(2)", "malloc('cudaMalloc', 5000)"
    )
    puppet.does("lib.cudaFree(p); lib.set_failure(0); lib.cudaFree(P(0)); lib.cudaFree(P(12345))")
    _, (_, (row,)) = tallies(program).rows(time.monotonic_ns())
    assert (row["live_bytes"], row["n_live"], row["n_frees"], row["n_unknown_frees"]) == (1000, 1, 0, 1)
    assert (row["n_allocs"], row["allocated_bytes"]) == (1, 1000)


def test_memory_is_held_until_the_last_of_its_handles_is_released(tracing: Callable[..., Program], puppet):
    """NCCL takes a handle of the memory that it registers, and releases it immediately."""
    program = tracing()
    puppet.does(
        *PREPARE,
        "made = malloc('cuMemCreate', 700, words(1, 4 << 32 | 1), ctypes.c_ulonglong(0))",
        "lib.cuMemRetainAllocationHandle(ctypes.byref(out), made)",
        "lib.set_failure(1); lib.cuMemRelease(out); lib.set_failure(0)",
        "lib.cuMemRelease(out)",
    )
    assert held(program, puppet.pid) == {(MemoryKind.VMM, 4): (700, 1, 700)}
    puppet.does("lib.cuMemRelease(made)")
    _, (_, (row,)) = tallies(program).rows(time.monotonic_ns())
    assert (row["live_bytes"], row["n_live"], row["n_frees"], row["n_unknown_frees"]) == (0, 0, 1, 0)


def test_the_memory_balance_of_an_ended_process_is_zero(tracing: Callable[..., Program], puppet):
    program = tracing()
    output = tallies(program)
    puppet.does(*PREPARE, "lib.cudaSetDevice(0)", "[malloc('cudaMalloc', 1000) for _ in range(1000)]")
    assert output.rows(time.monotonic_ns())[1][1]["live_bytes"].tolist() == [1_000_000]
    assert output.final_rows([puppet.pid], 5)[["ts_ns", "live_bytes", "n_live", "n_allocs"]].tolist() == [
        (5, 0, 0, 1000)
    ]
    program.forget([puppet.pid])
    assert not len(program.operations().keys) and not len(program.balances().keys)
    puppet.does("malloc('cudaMalloc', 10)")
    assert output.rows(time.monotonic_ns())[1][1]["live_bytes"].tolist() == [10]


def test_pinned_and_pageable_memory_are_distinguished(tracing: Callable[..., Program], puppet):
    program = tracing(slow_call_ns=0)
    puppet.does(
        *PREPARE,
        "lib.cudaMemcpyAsync(P(1), P(0x1000), Z(8), 1, P(0))",
        "lib.set_sleep(5000); lib.cuInit(0); lib.set_sleep(0)",
        "p = malloc('cudaHostAlloc', 4096, 0)",
        "lib.cudaMemcpyAsync(P(1), P(p.value + 4000), Z(8), 1, P(0))",
        "lib.cudaMemcpyAsync(P(p.value + 4096), P(1), Z(8), 2, P(0))",
        "lib.cudaMemcpyAsync(p, P(1), Z(8), 4, P(0))",
        "lib.cudaFreeHost(p); lib.cudaMemcpyAsync(p, P(1), Z(8), 2, P(0))",
    )
    result = calls(program, puppet.pid)
    assert result[result["op"] == Op.COPY]["host_memory"].tolist() == [
        HostMemory.UNKNOWN,
        HostMemory.PINNED,
        HostMemory.PAGEABLE,
        HostMemory.PINNED,
        HostMemory.PAGEABLE,
    ]


def test_a_runtime_call_that_enters_the_driver_is_counted_once(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(*PREPARE)
    program.measure()
    puppet.does("lib.storm(1000)", "[lib.cudaMemcpyAsync(P(1), P(2), Z(8), 1, P(0)) for _ in range(10)]")
    result = counted(program, puppet.pid)
    assert {name: row["n"] for name, row in result.items()} == {
        "cudaLaunchKernel": 1000,
        "cudaMemcpyAsync": 10,
    }
    ways_ns, costs = program.entry_costs_ns(), program.costs()
    assert ways_ns[HookGroup.HOT] > ways_ns[HookGroup.COPIES] > 0
    if program.mode == "session":  # the return of the inner call is not reported
        assert (costs["counted_session"].n_runs, costs["cuda_session"].n_runs) == (3000, 30)
    else:
        assert (costs["counted_enter"].n_runs, costs["cuda_enter"].n_runs) == (2000, 20)


def test_streams_events_graphs_and_modules_are_counted(tracing: Callable[..., Program], puppet):
    program = tracing(slow_call_ns=0)
    puppet.does(
        *PREPARE,
        "lib.cudaEventCreate(ctypes.byref(out)); lib.cudaEventRecord(out, P(4))",
        "lib.cudaStreamCreateWithFlags(ctypes.byref(out), 1); lib.cudaStreamWaitEvent(out, P(5), 0)",
        "lib.cudaStreamBeginCapture(P(9), 0); lib.cudaStreamEndCapture(P(9), ctypes.byref(out))",
        "lib.cudaGraphInstantiate(ctypes.byref(out), P(1), ctypes.c_ulonglong(0))",
        "lib.cudaGraphExecUpdate(out, P(1), P(0)); lib.cudaGraphLaunch(out, P(2))",
        "lib.cuModuleLoadData(ctypes.byref(out), P(0))",
        "lib.cudaMemsetAsync(P(1), 0, Z(100), P(0)); lib.cuMemsetD32Async(P(1), 0, Z(100), P(0))",
    )
    result = calls(program, puppet.pid)
    assert [SYMBOLS[symbol] for symbol in result["symbol"]] == [
        *("cudaEventCreate", "cudaEventRecord", "cudaStreamCreateWithFlags", "cudaStreamWaitEvent"),
        *("cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate", "cudaGraphExecUpdate"),
        *("cudaGraphLaunch", "cuModuleLoadData", "cudaMemsetAsync", "cuMemsetD32Async"),
    ]
    event, recorded, stream, waiting, _, graph, made, updated, launched, module, *memsets = result
    assert event["handle"] == recorded["handle"] and recorded["stream"] == 4
    assert (waiting["stream"], waiting["handle"]) == (stream["handle"], 5)
    assert made["handle"] == updated["handle"] == launched["handle"] not in (0, graph["handle"])
    assert module["op"] == Op.MODULE
    assert [memset["count_bytes"] for memset in memsets] == [100, 400]


def test_an_error_is_recorded_once_and_counted_each_time(tracing: Callable[..., Program], puppet):
    program = tracing(slow_call_ns=10**15)
    puppet.does(*PREPARE, "lib.set_failure(700)", "[lib.cudaFree(P(0)) for _ in range(50)]")
    puppet.does("[lib.cudaMemcpyAsync(P(1), P(2), Z(8), 1, P(0)) for _ in range(50)]")
    puppet.does("lib.set_failure(600); lib.cudaFree(P(0))")
    result = calls(program, puppet.pid)
    assert [(SYMBOLS[row["symbol"]], row["result"]) for row in result] == [
        ("cudaFree", 700),
        ("cudaMemcpyAsync", 700),
    ]
    output = counted(program, puppet.pid)
    assert (output["cudaFree"]["n"], output["cudaFree"]["n_failed"]) == (51, 50)
    assert output["cudaMemcpyAsync"]["n_failed"] == 50


def test_raised_thresholds_let_slow_calls_pass_and_count_them(tracing: Callable[..., Program], puppet):
    program = tracing(slow_call_ns=1_000_000)
    slow = "lib.set_sleep(10000); lib.cudaFree(P(0)); lib.set_sleep(0)"
    program.raise_thresholds(6)
    puppet.does(slow)
    assert not len(calls(program, puppet.pid))
    assert program.losses()["raised"] == 1
    program.raise_thresholds(0)
    puppet.does(slow)
    assert len(calls(program, puppet.pid)) == 1


def test_many_keys_are_read_at_once(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(*PREPARE, "[lib.cudaMemcpy(P(1), P(2), Z(1), kind) for kind in range(4)]")
    result = program.operations()
    assert len(result.keys) == len(np.unique(result.keys)) == 4
    assert result.values["n"].tolist() == [1] * 4
