"""The simulated jobs scatter like the recorded ones: the recordings are where the parameters come from."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stallscope.events.names import Op
from stallscope.events.trace import Trace
from stallscope.synth import ClockSpread, Job, simulate

pytestmark = pytest.mark.shared

ONE_CLOCK = ClockSpread(uptime_ns=0, drift_ppm=0.0)
WARM_STEPS = 6
CALLS = ("ncclAllReduce", "ncclAllGather", "ncclReduceScatter")
QUANTILES = (0.5, 0.9, 0.95)

Arrivals = NDArray[np.int64]
"""(ranks, steps, calls in a step), ns, without the first steps."""


def recorded(folder: Path) -> Arrivals:
    """Entries of the collectives of every usual step, the culprits left out."""
    parquet = pytest.importorskip("pyarrow.parquet")
    truth = json.loads((folder / "truth.json").read_text())
    table = parquet.read_table(
        folder / "events.parquet",
        columns=["ts_ns", "pid", "kind", "symbol"],
        filters=[("kind", "=", "enter")],
    )
    ts, pid = table["ts_ns"].to_numpy(), table["pid"].to_numpy()
    is_call = np.isin(table["symbol"].to_numpy(zero_copy_only=False), CALLS)
    steps = np.genfromtxt(folder / "steps.csv", delimiter=",", names=True)
    by_rank = []
    for rank, process in enumerate(truth["rank_pids"]):
        begins = steps["t_start_ns"][steps["rank"] == rank]
        sort = np.sort(ts[is_call & (pid == process)])
        by_rank.append(np.split(sort, np.searchsorted(sort, begins))[1:])
    usual = int(np.bincount([len(calls) for calls in by_rank[0]]).argmax())
    kept = [
        number
        for number in range(WARM_STEPS, len(by_rank[0]))
        if all(len(calls[number]) == usual for calls in by_rank)
    ]
    healthy = [rank for rank in range(len(by_rank)) if rank not in truth["culprit_ranks"]]
    return np.array([[by_rank[rank][number] for number in kept] for rank in healthy])


def simulated(job: Job, seed: int) -> Arrivals:
    """The same of a simulated job on one clock."""
    trace: Trace = simulate(job, seed=seed, clocks=ONE_CLOCK)[0]
    kept = trace.collectives[
        np.isin(trace.collectives["op"], (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER))
    ]
    by_rank = [np.sort(kept["ts_ns"][kept["pid"] == pid])[1:] for pid in trace.processes["pid"]]
    return np.array([ts.reshape(job.steps, -1) for ts in by_rank])[:, WARM_STEPS:]


def lateness_us(arrivals: Arrivals) -> NDArray[np.float64]:
    """Quantiles of how far arrivals lie from the median of their round."""
    apart = np.abs(arrivals - np.median(arrivals, axis=0))
    return np.quantile(apart, QUANTILES) / 1e3


def wander(arrivals: Arrivals) -> tuple[float, float]:
    """Log scatter of intervals: the part that the intervals of a rank's step share, and the part of each interval."""
    lengths = np.log(np.diff(arrivals, axis=2))
    apart = lengths - np.median(lengths, axis=1, keepdims=True)
    common = np.median(apart, axis=2)
    own = apart - common[:, :, None]
    return float(common.std()), float(1.48 * np.median(np.abs(own)))


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("clean", Job(dp=4, layers=8, buckets=8, steps=60)),
        ("launch_bound", Job(dp=4, layers=8, buckets=1, steps=80)),
        ("fsdp_lock", Job(dp=4, layers=8, sharded=True, steps=80)),
    ],
)
def test_arrivals_scatter_as_in_the_recording(recordings: Path, name: str, job: Job) -> None:
    real = recorded(recordings / name)
    if name == "fsdp_lock":
        undisturbed = np.ptp(real[:, :, -1], axis=0) < 20_000_000
        real = real[:, undisturbed]
    made = np.median([lateness_us(simulated(job, seed)) for seed in range(5)], axis=0)
    ratio = made / lateness_us(real)
    assert (ratio > 1 / 1.8).all(), ratio
    assert (ratio < 1.8).all(), ratio


@pytest.mark.parametrize("name", ["clean", "host_sleep_periodic"])
def test_hosts_wander_as_in_the_recording(recordings: Path, name: str) -> None:
    real = wander(recorded(recordings / name))
    made = wander(simulated(Job(dp=4, layers=8, buckets=8, steps=60), seed=1))
    assert made == pytest.approx(real, rel=0.5)


def test_a_step_takes_as_long_as_in_the_recording(recordings: Path) -> None:
    real = np.median(np.diff(recorded(recordings / "clean")[:, :, 0], axis=1))
    made = np.median(np.diff(simulated(Job(dp=4, layers=8, buckets=8, steps=60), seed=1)[:, :, 0], axis=1))
    assert made == pytest.approx(real, rel=0.1)
