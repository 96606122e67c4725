"""Processes without peers, compared with their own faster steps.

A step is a period of the pattern of synchronise calls (otherwise of copies or graph launches), if `calls` contains all
of them: it may contain slow calls only, and the complete counts show which. The time of a step is split by the thread's
calls and off-CPU intervals; the remaining time was on the CPU. A process that makes collectives with itself, such as a
data-parallel job of one rank, has the steps in which its collectives repeat, and their ledger. Steps that take several
times the typical step are late. Their excess over the typical step is explained like the excess of a late rank. A
process that waits intentionally (sleep, socket) or for a reason that the source does not record is idle, and idle time
is not a finding.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.timeline.programs import first_of_steps, programs_of
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CALL_CATEGORY, N_CATEGORIES, Category, Op
from stallscope.events.trace import Trace

_MARKS = (Op.SYNC, Op.COPY, Op.GRAPH_LAUNCH)

CATEGORY_OF = CALL_CATEGORY | {Op.SYNC: Category.DEVICE, Op.STREAM_WAIT: Category.DEVICE}

_NOTHING = 0.001  # of the time
_MIN_MARKS = 3  # the steps between fewer marks are not enough for a comparison
_COMPLETE = 0.95
_LONGEST_PATTERN = 6
_MIN_PERIODS = 6
_SIMILAR = 0.2  # durations that differ by less than 20 % on average are similar
_REPEATS = 0.3
"""A pattern explains the durations if their spread within its positions is below this share of the total spread."""

_LOADER = b"pt_data_worker"  # the name of worker processes of torch.utils.data


@dataclass(frozen=True)
class Steps:
    """The steps of one process. begin_ns, length_ns: (n,). spent_ns: (n, N_CATEGORIES), fills length_ns."""

    node: int
    pid: int
    tid: int
    begin_ns: Array
    length_ns: Array
    spent_ns: Array


def is_single(trace: Trace) -> bool:
    """Whether no rows of a trace can be matched between ranks: only calls, or collectives of one rank with itself."""
    is_alone = (trace.collectives["nranks"] == 1).all()
    has_calls = len(trace.calls) > 0 or len(trace.operations) > 0
    return bool(is_alone) and not len(trace.spans) and has_calls


def outermost(calls: Array) -> Array:
    """The calls that no other call of their thread encloses, by thread and entry: a runtime call is recorded again
    in the driver, but counts once. Open calls are left out.
    """
    done = calls[calls["duration_ns"] != UNKNOWN]
    order = np.lexsort((-done["duration_ns"], done["ts_ns"], done["tid"], done["pid"], done["node"]))
    rows = done[order]
    if not len(rows):
        return rows
    thread = _groups(rows, ("node", "pid", "tid"))
    ends = rows["ts_ns"] + rows["duration_ns"]
    # Threads are shifted to follow each other, so that a single running maximum covers all of them.
    span = int(ends.max() - rows["ts_ns"].min()) + 1
    shifted = ends - rows["ts_ns"].min() + thread * span
    before = np.concatenate([[-1], np.maximum.accumulate(shifted)[:-1]])
    return rows[shifted > before]


def _groups(rows: Array, columns: tuple[str, ...]) -> Array:
    """The number of each row's group, for rows sorted by these columns."""
    changes = np.zeros(len(rows), bool)
    for column in columns:
        changes[1:] |= rows[column][1:] != rows[column][:-1]
    return np.cumsum(changes)


def steps_of(trace: Trace, calls: Array) -> Iterable[Steps]:
    """The steps of each thread that makes calls, if there are enough to compare. calls: the outermost calls."""
    if not len(calls):
        return
    thread = _groups(calls, ("node", "pid", "tid"))
    for number in range(int(thread[-1]) + 1):
        of_thread = calls[thread == number]
        marks = every_period(*_marks(trace, of_thread))
        if len(marks) > _MIN_MARKS:
            yield _steps(trace, of_thread, marks)


def steps_of_rounds(trace: Trace) -> list[Steps]:
    """The steps of the processes that make collectives with themselves, if these repeat and have a ledger."""
    if not len(trace.collectives):
        return []
    timeline = timeline_of(trace)
    first = first_of_steps(timeline, programs_of(timeline))
    out = []
    for process in range(timeline.n_processes):
        starts = first[(first >= timeline.first[process]) & (first < timeline.first[process + 1])]
        ts_ns, ledger_ns = timeline.rows["ts_ns"][starts], timeline.rows["ledger_ns"][starts]
        if len(starts) > _MIN_MARKS and ledger_ns.any():
            node, pid = int(timeline.node[process]), int(timeline.pid[process])
            spent_ns = np.maximum(np.diff(ledger_ns, axis=0), 0).astype(np.float64)
            out.append(Steps(node, pid, pid, ts_ns[:-1], np.diff(ts_ns), spent_ns))
    return out


def _marks(trace: Trace, calls: Array) -> tuple[Array, Array]:
    """Entries and durations of the first kind of call that is frequent enough and recorded completely."""
    for op in _MARKS:
        of_kind = calls[calls["op"] == op]
        if len(of_kind) > _MIN_MARKS and _is_complete(trace, calls, op):
            return of_kind["ts_ns"], of_kind["duration_ns"]
    return np.array([], np.int64), np.array([], np.int64)


def _is_complete(trace: Trace, calls: Array, op: Op) -> bool:
    """Whether all calls of a kind are recorded, by the counts of their process; a source without counts records all."""
    counts = trace.operations
    counts = counts[(counts["node"] == calls["node"][0]) & (counts["pid"] == calls["pid"][0])]
    if not len(counts):
        return True
    of_kind = counts[counts["op"] == op]
    n_kept = int((calls["op"] == op).sum())
    return not of_kind["is_estimate"].any() and n_kept >= _COMPLETE * int(of_kind["n"].sum())


def every_period(marks: Array, duration_ns: Array) -> Array:
    """The marks that begin a period, if the durations of the marked calls repeat in a pattern of 2 to 6; otherwise all.

    A step with two waits of different length has two marks, so a step is two intervals.
    """
    if len(marks) < 2 * _MIN_PERIODS:
        return marks
    length = np.log(np.maximum(duration_ns, 1).astype(np.float64))
    spread = _spread(length, 1)
    for n in range(2, _LONGEST_PATTERN + 1):
        if len(length) >= _MIN_PERIODS * n and spread > _SIMILAR and _spread(length, n) < _REPEATS * spread:
            return marks[::n]
    return marks


def _spread(values: Array, n: int) -> float:
    """The mean distance from the median of every n-th value."""
    distances = [np.abs(values[i::n] - np.median(values[i::n])) for i in range(n)]
    return float(np.concatenate(distances).mean()) if len(values) else 0.0


def _steps(trace: Trace, calls: Array, marks: Array) -> Steps:
    node, pid, tid = (int(calls[name][0]) for name in ("node", "pid", "tid"))
    spent = np.zeros((len(marks) - 1, N_CATEGORIES))
    for op, category in CATEGORY_OF.items():
        of_kind = calls[calls["op"] == op]
        spent[:, category - 1] += _within(of_kind["ts_ns"], of_kind["duration_ns"], marks)
    off = trace.offcpu
    off = off[(off["node"] == node) & (off["pid"] == pid) & (off["tid"] == tid)]
    off = off[(off["duration_ns"] != UNKNOWN) & ~_is_inside(off, calls)]
    for category in np.unique(off["category"]):
        of_kind = off[off["category"] == category]
        spent[:, int(category) - 1] += _within(of_kind["ts_ns"], of_kind["duration_ns"], marks)
    length = np.diff(marks)
    spent[:, Category.ON_CPU - 1] += np.maximum(length - spent.sum(axis=1), 0)
    return Steps(node, pid, tid, marks[:-1], length, spent)


def _is_inside(rows: Array, calls: Array) -> Array:
    """Whether an interval begins inside one of the calls of the same thread: (n,) bool."""
    index = np.searchsorted(calls["ts_ns"], rows["ts_ns"], side="right") - 1
    ends = (calls["ts_ns"] + calls["duration_ns"])[np.maximum(index, 0)]
    return (index >= 0) & (rows["ts_ns"] < ends)


def _within(begin_ns: Array, duration_ns: Array, marks: Array) -> Array:
    """Time of intervals that do not overlap, between each two marks: (len(marks) - 1,)."""
    order = np.argsort(begin_ns)
    begin, end = begin_ns[order], (begin_ns + duration_ns)[order]
    whole = np.concatenate([[0], np.cumsum(end - begin)])
    index = np.searchsorted(begin, marks, side="right")
    last = np.maximum(index - 1, 0)
    beyond = np.where(index > 0, np.maximum(end[last] - marks, 0), 0) if len(end) else np.zeros(len(marks))
    return np.diff(whole[index] - beyond)


def typical_ns(length_ns: Array) -> float:
    """The median of the faster half. Very short steps, from consecutive calls, are left out."""
    ordered = np.sort(length_ns)
    ordered = ordered[np.cumsum(ordered) > _NOTHING * ordered.sum()]
    return float(np.median(ordered[: (len(ordered) + 1) // 2]))


def rows_in_late_steps(rows: Array, steps: Steps, is_late: Array) -> Array:
    """The rows of the thread, and of the whole process (thread 0), that begin in a late step."""
    is_own = np.isin(rows["tid"], (0, steps.tid))
    of_process = rows[(rows["node"] == steps.node) & (rows["pid"] == steps.pid) & is_own]
    index = np.searchsorted(steps.begin_ns, of_process["ts_ns"], side="right") - 1
    end_ns = steps.begin_ns[-1] + steps.length_ns[-1]
    return of_process[(index >= 0) & (of_process["ts_ns"] < end_ns) & is_late[np.maximum(index, 0)]]


def loader_workers(trace: Trace, steps: Steps) -> CauseEvidence | None:
    """The activity of the data loader's workers during the steps; None without workers or if they were mostly idle."""
    rows = trace.processes
    workers = rows["pid"][(rows["node"] == steps.node) & np.char.startswith(rows["comm"], _LOADER)]
    shares = [share for pid in workers if (share := _cpu_share(trace, steps, int(pid))) is not None]
    if not shares or max(shares) < 0.5:
        return None
    return CauseEvidence(n_loader_workers=len(workers), loader_cpu_share=round(float(np.median(shares)), 2))


def _cpu_share(trace: Trace, steps: Steps, pid: int) -> float | None:
    """Share of its accounted time that a process was on the CPU, during the steps; None without snapshots."""
    rows = trace.snapshots
    of_process = rows[(rows["node"] == steps.node) & (rows["pid"] == pid)]
    of_process = of_process[of_process["ts_ns"] >= steps.begin_ns[0] - 60 * 10**9]
    if len(of_process) < 2:
        return None
    spent = of_process["ledger_ns"][-1] - of_process["ledger_ns"][0]
    return float(spent[Category.ON_CPU - 1] / max(spent.sum(), 1))


def command_of(trace: Trace, steps: Steps) -> tuple[int, str]:
    """Rank (-1 unknown) and command of the process."""
    rows = trace.processes
    of_process = rows[(rows["node"] == steps.node) & (rows["pid"] == steps.pid)]
    return (
        (int(of_process["rank"][0]), of_process["comm"][0].decode("utf-8", "replace"))
        if len(of_process)
        else (UNKNOWN, "")
    )
