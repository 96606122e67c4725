"""Simulated jobs whose truth is known: every fault in every shape, healthy jobs, and a detection curve."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from marking import Judged, judged

from stallscope.diagnose.engine import diagnose
from stallscope.synth import Capture, HostStall, Job, Schedule, Timing, fault_scenarios, simulate

N_PROCESSES = len(os.sched_getaffinity(0))
N_SEEDS = 20
FEW_SEEDS = {"dp64": 3, "dp32-tp8": 1, "fsdp256": 1, "dp32-tp8-pp4": 1}
"""Large shapes take seconds each; how a verdict depends on the seed the small ones show."""
TWIN_EVERY = 4
"""A twin, for the true cost, is run for every fourth seed."""
N_HEALTHY = 1000
OF_THE_SHAPES = 5
"""One healthy job in five has a shape of the matrix, the others are drawn at random."""
DELAYS_MS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 80)
JITTERS = (0.5, 1.0, 2.0, 4.0)
N_CURVE = 12
CURVE_JOB = Job(dp=8, steps=60)

NEEDS = {
    **dict.fromkeys(fault_scenarios.ON_DEVICE, ("GPU times", Capture(has_gpu_times=True))),
    **dict.fromkeys(fault_scenarios.IN_LAUNCHES, ("launches timed", Capture(times_launches=True))),
}
"""The requirements of a fault beyond the default capture, in words and as a capture."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Spread(Protocol):
    """Runs `work` on items and returns the results in the order of the items."""

    def __call__(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]: ...


def spread(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """The results in order, worked out by a process for each CPU."""
    items = list(items)
    if len(items) < 2 * N_PROCESSES:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(N_PROCESSES) as pool:
        yield from pool.map(work, items, chunksize=max(min(len(items) // 40, 8), 1))


class Case(NamedTuple):
    """One simulated job of the matrix. is_whole: the capture has what this fault needs beyond the default."""

    shape: str
    fault: str
    is_whole: bool
    seed: int
    has_twin: bool


def cases(shapes: Iterable[str], *, n_seeds: int = N_SEEDS) -> list[Case]:
    """All cases of some shapes; faults that need more than the default capture with it and without."""
    made = []
    for shape in shapes:
        for seed in range(min(n_seeds, FEW_SEEDS.get(shape, n_seeds))):
            for fault in fault_scenarios.FAULTS:
                if not fault_scenarios.fits(shape, fault):
                    continue
                for is_whole in (False, True) if fault in NEEDS else (True,):
                    made.append(Case(shape, fault, is_whole, seed, seed % TWIN_EVERY == 0))
    return made


def tried(case: Case) -> tuple[Case, Judged, float]:
    """Simulate, diagnose, judge; and the true cost, -1 without a twin."""
    capture = NEEDS[case.fault][1] if case.is_whole and case.fault in NEEDS else Capture()
    trace, truth = fault_scenarios.scene(
        case.shape, case.fault, case.seed, capture=capture, has_twin=case.has_twin
    )
    return case, judged(diagnose(trace), truth.knowable, guilty=truth.culprits), truth.lost_gpu_seconds


def matrix(
    shapes: Iterable[str] = tuple(fault_scenarios.SHAPES), *, n_seeds: int = N_SEEDS, spread: Spread = spread
) -> dict[str, Any]:
    """Right, wrong and abstained by fault and by shape; every miss with its report."""
    planned = cases(shapes, n_seeds=n_seeds)
    done = list(spread(tried, planned))
    return {
        "n": len(done),
        "n_planned": len(planned),
        **_rates([entry for _, entry, _ in done]),
        "n_accused": sum(entry.n_accused for _, entry, _ in done),
        "by_fault": _table(done, lambda case: _fault_name(case)),
        "by_shape": _table(done, lambda case: case.shape),
        "misses": [
            {"shape": case.shape, "fault": _fault_name(case), "seed": case.seed, **_miss(entry)}
            for case, entry, _ in done
            if entry.culprit != "right" or entry.cause not in ("", "right")
        ],
    }


def _fault_name(case: Case) -> str:
    if case.fault not in NEEDS:
        return case.fault
    return f"{case.fault}, {'with' if case.is_whole else 'without'} {NEEDS[case.fault][0]}"


def _miss(entry: Judged) -> dict[str, str]:
    return {"culprit": entry.culprit, "cause": entry.cause, "said": entry.said}


def _rates(judgeds: list[Judged]) -> dict[str, Any]:
    """Counts of marks, and shares of right ones in per cent."""
    culprit = Counter(entry.culprit for entry in judgeds)
    cause = Counter(entry.cause for entry in judgeds if entry.cause)
    return {
        "culprit": {mark: culprit[mark] for mark in ("right", "wrong", "abstained")},
        "culprit_right_percent": _percent(culprit["right"], len(judgeds)),
        "cause": {mark: cause[mark] for mark in ("right", "wrong", "abstained")},
        "cause_right_percent": _percent(cause["right"], cause.total()),
    }


def _percent(n: int, whole: int) -> float | None:
    return round(100 * n / whole, 2) if whole else None


def _table(done: list[tuple[Case, Judged, float]], key: Callable[[Case], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[tuple[Judged, float]]] = defaultdict(list)
    for case, entry, cost in done:
        groups[key(case)].append((entry, cost))
    return {
        name: {"n": len(result), **_rates([entry for entry, _ in result]), "cost_ratio": _cost_ratio(result)}
        for name, result in groups.items()
    }


def _cost_ratio(judgedses: list[tuple[Judged, float]]) -> list[float] | None:
    """Reported cost / true cost of right verdicts of at least a GPU second: 10th, 50th and 90th percentile."""
    ratios = [
        entry.cost_gpu_seconds / true
        for entry, true in judgedses
        if true >= 1.0 and entry.culprit == "right" and entry.cost_gpu_seconds is not None
    ]
    return [round(float(q), 2) for q in np.quantile(ratios, (0.1, 0.5, 0.9))] if ratios else None


def healthy_job(number: int) -> tuple[int, str, Judged]:
    """One healthy job by number, diagnosed; every fifth in a shape of the matrix, as large jobs are slow rarely a large
    shape.
    """
    if number % OF_THE_SHAPES:
        trace, truth = fault_scenarios.healthy(number)
        name = "drawn"
    else:
        names = [name for name, job in fault_scenarios.SHAPES.items() if job.nranks <= 64]
        few = number % (OF_THE_SHAPES * 50) == 0
        large = [name for name, job in fault_scenarios.SHAPES.items() if job.nranks > 64]
        order = number // OF_THE_SHAPES
        name = large[order // 50 % len(large)] if few else names[order % len(names)]
        timing = Timing().scaled(float(np.random.default_rng(number).uniform(0.5, 1.5)))
        capture = Capture(has_gpu_times=order % 2 == 1)
        trace, truth = simulate(fault_scenarios.SHAPES[name], seed=number, timing=timing, capture=capture)
    return number, name, judged(diagnose(trace), truth.knowable)


def healthy(n: int = N_HEALTHY, *, spread: Spread = spread) -> dict[str, Any]:
    """The number of n healthy jobs with the answer healthy, and every job with another report."""
    result = list(spread(healthy_job, range(n)))
    return {
        "n": len(result),
        "n_planned": n,
        "n_jobs_with_an_accusation": sum(entry.n_accused > 0 for _, _, entry in result),
        "n_ranks_accused": sum(entry.n_accused for _, _, entry in result),
        "n_called_healthy": sum(entry.said == "healthy" for _, _, entry in result),
        "by_shape": Counter(name for _, name, _ in result),
        "said_otherwise": [
            {"job": number, "shape": name, "said": entry.said}
            for number, name, entry in result
            if entry.said != "healthy"
        ],
    }


class Point(NamedTuple):
    """One job of the detection curve."""

    delay_ms: int
    jitter: float
    seed: int


def curve_job(point: Point) -> tuple[Point, Judged]:
    """A rank sleeps delay_ms every fifth step in a job that scatters `jitter` times as the recorded ones."""
    fault = HostStall(
        cause="host_sleep",
        ranks=(point.seed % CURVE_JOB.nranks,),
        delay_ns=point.delay_ms * 1_000_000,
        schedule=Schedule(first=8, every=5),
    )
    timing = Timing().scaled(point.jitter)
    trace, truth = simulate(CURVE_JOB, [fault], seed=1000 + point.seed, timing=timing, has_twin=False)
    return point, judged(diagnose(trace), truth.knowable, guilty=truth.culprits)


def scatter_ms(jitter: float) -> float:
    """95 % of the ranks' absolute lateness in a healthy job of the curve, ms, against the median of the round."""
    job = replace(CURVE_JOB, ranks_per_node=CURVE_JOB.dp)
    trace, _ = simulate(job, seed=1, timing=Timing().scaled(jitter))
    rows = trace.collectives[trace.collectives["seq"] > 6 * job.buckets]
    ts = np.sort(rows, order=["seq", "comm_rank"])["ts_ns"].reshape(-1, job.dp)
    return round(float(np.quantile(np.abs(ts - np.median(ts, axis=1, keepdims=True)), 0.95)) / 1e6, 2)


def curve(*, delays_ms: Iterable[int] = DELAYS_MS, n: int = N_CURVE) -> dict[str, Any]:
    """Share of jobs whose culprit is named, by jitter and delay; and all accusations of others."""
    points = [Point(ms, jitter, seed) for jitter in JITTERS for ms in delays_ms for seed in range(n)]
    named: dict[tuple[float, int], int] = Counter()
    n_accused = 0
    for point, entry in spread(curve_job, points):
        named[point.jitter, point.delay_ms] += entry.culprit == "right"
        n_accused += entry.n_accused
    return {
        "n_each": n,
        "n_accused": n_accused,
        "delays_ms": list(delays_ms),
        "rows": [
            {
                "jitter": jitter,
                "scatter_ms": scatter_ms(jitter),
                "named_percent": [round(100 * named[jitter, ms] / n) for ms in delays_ms],
            }
            for jitter in JITTERS
        ],
    }
