"""Valid but odd traces: each oddity happens in real data, alone or together with others."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CollectiveFlag
from stallscope.events.trace import Clock, Trace

from .builders import MS

Rng = np.random.Generator


def _some(rows: Array, rng: Rng, share: float = 0.3) -> Array:
    return rng.random(len(rows)) < share * rng.random()


def _lost(rows: Array, rng: Rng) -> Array:
    """Records lost at random."""
    return rows[~_some(rows, rng, 0.9)]


def _few(rows: Array, rng: Rng) -> Array:
    """Only the first or the last rows."""
    n = int(rng.integers(0, min(len(rows), 40) + 1))
    return rows[:n] if rng.random() < 0.5 else rows[len(rows) - n :]


def _twice(rows: Array, rng: Rng) -> Array:
    """Records delivered twice."""
    return np.concatenate([rows, rows[_some(rows, rng)]])


def _same_time(rows: Array, rng: Rng) -> Array:
    """A coarse clock: many records have the same time."""
    tick = int(rng.choice([MS, 100 * MS, 10_000 * MS]))
    for name in ("ts_ns", "wait_enter_ns", "wait_leave_ns"):
        known = rows[name] != UNKNOWN
        rows[name][known] = rows[name][known] // tick * tick
    return rows


def _one_moment(rows: Array, rng: Rng) -> Array:
    """All records of a node at one moment, and a last record long afterwards."""
    nodes = np.unique(rows["node"])
    here = rows["node"] == rng.choice(nodes) if len(nodes) else np.zeros(len(rows), bool)
    for name in ("ts_ns", "wait_enter_ns", "wait_leave_ns"):
        rows[name][here] = rows[name][here].min(initial=np.iinfo(np.int64).max)
    if here.any():
        rows["ts_ns"][np.flatnonzero(here)[-1]] += 3_600_000 * MS
    return rows


def _no_waits(rows: Array, rng: Rng) -> Array:
    """Waits that the capture did not record."""
    gone = _some(rows, rng, 1.5)
    for name in ("wait_enter_ns", "wait_leave_ns"):
        rows[name][gone] = UNKNOWN
    return rows


def _waits_apart(rows: Array, rng: Rng) -> Array:
    """Releases that follow a long time after their call, at one time for many calls."""
    known = np.flatnonzero(rows["wait_leave_ns"] != UNKNOWN)
    if len(known):
        rows["wait_leave_ns"][known[: len(known) // 2]] = rows["wait_leave_ns"][known[0]]
    return rows


def _gpu_times(rows: Array, rng: Rng) -> Array:
    """GPU times of some calls, some of length zero."""
    has = _some(rows, rng, 2.0)
    rows["gpu_start_ns"][has] = rows["ts_ns"][has] + int(rng.integers(-(10**9), 10**9))
    rows["gpu_end_ns"][has] = rows["gpu_start_ns"][has] + rng.integers(0, 2, has.sum()) * MS
    return rows


def _unknown_seq(rows: Array, rng: Rng) -> Array:
    """Calls whose round is unknown."""
    rows["seq"][_some(rows, rng)] = UNKNOWN
    return rows


def _far_seq(rows: Array, rng: Rng) -> Array:
    """Rounds that start at a large number, or jump."""
    rows["seq"][_some(rows, rng)] += int(rng.choice([1, 1000, 1 << 40]))
    return rows


def _no_hash(rows: Array, rng: Rng) -> Array:
    """Communicators older than the capture."""
    old = _some(rows, rng) if rng.random() < 0.5 else np.full(len(rows), True)
    rows["comm_hash"][old] = 0
    rows["flags"][old] |= int(CollectiveFlag.LATE_ATTACH)
    return rows


def _late(rows: Array, rng: Rng) -> Array:
    """Processes that were attached late."""
    pids = np.unique(rows["pid"])
    late = np.isin(rows["pid"], pids[rng.random(len(pids)) < 0.5])
    rows["flags"][late] |= int(CollectiveFlag.LATE_ATTACH)
    return rows


def _sizes(rows: Array, rng: Rng) -> Array:
    """Communicators whose stated size differs from the ranks with data."""
    rows["nranks"] = int(rng.choice([0, 1, 2, 1000]))
    return rows


def _no_ranks(rows: Array, rng: Rng) -> Array:
    """Ranks that are unknown, or the same for several processes."""
    rows["comm_rank"][_some(rows, rng, 2.0)] = int(rng.choice([UNKNOWN, 0]))
    return rows


def _ledger(rows: Array, rng: Rng) -> Array:
    """Ledgers that are zero, or decrease."""
    which = _some(rows, rng, 1.0)
    rows["ledger_ns"][which] = 0 if rng.random() < 0.5 else rows["ledger_ns"][which] // 2
    return rows


def _calls(rows: Array, rng: Rng) -> Array:
    """Other operations, counts and peers: point-to-point calls among collectives."""
    which = _some(rows, rng)
    rows["op"][which] = rng.integers(0, 12, which.sum())
    rows["peer_rank"][which] = rng.integers(-1, 4, which.sum())
    rows["count"][_some(rows, rng)] = int(rng.choice([0, 1, 1 << 60]))
    return rows


def _jumps(rows: Array, rng: Rng) -> Array:
    """A clock that was moved while a node ran."""
    which = rows["node"] == (rng.choice(np.unique(rows["node"])) if len(rows) else 0)
    which &= np.arange(len(rows)) > len(rows) * rng.random()
    rows["ts_ns"][which] += int(rng.choice([-1, 1])) * int(rng.choice([1, 1000, 3_600_000])) * MS
    return rows


def _one_rank(rows: Array, rng: Rng) -> Array:
    """One process only."""
    return rows[rows["pid"] == rows["pid"][0]] if len(rows) else rows


ODDITIES: tuple[Callable[[Array, Rng], Array], ...] = (
    *(_lost, _few, _twice, _same_time, _one_moment, _no_waits, _waits_apart, _gpu_times, _unknown_seq),
    *(_far_seq, _no_hash, _late, _sizes, _no_ranks, _ledger, _calls, _jumps, _one_rank),
)


def odd(trace: Trace, seed: int) -> Trace:
    """The trace with one to four oddities, and sometimes without processes, communicators, clocks or ends."""
    rng = np.random.default_rng(seed)
    rows = trace.collectives.copy()
    for number in rng.choice(len(ODDITIES), int(rng.integers(1, 5)), replace=False):
        rows = ODDITIES[number](rows, rng)
    parts: dict[str, object] = {"collectives": rows}
    for name in ("processes", "communicators", "snapshots"):
        if rng.random() < 0.2:
            parts[name] = getattr(trace, name)[:0]
    if rng.random() < 0.3:
        parts["clocks"] = () if rng.random() < 0.5 else _equal_clocks(trace, rng)
    if rng.random() < 0.3:
        parts["ends_ns"] = tuple(UNKNOWN for _ in trace.ends_ns)
    return replace(trace, **parts)  # type: ignore[arg-type]


def _equal_clocks(trace: Trace, rng: Rng) -> tuple[Clock, ...]:
    """Several readings of one moment, as the hub sees them when a node sends two batches at once."""
    at_ns = int(rng.integers(1, 1 << 60))
    return tuple(Clock(node, at_ns, at_ns) for node in range(len(trace.nodes)) for _ in range(2))
