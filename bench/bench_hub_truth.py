"""The hub's verdicts, `explain` and the truth, on simulated jobs of 8 to 256 ranks.

Each job is sent as its nodes' agents send it, in requests of half a second of the job's time, and the verdicts come
from the hub's tool: while the job runs (after its last collective), and after its processes ended. `explain` reads
the same rows at once. The truth comes from the simulator, which runs each job again without its fault.

    python bench/bench_hub_truth.py [--only PART_OF_NAME]

With --only, the rows of the other jobs stay as they are in the stored result; each row has its commit.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from report import RESULTS, commit, report

from stallscope import rates
from stallscope.continuous import ContinuousDiagnosis
from stallscope.diagnose import Stream, diagnose
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category
from stallscope.events.trace import Clock, Trace
from stallscope.exporters import hub_arrow, hub_batches
from stallscope.receive import arrow
from stallscope.serve.tools.tenant_context import Hub, TenantContext
from stallscope.serve.tools.verdicts import VerdictsParams, verdicts
from stallscope.store.hub.store import HubStore
from stallscope.synth import Fault, HostStall, Job, MissingRank, Schedule, SlowDevice, Truth, simulate
from stallscope.synth.observed import Capture

TENANT = "bench"
REQUEST_NS = 500_000_000
SETTLE_S = 20.0
"""The longest time that the hub may take to bring its verdicts up to date after the last row."""
MS = 1_000_000
IDENTITIES = ("processes", "communicators")


def stall(cause: str, ms: float, *ranks: int, first: int = 8, every: int = 5) -> HostStall:
    """Host delays of some ranks."""
    schedule = Schedule(first=first, every=every)
    return HostStall(cause=cause, ranks=ranks, delay_ns=int(ms * MS), schedule=schedule)


@dataclass(frozen=True)
class Case:
    """One job and its faults."""

    job: Job
    faults: tuple[Fault, ...]
    capture: Capture = field(default_factory=Capture)


CASES: dict[str, Case] = {
    "8 ranks, disk": Case(Job(dp=8, steps=200), (stall("block_io", 150, 5),)),
    "8 ranks, preempted in every step": Case(
        Job(dp=8, steps=200), (stall("cpu_preemption", 60, 2, every=1),)
    ),
    "8 ranks, lock": Case(Job(dp=8, steps=200), (stall("lock_contention", 80, 0, every=3),)),
    "8 ranks, sharded, input": Case(Job(dp=8, steps=120, sharded=True), (stall("input_starvation", 200, 6),)),
    "8 ranks, slow GPU": Case(
        Job(dp=8, steps=120), (SlowDevice(ranks=(3,), factor=3.0),), Capture(has_gpu_times=True)
    ),
    "16 ranks, two culprits": Case(
        Job(dp=16, steps=200), (stall("host_sleep", 150, 1), stall("block_io", 150, 11, first=9, every=7))
    ),
    "16 ranks, network": Case(Job(dp=16, steps=200), (stall("network_wait", 120, 9, every=6),)),
    "16 ranks, tensor parallel, compute": Case(
        Job(dp=8, tp=2, steps=120, layers=3, grad_norm=True), (stall("host_compute", 100, 13),)
    ),
    "16 ranks, runs ahead, disk": Case(
        Job(dp=16, steps=240, sync_every=10), (stall("block_io", 150, 4, every=10),)
    ),
    "32 ranks, pipeline, lock": Case(
        Job(dp=4, tp=4, pp=2, steps=100, layers=1, buckets=2, grad_norm=True),
        (stall("lock_contention", 150, 17),),
    ),
    "32 ranks, allocations": Case(Job(dp=32, steps=120), (stall("cuda_alloc", 120, 30, every=4),)),
    "64 ranks, disk": Case(Job(dp=64, steps=150), (stall("block_io", 300, 37),)),
    "64 ranks, preempted in every step": Case(
        Job(dp=64, steps=150), (stall("cpu_preemption", 60, 12, first=20, every=1),)
    ),
    "64 ranks, late from the start": Case(
        Job(dp=64, steps=150), (stall("host_sleep", 40, 63, first=0, every=1),)
    ),
    "64 ranks, experts, disk": Case(
        Job(dp=64, ep=8, steps=80, layers=2, buckets=2), (stall("block_io", 150, 20),)
    ),
    "128 ranks, stopped": Case(Job(dp=128, steps=100), (stall("process_stopped", 250, 99, every=8),)),
    "128 ranks, sharded, page faults": Case(
        Job(dp=128, steps=60, layers=2, sharded=True), (stall("page_fault", 200, 64, every=4),)
    ),
    "256 ranks, disk": Case(Job(dp=256, steps=80, buckets=2), (stall("block_io", 200, 200),)),
    "256 ranks, tensor parallel, copies": Case(
        Job(dp=32, tp=8, steps=60, layers=2, buckets=2, grad_norm=True), (stall("host_device_copy", 150, 77),)
    ),
    "8 ranks, hang": Case(
        Job(dp=8, steps=100), (MissingRank(ranks=(3,), step=60, doing=Category.SLEEP, is_dead=False),)
    ),
}
FAST = ("8 ranks, disk", "8 ranks, preempted in every step", "16 ranks, two culprits")
"""The jobs of the test."""

Row = dict[str, Any]


def requests(trace: Trace) -> Iterator[tuple[bool, list[bytes]]]:
    """The requests of each half second, one of each node; whether they are the last, which report the ended processes.

    The job's end was just now.
    """
    clocks = _wall_clocks(trace)
    nodes = [_of_node(trace, node) for node in range(len(trace.nodes))]
    times = [
        tables[name]["ts_ns"] + clocks[node].wall_ns - clocks[node].monotonic_ns
        for node, tables in enumerate(nodes)
        for name in ("collectives", "snapshots")
    ]
    begin_ns = min(int(each.min()) for each in times)
    n_parts = (max(int(each.max()) for each in times) - begin_ns) // REQUEST_NS + 1
    for part in range(n_parts + 1):
        bodies = []
        for node, name in enumerate(trace.nodes):
            node_begin_ns = begin_ns + clocks[node].monotonic_ns - clocks[node].wall_ns
            tables = _part(nodes[node], node_begin_ns, part, is_last=part == n_parts)
            ranks = {pid: (rank, -1) for pid, rank in nodes[node]["processes"][["pid", "rank"]].tolist()}
            on_wall = {
                table.name: hub_batches.on_wall_clock(
                    table, tables[table.name], clocks[node], trace.symbols, ranks=ranks
                )
                for table in layout.TABLES
                if len(tables.get(table.name, ()))
            }
            if on_wall:
                batch_id = f"{name} {part}"
                bodies.append(hub_arrow.request(on_wall, batch_id=batch_id, node=name, cluster="c", about={}))
        yield part == n_parts, bodies


def _of_node(trace: Trace, node: int) -> dict[str, Array]:
    names = ("collectives", "calls", "snapshots", *IDENTITIES)
    return {name: rows[rows["node"] == node] for name in names for rows in [getattr(trace, name)]}


def _part(tables: dict[str, Array], begin_ns: int, part: int, *, is_last: bool) -> dict[str, Array]:
    """A node's rows of one part. The ends of processes are in the last part only."""
    out = {}
    for name in tables.keys() - set(IDENTITIES):
        rows = tables[name]
        of_part = np.maximum((rows["ts_ns"].astype(np.int64) - begin_ns) // REQUEST_NS, 0)
        out[name] = rows[of_part >= part if is_last else of_part == part]
    if part == 0 or is_last:
        processes = tables["processes"].copy()
        if not is_last:
            processes["ended_ns"] = UNKNOWN
        out |= {"processes": processes, "communicators": tables["communicators"]}
    return out


def _wall_clocks(trace: Trace) -> dict[int, Clock]:
    """The last reading of each node's clock, moved so that the trace ends now."""
    last = {clock.node: clock for clock in trace.clocks}
    to_now_ns = time.time_ns() - max(clock.wall_ns for clock in last.values())
    return {node: replace(clock, wall_ns=clock.wall_ns + to_now_ns) for node, clock in last.items()}


def of_hub(trace: Trace, folder: Path, explained: list[Row]) -> tuple[list[Row], list[Row]]:
    """The verdicts of the hub's tool after the last collective, and after the end of the job.

    explained: once the verdicts equal these, no further time is given to the hub.
    """
    with closing(HubStore.open(folder)) as store:
        hub = Hub(store, rates.load(None), None)  # type: ignore[arg-type]
        while_running: list[Row] = []

        def answer() -> list[Row]:
            return verdicts(TenantContext(hub, TENANT), VerdictsParams()).rows

        with closing(ContinuousDiagnosis(store, lambda: Stream(linger_ns=0))) as diagnosis:
            for is_last, bodies in requests(trace):
                if is_last:
                    while_running = _settled(answer, lambda rows: is_same(rows, explained))
                for body in bodies:
                    store.append(arrow.decode(body, TENANT, limit=1 << 28)).result(30)
                _until(diagnosis.is_idle, 120)
            ended = _settled(answer, lambda rows: rows and all(row["state"] == "closed" for row in rows))
        return while_running, ended


def _settled(answer: Callable[[], list[Row]], is_done: Callable[[list[Row]], object]) -> list[Row]:
    """The answer once it is complete, or the last answer after SETTLE_S."""
    _until(lambda: is_done(answer()), SETTLE_S)
    return answer()


def _until(condition: Callable[[], object], seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)


def of_explain(trace: Trace) -> list[Row]:
    """The verdicts of `explain`, in the form of the hub's rows."""
    return [
        {
            "kind": verdict.kind,
            "ranks": verdict.ranks,
            "cause": verdict.causes[0].cause.name if verdict.causes else None,
            "victims": verdict.victims,
            "gpu_seconds": verdict.cost.gpu_seconds if verdict.cost else None,
            "at_most_gpu_seconds": verdict.cost.at_most_gpu_seconds if verdict.cost else None,
            "is_lower_bound": verdict.cost.is_lower_bound if verdict.cost else None,
        }
        for verdict in diagnose(trace).verdicts
    ]


def essence(rows: list[Row]) -> list[tuple[str, tuple[int, ...], str | None]]:
    """Kind, ranks and cause of each verdict."""
    return sorted((row["kind"], tuple(row["ranks"]), row["cause"] or "") for row in rows)


def cost(rows: list[Row]) -> tuple[float, float]:
    """The sum of the costs: the least and the most."""
    least = sum(row["gpu_seconds"] or 0.0 for row in rows)
    most = sum(row["at_most_gpu_seconds"] or row["gpu_seconds"] or 0.0 for row in rows)
    return round(least, 3), round(most, 3)


def expected(truth: Truth) -> list[tuple[str, tuple[int, ...], str]]:
    """The right answers in the same form; kinds of the simulator that are finer than the verdicts' are mapped."""
    kinds = {"slow_device": "device"}
    return sorted(
        (kinds.get(answer.kind, answer.kind), answer.ranks, answer.cause) for answer in truth.knowable
    )


def run(name: str, seed: int = 1) -> dict[str, Any]:
    """One job: the hub's answers, explain's and the truth."""
    case = CASES[name]
    trace, truth = simulate(case.job, case.faults, seed=seed, capture=case.capture)
    explained = of_explain(trace)
    with tempfile.TemporaryDirectory(prefix="stallscope-bench-") as folder:
        running, ended = of_hub(trace, Path(folder), explained)
    return {
        "job": name,
        "commit": commit(),
        "n_ranks": case.job.nranks,
        "n_collectives": len(trace.collectives),
        "truth": expected(truth),
        "explain": essence(explained),
        "hub_running": essence(running),
        "hub": essence(ended),
        "n_victims": [[len(row["victims"]) for row in rows] for rows in (explained, running, ended)],
        "truth_gpu_seconds": round(truth.lost_gpu_seconds, 3),
        "explain_gpu_seconds": cost(explained),
        "hub_running_gpu_seconds": cost(running),
        "hub_gpu_seconds": cost(ended),
    }


def is_close(value: tuple[float, float], wanted: tuple[float, float]) -> bool:
    """Whether two costs are within 10 % of each other; a range may contain the other."""
    return value[0] <= 1.1 * wanted[1] and value[1] >= wanted[0] / 1.1


def is_same(rows: list[Row], others: list[Row]) -> bool:
    """Whether the verdicts are equal, and their costs within 1 %."""
    same = zip(cost(rows), cost(others), strict=True)
    return essence(rows) == essence(others) and all(abs(a - b) <= 0.01 * max(a, b) for a, b in same)


def marks(row: dict[str, Any]) -> dict[str, bool]:
    """The comparisons of one job."""
    truth = (row["truth_gpu_seconds"],) * 2
    hub, explain = row["hub_gpu_seconds"], row["explain_gpu_seconds"]
    return {
        "is_answer_equal": row["hub"] == row["explain"],
        "is_answer_right": row["hub"] == row["truth"],
        "is_running_answer_equal": row["hub_running"] == row["explain"],
        "is_cost_equal": is_close(hub, explain) and is_close(row["hub_running_gpu_seconds"], explain),
        "is_cost_right": truth[0] < 0 or (is_close(hub, truth) and is_close(explain, truth)),
    }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    rows = {row["job"]: row for row in _stored()} if only else {}
    for name in CASES:
        if only in name:
            row = run(name)
            rows[name] = row | marks(row)
            print(
                *(f"{key}={value}" for key, value in rows[name].items()),
                sep="  ",
                file=sys.stderr,
                flush=True,
            )
    jobs = [rows[name] for name in CASES if name in rows]
    counts = {f"n_{mark}": sum(row[mark] for row in jobs) for mark in marks(jobs[0])}
    report("hub_truth", {"n_jobs": len(jobs), **counts, "jobs": jobs})


def _stored() -> list[dict[str, Any]]:
    path = RESULTS / "hub_truth.json"
    stored: list[dict[str, Any]] = json.loads(path.read_text())["jobs"] if path.exists() else []
    return stored


if __name__ == "__main__":
    main()
