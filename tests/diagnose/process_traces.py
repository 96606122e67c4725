"""Traces of one process: its time budget, samples, call counts and GPU readings, second by second."""

from collections.abc import Mapping, Sequence

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Category, Op, SampleRole
from stallscope.events.trace import Clock, Trace

from .builders import EPOCH_NS, MS, START_NS

PID = 7
SECOND_NS = 1000 * MS
N_SECONDS = 10
SAMPLES_PER_S = 10

Sampled = tuple[SampleRole, Category, int, str, tuple[str, ...], int]
"""Role, category, system call, object, frames, samples a second."""

LOOP = "/job/train.py:10 main"
TORCH = "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py:1 forward"


def process(
    budget: Mapping[Category, float],
    samples: Sequence[Sampled] = (),
    counts: Sequence[tuple[Op, float, float, Mapping[str, object]]] = ((Op.SYNC, 20, 0.0, {}),),
    *,
    gpu_busy: int | None = None,
    readings: Sequence[tuple[float, int]] = (),
    idle_s: Sequence[int] = (),
    n_seconds: int = N_SECONDS,
) -> Trace:
    """A process of n_seconds. counts: op, calls a second, microseconds a call, other columns. gpu_busy: per cent.

    readings: of the GPU's driver: second, per cent busy in the second before it.
    """
    snapshots = layout.empty(layout.SNAPSHOTS, n_seconds + 1)
    snapshots["pid"], snapshots["alive"] = PID, 1
    snapshots["ts_ns"] = START_NS + np.arange(n_seconds + 1) * SECOND_NS
    for second in range(n_seconds):
        spent = {Category.SLEEP: 1.0} if second in idle_s else budget
        snapshots["ledger_ns"][second + 1] = snapshots["ledger_ns"][second]
        for category, share in spent.items():
            snapshots["ledger_ns"][second + 1, category - 1] += int(share * SECOND_NS)
    active = [second for second in range(n_seconds) if second not in idle_s]
    operations = layout.empty(layout.CALL_COUNTS, len(counts) * len(active))
    stacks: dict[int, tuple[str, ...]] = {}
    rows = layout.empty(layout.SAMPLES, len(samples) * len(active))
    for i, second in enumerate(active):
        end_ns = START_NS + (second + 1) * SECOND_NS
        for row, (op, per_s, mean_us, more) in zip(operations[i * len(counts) :], counts, strict=False):
            row["ts_ns"], row["interval_ns"], row["pid"], row["op"] = end_ns, SECOND_NS, PID, op
            row["n"] = row["n_seen"] = per_s
            row["total_ns"] = per_s * mean_us * 1000
            for name, value in more.items():
                row[name] = value
        for number, entry in enumerate(samples, 1):
            row = rows[i * len(samples) + number - 1]
            row["ts_ns"], row["pid"], row["tid"] = end_ns, PID, PID
            row["role"], row["category"], row["syscall_nr"], row["object"] = (
                entry[0],
                entry[1],
                entry[2],
                entry[3].encode(),
            )
            row["owner_pid"] = PID + (entry[0] is SampleRole.CHILD)
            row["stack"], row["n"] = number, entry[5]
            stacks[number] = entry[4]
    processes = layout.empty(layout.PROCESSES, 1)
    processes["pid"], processes["comm"] = PID, b"python3"
    readings = readings if gpu_busy is None else ((0.0, gpu_busy),)
    gpus = layout.empty(layout.GPUS, len(readings))
    gpus["name"], gpus["mig"] = b"NVIDIA H200", UNKNOWN
    for row, (at_s, percent) in zip(gpus, readings, strict=True):
        row["ts_ns"], row["utilization_percent"] = START_NS + int(at_s * SECOND_NS), percent
    return Trace(
        snapshots=snapshots,
        operations=operations,
        samples=rows,
        stacks=stacks,
        processes=processes,
        gpus=gpus,
        clocks=(Clock(0, START_NS, EPOCH_NS),),
        ends_ns=(START_NS + n_seconds * SECOND_NS,),
        source="a test",
    )


def gpu(
    category: Category, *frames: str, nr: int = -1, waits_for: str = "", n: int = SAMPLES_PER_S
) -> Sampled:
    """A sample of the GPU thread."""
    return SampleRole.GPU, category, nr, waits_for, (*frames, LOOP), n
