"""The time ledger of one rank from its profile: inside calls, on the CPU, in a data loader, or not recorded.

Inside a CUDA call a thread is in that call's category, inside other recorded operations on the CPU, in a data loader's
`__next__` it waits for its workers. Between recorded operations nothing is known (other_off).
"""

import numpy as np

from stallscope.events.layout import Array
from stallscope.events.ledger import ThreadEvents, account, waits_or_device
from stallscope.events.names import CALL_CATEGORY, Category, Op
from stallscope.importers.rank_profile import Profile


def add_ledger(rows: Array, profile: Profile) -> None:
    """The ledger at each arrival, the last wait before it, and the counts of calls so far."""
    calls = profile.calls[np.argsort(profile.calls["begin_ns"], kind="stable")]
    at = rows["ts_ns"]
    for column, ops in (
        ("n_syncs", (Op.SYNC,)),
        ("n_allocs", (Op.ALLOC, Op.FREE)),
        ("n_copies", (Op.COPY,)),
        ("n_launches", (Op.LAUNCH, Op.GRAPH_LAUNCH)),
    ):
        rows[column] = np.searchsorted(calls["begin_ns"][np.isin(calls["op"], ops)], at)
    category = np.zeros(len(calls), np.int64)
    for op, spent in CALL_CATEGORY.items():
        category[calls["op"] == op] = spent
    is_sync = calls["op"] == Op.SYNC
    if is_sync.any():
        begin, end = calls["begin_ns"][is_sync], (calls["begin_ns"] + calls["duration_ns"])[is_sync]
        category[is_sync] = kinds = waits_or_device(begin, end, at)
        waits = kinds == Category.WAIT_GPU
        ends = np.maximum.accumulate(end[waits])
        position = np.searchsorted(ends, at, side="right") - 1
        has = position >= 0
        rows["wait_enter_ns"][has], rows["wait_leave_ns"][has] = (
            begin[waits][position[has]],
            ends[position[has]],
        )
    rows["ledger_ns"] = account(_threads(profile, calls, category), at)


def _threads(profile: Profile, calls: Array, category: Array) -> list[ThreadEvents]:
    """The threads that make CUDA calls. calls: by begin; category: of each."""
    if not len(calls):
        return []
    ends = calls["begin_ns"] + calls["duration_ns"]
    first, last = int(calls["begin_ns"].min()), int(ends.max())
    threads = []
    for tid in np.unique(calls["tid"]):
        own = np.flatnonzero(calls["tid"] == tid)
        own = own[_outermost(calls["begin_ns"][own], ends[own])]
        work = profile.work[profile.work["tid"] == tid]
        busy, loader = work[~work["is_loader"]], work[work["is_loader"]]
        begins = np.concatenate([calls["begin_ns"][own], busy["begin_ns"]])
        gaps = _gaps(begins, np.concatenate([ends[own], busy["end_ns"]]), first, last)
        off = _split(gaps, np.sort(np.stack([loader["begin_ns"], loader["end_ns"]], axis=1), axis=0).tolist())
        known = own[category[own] > 0]
        threads.append(
            ThreadEvents(
                call_enter_ns=calls["begin_ns"][known].astype(np.int64),
                call_leave_ns=ends[known].astype(np.int64),
                call_category=category[known],
                off_ns=off[:, 0],
                on_ns=off[:, 1],
                woken_ns=off[:, 1],
                off_category=off[:, 2],
                first_ns=first,
                last_ns=last,
            )
        )
    return threads


def _outermost(begin: Array, end: Array) -> Array:
    """Whether each interval, sorted by begin, lies outside all others: bool (n,)."""
    order = np.lexsort((-end, begin))
    furthest = np.maximum.accumulate(end[order])
    is_outer = np.ones(len(begin), bool)
    is_outer[order[1:]] = begin[order[1:]] >= furthest[:-1]
    return is_outer


def _gaps(begin: Array, end: Array, first: int, last: int) -> Array:
    """The time between first and last that no interval covers: int64 (n, 2)."""
    order = np.argsort(begin, kind="stable")
    furthest = np.maximum.accumulate(np.concatenate([[first], end[order]]))
    gaps = np.stack([furthest, np.append(begin[order], last)], axis=1)
    return gaps[gaps[:, 1] > gaps[:, 0]]


def _split(gaps: Array, loader: list[list[int]]) -> Array:
    """The gaps with their categories: child inside the loader's intervals, other_off elsewhere: int64 (n, 3)."""
    if not loader:
        return np.column_stack([gaps, np.full(len(gaps), Category.OTHER_OFF, np.int64)])
    out: list[tuple[int, int, int]] = []
    at = 0
    for begin, end in gaps.tolist():
        while at < len(loader) and loader[at][1] <= begin:
            at += 1
        position = at
        while position < len(loader) and loader[position][0] < end:
            inner = max(begin, loader[position][0]), min(end, loader[position][1])
            if inner[0] > begin:
                out.append((begin, inner[0], int(Category.OTHER_OFF)))
            if inner[1] > inner[0]:
                out.append((*inner, int(Category.CHILD)))
            begin = max(begin, inner[1])
            position += 1
        if begin < end:
            out.append((begin, end, int(Category.OTHER_OFF)))
    return np.array(out, np.int64).reshape(-1, 3)
