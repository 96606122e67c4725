"""The continuous diagnosis: rows per second, and the time until a straggler is named.

A simulated job of 8, 64 and 512 ranks, eight per node, with steps of about 0.2 s. Each node sends a batch every 250
ms, and batches that arrive during a feed() are fed together, as in the hub. Rate: rows divided by the time in feed(),
for a healthy job and for a job with a straggler. Delay: from the third late arrival to the verdict, including the
wait for the batch and for earlier batches.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from report import report

from stallscope.diagnose.stream import Stream
from stallscope.events.layout import TABLES, Array
from stallscope.events.names import Category
from stallscope.events.trace import Trace
from stallscope.synth import Fault, HostStall, Job, Schedule, Timing, simulate

RANKS = (8, 64, 512)
N_STEPS = {8: 600, 64: 300, 512: 120}
TIMING = Timing(forward_ns=13_000_000, backward_ns=26_000_000)
DELAY_NS, EVERY, FIRST = 100_000_000, 7, 60
BATCH_NS = 250_000_000


@dataclass
class Clock:
    """The hub's clock, which the benchmark advances."""

    now_ns: int = 0

    def __call__(self) -> int:
        return self.now_ns


def main() -> None:
    """Measure and report."""
    report("stream", {"batch_ms": BATCH_NS / 1e6, "sizes": [measured(n) for n in RANKS]})


def measured(n_ranks: int) -> dict[str, Any]:
    """The numbers of one size."""
    job = Job(dp=n_ranks, steps=N_STEPS[n_ranks])
    culprit = n_ranks // 2 + 1
    fault = HostStall(
        cause="block_io", ranks=(culprit,), delay_ns=DELAY_NS, schedule=Schedule(first=FIRST, every=EVERY)
    )
    fine, slow = (traced(job, faults) for faults in ((), (fault,)))
    quiet, busy = fed(fine), fed(slow)
    third_ns = late_at(slow, culprit)[2]
    opened_ns = next(at for at, kind, ranks in busy["changes"] if kind == "opened" and ranks == [culprit])
    return {
        "n_ranks": n_ranks,
        "n_rows": len(fine.collectives),
        "rows_a_second_of_the_job": round(len(fine.collectives) / seconds(fine)),
        "healthy_rows_a_second": quiet["rows_a_second"],
        "straggler_rows_a_second": busy["rows_a_second"],
        "looks_a_row": busy["looks_a_row"],
        "longest_feed_ms": busy["longest_feed_ms"],
        "max_rows_kept": busy["max_rows_kept"],
        "third_late_to_opened_ms": round((opened_ns - third_ns) / 1e6, 1),
        "n_changes_healthy": len(quiet["changes"]),
    }


def traced(job: Job, faults: tuple[Fault, ...]) -> Trace:
    """The events of a job."""
    return simulate(job, faults, seed=7, timing=TIMING, has_twin=False)[0]


def seconds(trace: Trace) -> float:
    """How long the job was observed after its start-up."""
    when = wall_ns(trace, trace.collectives)
    return float(when.max() - np.quantile(when, 0.01)) / 1e9


def fed(trace: Trace) -> dict[str, Any]:
    """Feed a trace in the batches of its nodes. Returns the rate, the changes with their times, and the kept rows."""
    clock, spent, longest, most, free_ns = Clock(), 0.0, 0.0, 0, 0
    stream, changes = Stream(clock=clock), []
    for at_ns, batch in batches(trace):
        clock.now_ns = max(at_ns, free_ns)
        begin = time.perf_counter()
        feed = stream.feed(batch)
        took = time.perf_counter() - begin
        free_ns = clock.now_ns + int(took * 1e9)
        changes += [(free_ns, change.kind, change.verdict.ranks) for change in feed]
        spent, longest, most = spent + took, max(longest, took), max(most, stream.n_rows)
    return {
        "rows_a_second": round(len(trace.collectives) / spent),
        "changes": changes,
        "looks_a_row": round(stream.n_evaluations[1] / len(trace.collectives), 2),
        "longest_feed_ms": round(longest * 1e3, 1),
        "max_rows_kept": most,
    }


def batches(trace: Trace) -> Iterator[tuple[int, Trace]]:
    """The rows that the nodes send at the end of each interval, with that time (wall clock)."""
    when = {table.name: wall_ns(trace, getattr(trace, table.name)) for table in TABLES}
    begin, end = int(when["collectives"].min()), int(when["collectives"].max())
    edges = range(begin, end + BATCH_NS, BATCH_NS)
    orders = {name: np.argsort(at, kind="stable") for name, at in when.items()}
    clocks = tuple({clock.node: clock for clock in reversed(trace.clocks)}.values())
    for first in edges:
        rows = {}
        for name, at in when.items():
            low, high = np.searchsorted(at, [first, first + BATCH_NS], sorter=orders[name])
            low = 0 if first == begin else low
            rows[name] = getattr(trace, name)[orders[name][low:high]]
        own_rows: dict[str, Any] = rows
        yield first + BATCH_NS, replace(trace, **own_rows, ends_ns=(), clocks=clocks, lost={})


def wall_ns(trace: Trace, rows: Array) -> Array:
    """When rows happened, by the wall clock of their nodes."""
    ahead = np.zeros(len(trace.nodes), np.int64)
    for clock in reversed(trace.clocks):
        ahead[clock.node] = clock.wall_ns - clock.monotonic_ns
    when: Array = rows["ts_ns"].astype(np.int64) + ahead[rows["node"]]
    return when


def late_at(trace: Trace, rank: int) -> list[int]:
    """When a rank arrived after each of its delays."""
    process = trace.processes[trace.processes["rank"] == rank][0]
    own_rows = (trace.collectives["node"] == process["node"]) & (trace.collectives["pid"] == process["pid"])
    rows = trace.collectives[own_rows]
    waited = np.diff(rows["ledger_ns"][:, Category.IO - 1])
    late = np.flatnonzero(waited >= DELAY_NS // 2) + 1
    result: list[int] = wall_ns(trace, rows)[late].tolist()
    return result


if __name__ == "__main__":
    main()
