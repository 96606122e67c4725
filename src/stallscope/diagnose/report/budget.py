"""The time budget of a job or of a process: the share of its time in each category of the time ledger.

Takes the running sums that arrivals and snapshots carry. As accurate as the ledger; "not recorded" where the source has
none. A part of the job that is not a fault of any rank (every rank reads a disk all the time) is visible here only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.layout import Array, process_keys
from stallscope.events.names import CATEGORY_NAMES, N_CATEGORIES, Category, CollectiveFlag
from stallscope.events.trace import Trace

LABELS: Mapping[Category, str] = {
    Category.ON_CPU: "on CPU",
    Category.WAIT_GPU: "waiting for collectives",
    Category.DEVICE: "waiting for its GPU",
    Category.LAUNCH: "launches",
    Category.COPY: "copies",
    Category.ALLOC: "allocation",
    Category.CHILD: "input (child processes)",
    Category.IO: "disk I/O",
    Category.NET: "network",
    Category.SLEEP: "sleep",
    Category.LOCK: "locks",
    Category.DRIVER: "driver",
    Category.PREEMPTED: "preempted",
    Category.STOPPED: "stopped",
    Category.FAULT: "page faults",
    Category.OTHER_OFF: "blocked elsewhere",
}
NOT_RECORDED = "not recorded"
_USEFUL = (Category.ON_CPU, Category.WAIT_GPU, Category.DEVICE, Category.LAUNCH, Category.COPY)
_MIN_SHARE = 0.01


@dataclass(frozen=True)
class Budget:
    """Shares of the time of all processes together, the largest first, by name of the ledger's category.

    is_recorded: the source has a ledger. n_processes, seconds: the processes, and their time together.
    knows_blocking: the source distinguishes blocked time from time that it does not record.
    dominant: category other than useful work in which every process spends a large share, None where there is none.
    """

    shares: Mapping[str, float]
    n_processes: int
    seconds: float
    knows_blocking: bool = True
    dominant: str | None = None

    @property
    def is_recorded(self) -> bool:
        return bool(self.shares)

    def label(self, name: str) -> str:
        """A category in words."""
        if name == NOT_RECORDED or (name == "other_off" and not self.knows_blocking):
            return NOT_RECORDED
        return LABELS[Category[name.upper()]]

    def as_json(self) -> dict[str, Any]:
        return {
            "is_recorded": self.is_recorded,
            "shares": dict(self.shares),
            "dominant": self.dominant,
            "n_processes": self.n_processes,
            "seconds": self.seconds,
        }

    def line(self) -> str:
        """The budget in one line."""
        if not self.is_recorded:
            return f"Time budget: {NOT_RECORDED} (the source has no time ledger)."
        parts = [
            f"{share:.0%} {self.label(name)}" for name, share in self.shares.items() if share >= _MIN_SHARE
        ]
        subject = "the process" if self.n_processes == 1 else f"{self.n_processes} ranks"
        return f"Time budget of {subject}: {', '.join(parts)}."


def budget(
    spent_ns: Array, *, elapsed_ns: Array | None = None, knows_blocking: bool = True, limits: Thresholds
) -> Budget:
    """The budget of some processes.

    spent_ns: int64 (p, N_CATEGORIES), by process. elapsed_ns: int64 (p,), wall time of each: the part that the ledger
    does not cover counts as not recorded. None: the ledger fills the time.
    """
    whole = spent_ns.sum(axis=1) if elapsed_ns is None else np.maximum(elapsed_ns, spent_ns.sum(axis=1))
    total = float(whole.sum())
    if total <= 0 or not spent_ns.any():
        return Budget({}, len(spent_ns), 0.0)
    by_category = spent_ns.sum(axis=0) / total
    shares = {
        CATEGORY_NAMES[i]: round(float(by_category[i]), 4)
        for i in np.argsort(-by_category, kind="stable").tolist()
    }
    remainder = round(1.0 - float(by_category.sum()), 4)
    if remainder >= _MIN_SHARE:
        shares[NOT_RECORDED] = remainder
    return Budget(
        shares={
            name: share for name, share in sorted(shares.items(), key=lambda part: -part[1]) if share > 0
        },
        n_processes=len(spent_ns),
        seconds=round(total / 1e9, 3),
        knows_blocking=knows_blocking,
        dominant=_dominant(spent_ns / np.maximum(whole, 1)[:, None], knows_blocking, limits),
    )


def combined(parts: Sequence[Budget]) -> Budget | None:
    """The budget of several jobs; a category that dominates in each of them dominates."""
    seconds = sum(part.seconds for part in parts)
    if not seconds:
        return parts[0] if parts else None
    names = dict.fromkeys(name for part in parts for name in part.shares)
    shares = {
        name: round(sum(part.shares.get(name, 0.0) * part.seconds for part in parts) / seconds, 4)
        for name in names
    }
    dominant = {part.dominant for part in parts}
    return Budget(
        shares=dict(sorted(shares.items(), key=lambda part: -part[1])),
        n_processes=sum(part.n_processes for part in parts),
        seconds=round(seconds, 3),
        knows_blocking=all(part.knows_blocking for part in parts),
        dominant=dominant.pop() if len(dominant) == 1 else None,
    )


def budget_of(
    trace: Trace,
    limits: Thresholds,
    *,
    processes: Sequence[tuple[int, int]] | None = None,
    edges: Array | None = None,
) -> Budget:
    """The budget of the processes of a trace that carry a ledger, or of some of them (node, pid).

    edges: collectives that include the first and the last of each process, where the caller has them: large traces are
    not sorted once more.
    """
    key, spent, lasted = _spent(trace, trace.collectives if edges is None else edges)
    if processes is not None:
        wanted = np.array([node << 32 | pid for node, pid in processes], np.int64)
        spent, lasted = spent[np.isin(key, wanted)], lasted[np.isin(key, wanted)]
    has_no_calls = bool((trace.collectives["flags"] & CollectiveFlag.NO_SYSCALLS).any())
    return budget(
        spent,
        elapsed_ns=lasted,
        knows_blocking=not has_no_calls or len(trace.offcpu) > 0,
        limits=limits,
    )


def _dominant(shares: Array, knows_blocking: bool, limits: Thresholds) -> str | None:
    """The category other than useful work in which every process spends a large share of its time."""
    least = shares.min(axis=0)
    for category in _USEFUL if knows_blocking else (*_USEFUL, Category.OTHER_OFF):
        least[category - 1] = 0.0
    largest = int(least.argmax())
    return CATEGORY_NAMES[largest] if least[largest] >= limits.job_share else None


def _spent(trace: Trace, arrivals: Any) -> tuple[Array, Array, Array]:
    """By process: its key (node << 32 | pid), the ns in each category between its first and last account, and the time
    between those two: int64 (p,), float64 (p, N_CATEGORIES), float64 (p,).
    """
    has_ledger = np.asarray(arrivals["flags"] & CollectiveFlag.NO_LEDGER == 0)
    parts = [
        _edges(arrivals, has_ledger),
        _edges(trace.snapshots, np.any(trace.snapshots["ledger_ns"], axis=1)),
    ]
    key, ts_ns, ledger = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if not len(key):
        return key, np.zeros((0, N_CATEGORIES), np.int64), key
    numbers, number = np.unique(key, return_inverse=True)
    shape = (len(numbers), N_CATEGORIES)
    low, high = np.full(shape, np.iinfo(np.int64).max), np.zeros(shape, np.int64)
    np.minimum.at(low, number, ledger)
    np.maximum.at(high, number, ledger)
    first, last = np.full(len(numbers), np.iinfo(np.int64).max), np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(first, number, ts_ns)
    np.maximum.at(last, number, ts_ns)
    return numbers, high.astype(np.float64) - low, last.astype(np.float64) - first


def _edges(table: Any, has_ledger: Any) -> tuple[Array, Array, Array]:
    """Key, time and ledger of the first and the last row of each process in a table: (k,), (k,), (k, N_CATEGORIES)."""
    rows = np.flatnonzero(has_ledger)
    if not len(rows):
        none = np.zeros(0, np.int64)
        return none, none, np.zeros((0, N_CATEGORIES), np.int64)
    key = process_keys(table)[rows]
    order = np.lexsort((table["ts_ns"][rows], key))
    begins = np.flatnonzero(np.diff(key[order], prepend=key[order[0]] - 1))
    ends = np.append(begins[1:], len(order)) - 1
    edge = rows[order[np.unique(np.concatenate([begins, ends]))]]
    picked = table[edge]
    return (
        process_keys(picked),
        picked["ts_ns"].astype(np.int64),
        picked["ledger_ns"].astype(np.int64),
    )
