"""One rank of the training-like job: `python -m stallscope.demo.job FOLDER RANK`.

A step is a forward pass, a backward pass whose gradients are all-reduced in buckets while it goes on, an
optimizer and the loss, about 20 ms in all. As with PyTorch the compute runs on the default stream and the
collectives on a separate stream, the main thread waits while a second thread issues the backward pass, and the
loss is read back each step. The rank writes its own clock to rank<R>.csv, as ground truth.
"""

import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from stallscope.demo.faults import FAULTS, LOADER_S, burn, is_due
from stallscope.demo.gpu import FLOAT32, FLOAT64, ID_BYTES, Gpu, UniqueId
from stallscope.demo.plan import MAX_EXTENSION_S, Plan, end_with_parent, read_plan

N_LAYERS = 8
N_BUCKETS = 4
BUCKET_COUNT = 2 << 20  # float32 elements: 8 MiB
FORWARD_NS = 700_000
BACKWARD_NS = 1_000_000
OPTIMIZER_NS = 1_500_000
BATCH_S = 0.003
BLOCKING_SYNC = 4
STEPS_BETWEEN_AGREEMENTS = 100  # for a job that runs ahead: long enough to fill the device's queue

COLUMNS = "step,start_ns,begin_ns,forward_ns,end_ns,is_disturbed"
"""Columns of the CSV: begin_ns is after the batch and the fault, forward_ns after the forward pass was issued."""


class Rank(NamedTuple):
    """The state of one rank: its libraries, streams, communicators and device memory."""

    gpu: Gpu
    plan: Plan
    rank: int
    comm: int
    pair: int
    comm_stream: int
    event: int
    gradients: int
    loss: int


def meet(gpu: Gpu, folder: Path, rank: int, *, nranks: int) -> int:
    """Joins the job's communicator: rank 0 writes the id into the folder for the others."""
    path = folder / "unique_id"
    if rank == 0:
        unique = gpu.unique_id()
        path.with_suffix(".new").write_bytes(bytes(unique))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.005)
    return gpu.join(UniqueId.from_buffer_copy(path.read_bytes()[:ID_BYTES]), rank, nranks=nranks)


def open_rank(gpu: Gpu, plan: Plan, folder: Path, rank: int) -> Rank:
    """Takes a device and memory, and joins the communicators."""
    gpu.call("cudaSetDevice", rank)
    gpu.call("cudaSetDeviceFlags", BLOCKING_SYNC)  # there may be more ranks than CPUs
    comm_stream, event = gpu.stream(), gpu.event()
    gradients = gpu.new("cudaMalloc", N_BUCKETS * BUCKET_COUNT * 4)
    loss = gpu.new("cudaMalloc", 8)
    comm = meet(gpu, folder, rank, nranks=plan.ranks)
    pair = gpu.split(comm, rank // 2, key=rank) if plan.groups == "tp" else 0
    return Rank(gpu, plan, rank, comm, pair, comm_stream, event, gradients, loss)


def forward(me: Rank) -> None:
    """Issues the forward pass; with tensor parallel pairs each layer's activations are all-reduced."""
    for _ in range(N_LAYERS):
        burn(me.plan.host_work_ms / 1e3 / N_LAYERS)
        me.gpu.launch(FORWARD_NS)
        if me.pair:
            me.gpu.all_reduce(me.gradients, BUCKET_COUNT // 8, datatype=FLOAT32, comm=me.pair, stream=None)


def backward(me: Rank) -> None:
    """Issues the backward pass, and the all-reduce of each bucket as soon as it is computed."""
    for bucket in range(N_BUCKETS):
        me.gpu.launch(BACKWARD_NS)
        me.gpu.launch(BACKWARD_NS)
        me.gpu.wait_in(me.comm_stream, me.event, recorded_in=None)
        address = me.gradients + bucket * BUCKET_COUNT * 4
        me.gpu.all_reduce(address, BUCKET_COUNT, datatype=FLOAT32, comm=me.comm, stream=me.comm_stream)


def optimize(me: Rank, *, wants_end: bool) -> None:
    """Issues the optimizer behind the last bucket, and the all-reduce of the loss.

    The "loss" is the number of ranks that want the job to end, so all ranks agree on it.
    """
    me.gpu.wait_in(None, me.event, recorded_in=me.comm_stream)
    me.gpu.launch(OPTIMIZER_NS)
    me.gpu.write(me.loss, float(wants_end))
    me.gpu.wait_in(me.comm_stream, me.event, recorded_in=None)
    me.gpu.all_reduce(me.loss, 1, datatype=FLOAT64, comm=me.comm, stream=me.comm_stream)
    me.gpu.wait_in(None, me.event, recorded_in=me.comm_stream)


def second_thread(device: int, gpu: Gpu) -> Callable[[Callable[[], None]], None]:
    """A function that runs a task in a separate thread and waits for it, as the autograd engine does."""
    work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def serve() -> None:
        gpu.call("cudaSetDevice", device)
        while True:
            task = work.get()
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that gave the task
                done.put(error)
            else:
                done.put(None)

    threading.Thread(target=serve, daemon=True, name="autograd").start()

    def run(task: Callable[[], None]) -> None:
        work.put(task)
        error = done.get()
        if error:
            raise error

    return run


def load_batches(plan: Plan, rank: int) -> Callable[[], None]:
    """Starts the data loader, a child process; the function returned takes the next batch.

    One batch is prefetched. With the fault "input" the victim's loader is slow at times.
    """
    asked_read, asked_write = os.pipe()
    ready_read, ready_write = os.pipe()
    if os.fork() == 0:
        os.close(asked_write)
        step = 0
        while os.read(asked_read, 1):
            is_slow = rank == plan.victim and plan.fault == "input" and is_due(FAULTS["input"], plan, step)
            time.sleep(BATCH_S + is_slow * LOADER_S)
            os.write(ready_write, b".")
            step += 1
        os._exit(0)
    os.close(asked_read)
    os.close(ready_write)
    os.write(asked_write, b".")

    def take() -> None:
        os.read(ready_read, 1)
        os.write(asked_write, b".")

    return take


def train(me: Rank, folder: Path, take_batch: Callable[[], None] | None) -> None:
    """Steps until the ranks agree to end; writes the rank's clock."""
    plan, gpu = me.plan, me.gpu
    fault = FAULTS[plan.fault]
    is_victim = me.rank == plan.victim and fault.prepare is not None
    disturb = fault.prepare(gpu, plan) if is_victim and fault.prepare else None
    in_second = second_thread(me.rank, gpu) if plan.autograd_thread else lambda task: task()
    wish_s = time.monotonic() + plan.seconds
    min_steps = plan.first_step + plan.min_occurrences * fault.every_steps if plan.min_occurrences else 0
    with (folder / f"rank{me.rank}.csv").open("w", buffering=1) as clock:
        print(COLUMNS, file=clock)
        step, is_over = 0, False
        while not is_over and (not plan.steps or step < plan.steps):
            start_ns = time.monotonic_ns()
            if take_batch:
                take_batch()
            is_disturbed = disturb is not None and is_due(fault, plan, step)
            if disturb and is_disturbed:
                disturb(step)
            begin_ns = time.monotonic_ns()
            forward(me)
            forward_ns = time.monotonic_ns()
            in_second(lambda: backward(me))
            over_s = time.monotonic() - wish_s
            optimize(
                me,
                wants_end=not plan.steps and over_s > 0 and (step >= min_steps or over_s > MAX_EXTENSION_S),
            )
            if plan.synchronize or step % STEPS_BETWEEN_AGREEMENTS == 0:
                is_over = gpu.item(me.loss) > 0
            end_ns = time.monotonic_ns()
            print(f"{step},{start_ns},{begin_ns},{forward_ns},{end_ns},{int(is_disturbed)}", file=clock)
            step += 1
    gpu.call("cudaDeviceSynchronize")


def main(folder: Path, rank: int) -> None:
    """Loads the libraries, prints a line on stdout, waits for a line on stdin, runs."""
    end_with_parent()
    plan = read_plan(folder)
    take_batch = load_batches(plan, rank) if plan.loader else None
    gpu = Gpu(Path(plan.libraries))
    gc.disable()  # a collection in one rank would be an additional fault
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    me = open_rank(gpu, plan, folder, rank)
    train(me, folder, take_batch)
    for comm in filter(None, (me.pair, me.comm)):
        gpu.call("ncclCommDestroy", comm)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]), int(sys.argv[2]))
