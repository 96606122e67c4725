"""Programs of the library tests: `python ranks.py PROGRAM FOLDER RANK NRANKS` prints JSON.

They run in separate processes, so that the test process never becomes a GPU process.
"""

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from stallscope.demo.build import build
from stallscope.demo.gpu import DEVICE_TO_HOST, FLOAT64, HOST_TO_DEVICE, INT64, MAX, SUM, Dim3, Gpu
from stallscope.demo.job import meet

MS = 1_000_000
MIB = 1 << 20
NOT_READY = 600
QUEUE_DEPTH = 1024
RUN_NS = 60 * MS
ONE = Dim3(1, 1, 1)


class Me(NamedTuple):
    """A process of this test."""

    gpu: Gpu
    folder: Path
    rank: int
    nranks: int

    def comm(self) -> int:
        return meet(self.gpu, self.folder, self.rank, nranks=self.nranks)


def took_ns(what: Callable[[], Any]) -> int:
    start = time.monotonic_ns()
    what()
    return time.monotonic_ns() - start


def cpu_ns(what: Callable[[], Any]) -> int:
    start = time.thread_time_ns()
    what()
    return time.thread_time_ns() - start


def code(me: Me, name: str, *arguments: Any) -> int:
    return int(getattr(me.gpu.nccl if name.startswith("nccl") else me.gpu.cuda, name)(*arguments))


def doubles(me: Me, *values: float) -> int:
    """Device memory that holds these values."""
    address = me.gpu.new("cudaMalloc", 4096)
    for i, value in enumerate(values):
        me.gpu.write(address + 8 * i, value)
    me.gpu.synchronize()
    return address


def launch(me: Me) -> dict[str, int]:
    gpu = me.gpu
    gpu.launch(0)
    gpu.synchronize()
    return {
        "enqueue_ns": took_ns(lambda: gpu.launch(RUN_NS)),
        "ready_code": code(me, "cudaStreamQuery", None),
        "wait_ns": took_ns(gpu.synchronize),
        "done_code": code(me, "cudaStreamQuery", None),
        "bad_kernel_code": code(me, "cudaLaunchKernel", 1, ONE, ONE, None, 0, None),
    }


def full_queue(me: Me) -> dict[str, int]:
    kernel_ns, more = MS // 5, 300

    def some(n: int) -> None:
        for _ in range(n):
            me.gpu.launch(kernel_ns)

    start = time.monotonic_ns()
    some(QUEUE_DEPTH // 2)
    half_ns = time.monotonic_ns() - start
    some(QUEUE_DEPTH // 2 + more)
    enqueued_ns = time.monotonic_ns() - start
    me.gpu.synchronize()
    return {
        "kernel_ns": kernel_ns,
        "more": more,
        "half": QUEUE_DEPTH // 2,
        "half_ns": half_ns,
        "enqueued_ns": enqueued_ns,
        "done_ns": time.monotonic_ns() - start,
        "depth": QUEUE_DEPTH,
    }


def wait_cpu(me: Me) -> dict[str, int]:
    def wait(flags: int) -> int:
        me.gpu.call("cudaSetDeviceFlags", flags)
        me.gpu.launch(RUN_NS)
        return cpu_ns(me.gpu.synchronize)

    return {
        "run_ns": RUN_NS,
        "auto_ns": wait(0),
        "spin_ns": wait(1),
        "yield_ns": wait(2),
        "block_ns": wait(4),
    }


def streams(me: Me) -> dict[str, Any]:
    gpu = me.gpu
    slow, fast, event = gpu.stream(), gpu.stream(), gpu.event()
    gpu.launch(RUN_NS, slow)
    gpu.launch(MS, fast)
    gpu.synchronize(fast)
    code_of_slow = code(me, "cudaStreamQuery", slow)
    gpu.wait_in(fast, event, recorded_in=slow)
    gpu.launch(MS, fast)
    event_code = code(me, "cudaEventQuery", event)
    gpu.synchronize(fast)
    return {
        "slow_after_fast_code": code_of_slow,
        "event_before_code": event_code,
        "event_after_code": code(me, "cudaEventQuery", event),
        "slow_after_dependent_code": code(me, "cudaStreamQuery", slow),
        "device_wait_code": code(me, "cudaDeviceSynchronize"),
    }


def events(me: Me) -> dict[str, float]:
    gpu = me.gpu
    begin, end, never = gpu.event(), gpu.event(), gpu.event()
    gpu.call("cudaEventRecord", begin, None)
    gpu.launch(RUN_NS)
    gpu.call("cudaEventRecord", end, None)
    ms = ctypes.c_float()
    early = code(me, "cudaEventElapsedTime", ctypes.byref(ms), begin, end)
    wait_ns = took_ns(lambda: gpu.call("cudaEventSynchronize", end))
    gpu.call("cudaEventElapsedTime", ctypes.byref(ms), begin, end)
    never_ns = took_ns(lambda: gpu.call("cudaStreamWaitEvent", None, never, 0) or gpu.synchronize())
    gpu.call("cudaEventRecord", end, None)
    gpu.call("cudaEventDestroy", end)  # while it is in the queue
    gpu.synchronize()
    return {
        "early_code": early,
        "wait_ns": wait_ns,
        "elapsed_ns": ms.value * MS,
        "never_ns": never_ns,
        "run_ns": RUN_NS,
    }


def stopped(me: Me) -> dict[str, float]:
    """The process is stopped while a kernel runs."""
    gpu = me.gpu
    begin, end, ms = gpu.event(), gpu.event(), ctypes.c_float()
    gpu.call("cudaEventRecord", begin, None)
    gpu.launch(RUN_NS)
    gpu.call("cudaEventRecord", end, None)
    wakes = f"import os, signal, time; time.sleep({5 * RUN_NS / 1e9}); os.kill({os.getpid()}, signal.SIGCONT)"
    with subprocess.Popen([sys.executable, "-c", wakes]):
        stopped_ns = took_ns(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    gpu.synchronize()
    gpu.call("cudaEventElapsedTime", ctypes.byref(ms), begin, end)
    return {"run_ns": RUN_NS, "stopped_ns": stopped_ns, "elapsed_ns": ms.value * MS}


def copies(me: Me) -> dict[str, int]:
    gpu = me.gpu
    n_bytes = 4 * MIB
    device, pinned = gpu.new("cudaMalloc", n_bytes), gpu.new("cudaHostAlloc", n_bytes, 0)
    pageable = mmap.mmap(-1, n_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pageable))

    def behind_a_kernel(to: int, source: int, size: int, kind: int) -> int:
        gpu.synchronize()
        gpu.launch(RUN_NS)
        return took_ns(lambda: gpu.call("cudaMemcpyAsync", to, source, size, kind, None))

    return {
        "run_ns": RUN_NS,
        "pinned_to_host_ns": behind_a_kernel(pinned, device, n_bytes, DEVICE_TO_HOST),
        "pinned_to_device_ns": behind_a_kernel(device, pinned, n_bytes, HOST_TO_DEVICE),
        "pageable_to_host_ns": behind_a_kernel(address, device, 8, DEVICE_TO_HOST),
        "pageable_to_device_ns": behind_a_kernel(device, address, n_bytes, HOST_TO_DEVICE),
        "small_pageable_to_device_ns": behind_a_kernel(device, address, 4096, HOST_TO_DEVICE),
        "freed_code": code(me, "cudaFreeHost", pinned),
    }


def data(me: Me) -> dict[str, Any]:
    gpu = me.gpu
    address, other = doubles(me, 1.5), gpu.new("cudaMallocAsync", 8, None)
    gpu.call("cudaMemcpyAsync", other, address, 8, 4, None)
    copied = gpu.item(other)
    gpu.call("cudaMemsetAsync", other, 0, 8, None)
    zeroed = gpu.item(other)
    gpu.call("cudaFreeAsync", other, None)
    gpu.synchronize()
    return {"written": gpu.item(address), "copied": copied, "zeroed": zeroed}


def allocations(me: Me) -> dict[str, Any]:
    gpu = me.gpu

    def allocate_cpu_ns(n_bytes: int) -> int:
        return min(cpu_ns(lambda: gpu.new("cudaMalloc", n_bytes)) for _ in range(3))

    small_ns, big_ns = allocate_cpu_ns(4096), allocate_cpu_ns(256 * MIB)
    block = gpu.new("cudaMalloc", 256 * MIB)
    gpu.launch(RUN_NS)
    wall_ns = took_ns(lambda: gpu.call("cudaFree", block))
    handle = ctypes.c_void_p()
    return {
        "run_ns": RUN_NS,
        "small_ns": small_ns,
        "big_ns": big_ns,
        "free_wall_ns": wall_ns,
        "freed_twice_code": code(me, "cudaFree", block),
        "null_code": code(me, "cudaFree", None),
        "too_much_code": code(me, "cudaMalloc", ctypes.byref(handle), 81 << 30),
        "last_error_code": code(me, "cudaGetLastError"),
        "then_code": code(me, "cudaGetLastError"),
    }


def graph(me: Me) -> dict[str, Any]:
    gpu, comm = me.gpu, me.comm()
    stream, value = gpu.stream(), doubles(me, 1.0)
    captured = ctypes.c_void_p()
    gpu.call("cudaStreamBeginCapture", stream, 0)
    gpu.launch(RUN_NS // 2, stream)
    gpu.all_reduce(value, 1, datatype=FLOAT64, comm=comm, stream=stream)
    in_capture_code = code(me, "cudaStreamSynchronize", stream)
    gpu.call("cudaStreamEndCapture", stream, ctypes.byref(captured))
    after_capture_ns = took_ns(lambda: gpu.synchronize(stream))
    executable = gpu.new("cudaGraphInstantiate", captured, 0)
    start = time.monotonic_ns()
    for _ in range(3):
        gpu.call("cudaGraphLaunch", executable, stream)
    launched_ns = time.monotonic_ns() - start
    gpu.synchronize(stream)
    done_ns = time.monotonic_ns() - start
    gpu.call("cudaGraphExecDestroy", executable)
    gpu.call("cudaGraphDestroy", captured)
    gpu.call("ncclCommDestroy", comm)
    return {
        "in_capture_code": in_capture_code,
        "after_capture_ns": after_capture_ns,
        "launched_ns": launched_ns,
        "done_ns": done_ns,
        "run_ns": RUN_NS,
        "value": gpu.item(value),
    }


def report(me: Me, name: str) -> None:
    """Report a state to the other ranks."""
    (me.folder / name).touch()


def await_report(me: Me, name: str) -> None:
    """Wait for a report of another rank; the test ends a program that waits for ever."""
    while not (me.folder / name).exists():
        time.sleep(0.002)


def rendezvous(me: Me) -> dict[str, int]:
    """Each rank enters once the call of the previous rank has returned; none leaves before the last has entered."""
    comm, value = me.comm(), doubles(me, 1.0)
    if me.rank:
        await_report(me, f"returned{me.rank - 1}")
    entered_ns = time.monotonic_ns()
    me.gpu.all_reduce(value, 1, datatype=FLOAT64, comm=comm, stream=None)
    returned_ns = time.monotonic_ns()
    report(me, f"returned{me.rank}")
    me.gpu.synchronize()
    return {"entered_ns": entered_ns, "returned_ns": returned_ns, "released_ns": time.monotonic_ns()}


def values(me: Me) -> dict[str, Any]:
    gpu, comm = me.gpu, me.comm()
    own_rows, summed, gathered = doubles(me, me.rank + 1.0), doubles(me), doubles(me)
    largest, sent = doubles(me), doubles(me, 7.0 + me.rank)
    new = gpu.new("cudaMalloc", 8)
    gpu.call("cudaMemcpy", new, ctypes.byref(ctypes.c_int64(2)), 8, HOST_TO_DEVICE)
    gpu.call("ncclAllReduce", own_rows, summed, 1, FLOAT64, SUM, comm, None)
    gpu.call("ncclAllReduce", own_rows, largest, 1, FLOAT64, MAX, comm, None)
    gpu.call("ncclAllGather", own_rows, gathered, 1, FLOAT64, comm, None)
    gpu.call("ncclBroadcast", sent, sent, 1, FLOAT64, me.nranks - 1, comm, None)
    gpu.all_reduce(new, 1, datatype=INT64, comm=comm, stream=None)
    whole = ctypes.c_int64()
    gpu.call("cudaMemcpy", ctypes.byref(whole), new, 8, DEVICE_TO_HOST)
    return {
        "sum": gpu.item(summed),
        "max": gpu.item(largest),
        "gathered": [gpu.item(gathered + 8 * i) for i in range(me.nranks)],
        "broadcast": gpu.item(sent),
        "whole": whole.value,
    }


def root_only(me: Me) -> dict[str, int]:
    """Rank 1 broadcasts from rank 0 once rank 0 is done, and comes late to a reduce to rank 0."""
    comm, value = me.comm(), doubles(me, 1.0)
    if me.rank:
        await_report(me, "broadcast done")
    me.gpu.call("ncclBroadcast", value, value, 1, FLOAT64, 0, comm, None)
    me.gpu.synchronize()
    report(me, "broadcast done")
    if me.rank:
        await_report(me, "reduce called")
        time.sleep(0.05)  # for the mistake of a root that does not wait
    entered_ns = time.monotonic_ns()
    me.gpu.call("ncclReduce", value, value, 1, FLOAT64, SUM, 0, comm, None)
    report(me, "reduce called")
    me.gpu.synchronize()
    return {"entered_ns": entered_ns, "done_ns": time.monotonic_ns()}


def every_collective(me: Me) -> dict[str, Any]:
    gpu, comm = me.gpu, me.comm()
    n = MIB
    a, b = gpu.new("cudaMalloc", 32 * MIB), gpu.new("cudaMalloc", 32 * MIB)
    gpu.call("ncclAllReduce", a, b, n, FLOAT64, SUM, comm, None)
    gpu.call("ncclAllGather", a, b, n, FLOAT64, comm, None)
    gpu.call("ncclReduceScatter", a, b, n, FLOAT64, SUM, comm, None)
    gpu.call("ncclBroadcast", a, b, n, FLOAT64, 0, comm, None)
    gpu.call("ncclBcast", a, n, FLOAT64, 1, comm, None)
    gpu.call("ncclReduce", a, b, n, FLOAT64, SUM, 0, comm, None)
    gpu.call("ncclAlltoAll", a, b, n, FLOAT64, comm, None)
    gpu.call("ncclGather", a, b, n, FLOAT64, 0, comm, None)
    gpu.call("ncclScatter", a, b, n, FLOAT64, 1, comm, None)
    gpu.synchronize()
    gpu.call("ncclCommFinalize", comm)
    gpu.call("ncclCommDestroy", comm)
    return {"is_done": True}


def size_and_rank(me: Me, comm: int) -> list[int]:
    n, rank = ctypes.c_int(), ctypes.c_int()
    me.gpu.call("ncclCommCount", comm, ctypes.byref(n))
    me.gpu.call("ncclCommUserRank", comm, ctypes.byref(rank))
    return [n.value, rank.value]


def total(me: Me, comm: int, value: float) -> float:
    address = doubles(me, value)
    me.gpu.all_reduce(address, 1, datatype=FLOAT64, comm=comm, stream=None)
    return me.gpu.item(address)


def split(me: Me) -> dict[str, Any]:
    comm = me.comm()
    half = me.gpu.split(comm, me.rank % 2, key=-me.rank)
    again = me.gpu.split(half, 0, key=0)
    nobody = me.gpu.split(comm, -1 if me.rank == 0 else 0, key=me.rank)
    return {
        "half": size_and_rank(me, half),
        "half_total": total(me, half, me.rank),
        "again": size_and_rank(me, again),
        "again_total": total(me, again, me.rank),
        "nobody": size_and_rank(me, nobody) if nobody else None,
        "whole_total": total(me, comm, me.rank),
    }


def shrink_and_grow(me: Me) -> dict[str, Any]:
    gpu, comm = me.gpu, me.comm()
    last = me.nranks - 1
    excluded = (ctypes.c_int * 1)(last)
    small, big = ctypes.c_void_p(), ctypes.c_void_p()
    path = me.folder / "grow_id"
    if me.rank == last:
        while not path.exists():
            time.sleep(0.005)
        unique = ctypes.create_string_buffer(path.read_bytes(), 128)
        gpu.call("ncclCommGrow", None, me.nranks, unique, last, ctypes.byref(big), None)
        return {"small": None, "big": size_and_rank(me, big.value), "total": total(me, big.value, 1.0)}
    gpu.call("ncclCommShrink", comm, excluded, 1, ctypes.byref(small), None, 0)
    small_is = size_and_rank(me, small.value)
    unique = ctypes.create_string_buffer(128)
    if me.rank == 0:
        gpu.call("ncclCommGetUniqueId", small, unique)
        path.with_suffix(".new").write_bytes(unique.raw)
        path.with_suffix(".new").rename(path)
    has_id = unique if me.rank == 0 else None
    gpu.call("ncclCommGrow", small, me.nranks, has_id, -1, ctypes.byref(big), None)
    return {"small": small_is, "big": size_and_rank(me, big.value), "total": total(me, big.value, 1.0)}


def one_process(me: Me) -> dict[str, Any]:
    """All devices in one process, as ncclCommInitAll makes them; then by InitRank and Scalable in groups."""
    gpu = me.gpu
    comms = (ctypes.c_void_p * 3)()
    devices = (ctypes.c_int * 3)(2, 0, 1)
    gpu.call("ncclCommInitAll", comms, 3, devices)
    device = ctypes.c_int()
    gpu.call("ncclCommCuDevice", comms[0], ctypes.byref(device))
    unique, plain, scalable = (
        gpu.unique_id(),
        [ctypes.c_void_p() for _ in "ab"],
        [ctypes.c_void_p() for _ in "ab"],
    )
    other = gpu.unique_id()
    with gpu.group():
        for rank in range(2):
            gpu.call("cudaSetDevice", rank)
            gpu.call("ncclCommInitRank", ctypes.byref(plain[rank]), 2, unique, rank)
            gpu.call(
                "ncclCommInitRankScalable",
                ctypes.byref(scalable[rank]),
                2,
                rank,
                1,
                ctypes.byref(other),
                None,
            )
    value = doubles(me, 1.0)
    with gpu.group():
        for rank in range(2):
            gpu.all_reduce(value, 1, datatype=FLOAT64, comm=plain[rank].value or 0, stream=None)
    for rank in range(2):
        gpu.call("cudaSetDevice", rank)
        gpu.call("cudaDeviceSynchronize")
    return {
        "all": [size_and_rank(me, comm) for comm in comms],
        "device": device.value,
        "plain": [size_and_rank(me, comm.value or 0) for comm in plain],
        "scalable": [size_and_rank(me, comm.value or 0) for comm in scalable],
    }


def messages(me: Me) -> dict[str, Any]:
    """A ring of large messages in one group; then a large send whose receive comes late, and a small one."""
    gpu, comm = me.gpu, me.comm()
    n = 4 * MIB
    a, b = gpu.new("cudaMalloc", 8 * n), gpu.new("cudaMalloc", 8 * n)
    with gpu.group():
        gpu.call("ncclSend", a, n, FLOAT64, (me.rank + 1) % me.nranks, comm, None)
        gpu.call("ncclRecv", b, n, FLOAT64, (me.rank - 1) % me.nranks, comm, None)
        in_group_code = code(me, "cudaStreamQuery", None)
    gpu.synchronize()

    def exchange(count: int, begin_receiving: str) -> tuple[int, int]:
        """Rank 1 receives after this report of rank 0. Returns the times of its call, and of the end."""
        total(me, comm, 0.0)
        entered_ns = 0
        if me.rank == 0:
            gpu.call("ncclSend", a, count, FLOAT64, 1, comm, None)
            report(me, f"called {count}")
        elif me.rank == 1:
            await_report(me, f"{begin_receiving} {count}")
            time.sleep(0.05)  # for the mistake of a large send that does not wait
            entered_ns = time.monotonic_ns()
            gpu.call("ncclRecv", b, count, FLOAT64, 0, comm, None)
        gpu.synchronize()
        report(me, f"done {count}" if me.rank == 0 else f"done {count} {me.rank}")
        return entered_ns, time.monotonic_ns()

    return {
        "in_group_code": in_group_code,
        "large": exchange(n, "called"),
        "small": exchange(1, "done"),
    }


def mismatch(me: Me) -> dict[str, Any]:
    gpu, comm = me.gpu, me.comm()
    address = doubles(me, 1.0, 1.0)
    gpu.all_reduce(address, 1 + me.rank, datatype=FLOAT64, comm=comm, stream=None)
    time.sleep(0.3)
    stuck_code = code(me, "cudaStreamQuery", None)
    gpu.call("ncclCommAbort", comm)
    gpu.synchronize()
    return {"stuck_code": stuck_code, "after_code": code(me, "cudaStreamQuery", None)}


def run_ahead(me: Me) -> dict[str, int]:
    """Rank 1 never waits: it enqueues 30 all-reduces while rank 0 has not come to the first."""
    comm, value = me.comm(), doubles(me, 1.0)
    if me.rank == 0:
        await_report(me, "enqueued 1")
    start = time.monotonic_ns()
    for _ in range(30):
        me.gpu.all_reduce(value, 1, datatype=FLOAT64, comm=comm, stream=None)
    enqueued_ns = time.monotonic_ns()
    report(me, f"enqueued {me.rank}")
    me.gpu.synchronize()
    return {"start_ns": start, "enqueued_ns": enqueued_ns, "done_ns": time.monotonic_ns()}


def bad_calls(me: Me) -> dict[str, int]:
    gpu = me.gpu
    handle = ctypes.c_void_p()
    return {
        "no_comm": code(me, "ncclAllReduce", None, None, 1, FLOAT64, 0, None, None),
        "rank_too_high": code(me, "ncclCommInitRank", ctypes.byref(handle), 2, gpu.unique_id(), 2),
        "group_end_alone": code(me, "ncclGroupEnd"),
        "no_such_device": code(me, "cudaSetDevice", 1000),
    }


def main(program: str, folder: Path, rank: int, nranks: int) -> None:
    """Runs a program of this file and prints its result."""
    gpu = Gpu(build())
    gpu.call("cudaSetDevice", rank)
    print(json.dumps(globals()[program](Me(gpu, folder, rank, nranks))))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
