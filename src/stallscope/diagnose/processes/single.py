"""Processes that use a GPU alone: no peers, so each is compared with its own better times.

A step is what lies between two synchronise calls (else copies, else graph launches). Where a step's time went follows
from the thread's calls and off-CPU intervals; what is left was on the CPU. A process that makes collectives with
itself, such as a data-parallel job of one rank, has the steps that those repeat in, and their ledger. Steps that take
several times the usual one are late, and their excess over the usual step is explained like that of a late rank. A
process that waits because it wants to (sleep, socket) or for a reason the source does not tell is idle, which is no
alarm.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.causes import Excess, explained
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import CostSaid, Report, Verdict
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.timeline.programs import first_of_steps, programs
from stallscope.diagnose.timeline.timeline import timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CALL_CATEGORY, N_CATEGORIES, Category, Op
from stallscope.events.trace import Trace

_MARKS = (Op.SYNC, Op.COPY, Op.GRAPH_LAUNCH)
_CATEGORY_OF = CALL_CATEGORY | {Op.SYNC: Category.DEVICE, Op.STREAM_WAIT: Category.DEVICE}
_NO_ALARM = ("host_sleep", "network_wait", "blocked", "unknown", "driver", "launch_bound")
_NOTHING = 0.001  # of the time
_LEAST_MARKS = 3  # between which there are steps enough to compare
_LOADER = b"pt_data_worker"  # what torch.utils.data calls its worker processes


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
    """Whether nothing in a trace can be matched between ranks: calls only, or collectives of one rank with itself."""
    is_alone = (trace.collectives["nranks"] == 1).all()
    return bool(is_alone) and not len(trace.spans) and len(trace.calls) > 0


def report(trace: Trace, *, limits: Thresholds, usd_per_gpu_hour: float | None) -> Report:
    """The report on a trace for which is_single()."""
    verdicts: list[Verdict] = []
    benign: list[dict[str, object]] = []
    calls = outermost(trace.calls)
    by_rounds = _steps_of_rounds(trace)
    has_rounds = {(steps.node, steps.pid) for steps in by_rounds}
    by_calls = [one for one in steps_of(trace, calls) if (one.node, one.pid) not in has_rounds]
    all_steps = by_rounds + by_calls
    for steps in all_steps:
        found, remarks = _judged(trace, steps, limits, usd_per_gpu_hour)
        verdicts += found
        benign += remarks
    return Report(
        source=trace.source,
        looked_at=_looked_at(trace, all_steps),
        verdicts=[replace(verdict, summary=text.summary(verdict)) for verdict in verdicts],
        benign=benign + _first_calls(trace, calls),
    )


def outermost(calls: Array) -> Array:
    """The calls that no other call of their thread encloses, by thread and entry: a runtime call is seen again
    in the driver, and counts once. Open calls are left out.
    """
    done = calls[calls["duration_ns"] != UNKNOWN]
    order = np.lexsort((-done["duration_ns"], done["ts_ns"], done["tid"], done["pid"], done["node"]))
    rows = done[order]
    if not len(rows):
        return rows
    thread = _groups(rows, ("node", "pid", "tid"))
    ends = rows["ts_ns"] + rows["duration_ns"]
    # Threads are laid one after the other, so that one running maximum serves all.
    span = int(ends.max() - rows["ts_ns"].min()) + 1
    shifted = ends - rows["ts_ns"].min() + thread * span
    before = np.concatenate([[-1], np.maximum.accumulate(shifted)[:-1]])
    return rows[shifted > before]


def _groups(rows: Array, columns: tuple[str, ...]) -> Array:
    """Number of each row's group, counted along rows that are sorted by these columns."""
    changes = np.zeros(len(rows), bool)
    for column in columns:
        changes[1:] |= rows[column][1:] != rows[column][:-1]
    return np.cumsum(changes)


def steps_of(trace: Trace, calls: Array) -> Iterable[Steps]:
    """The steps of each thread that makes calls, where there are enough to compare. calls: the outermost ones."""
    if not len(calls):
        return
    thread = _groups(calls, ("node", "pid", "tid"))
    for number in range(int(thread[-1]) + 1):
        mine = calls[thread == number]
        marks = _marks(mine)
        if len(marks) > _LEAST_MARKS:
            yield _steps(trace, mine, marks)


def _steps_of_rounds(trace: Trace) -> list[Steps]:
    """The steps of the processes that make collectives with themselves, where those repeat and have a ledger."""
    if not len(trace.collectives):
        return []
    line = timeline(trace)
    first = first_of_steps(line, programs(line))
    found = []
    for process in range(line.n_processes):
        mine = first[(first >= line.first[process]) & (first < line.first[process + 1])]
        ts_ns, ledger_ns = line.rows["ts_ns"][mine], line.rows["ledger_ns"][mine]
        if len(mine) > _LEAST_MARKS and ledger_ns.any():
            node, pid = int(line.node[process]), int(line.pid[process])
            spent_ns = np.maximum(np.diff(ledger_ns, axis=0), 0).astype(np.float64)
            found.append(Steps(node, pid, pid, ts_ns[:-1], np.diff(ts_ns), spent_ns))
    return found


def _marks(calls: Array) -> Array:
    """Where steps begin: entries of the first kind of call that there is often enough."""
    for op in _MARKS:
        at = calls["ts_ns"][calls["op"] == op]
        if len(at) > _LEAST_MARKS:
            return at
    return np.array([], np.int64)


def _steps(trace: Trace, calls: Array, marks: Array) -> Steps:
    node, pid, tid = (int(calls[name][0]) for name in ("node", "pid", "tid"))
    spent = np.zeros((len(marks) - 1, N_CATEGORIES))
    for op, category in _CATEGORY_OF.items():
        mine = calls[calls["op"] == op]
        spent[:, category - 1] += _within(mine["ts_ns"], mine["duration_ns"], marks)
    off = trace.offcpu
    off = off[(off["node"] == node) & (off["pid"] == pid) & (off["tid"] == tid)]
    off = off[(off["duration_ns"] != UNKNOWN) & ~_is_inside(off, calls)]
    for category in np.unique(off["category"]):
        mine = off[off["category"] == category]
        spent[:, int(category) - 1] += _within(mine["ts_ns"], mine["duration_ns"], marks)
    length = np.diff(marks)
    spent[:, Category.ON_CPU - 1] += np.maximum(length - spent.sum(axis=1), 0)
    return Steps(node, pid, tid, marks[:-1], length, spent)


def _is_inside(rows: Array, calls: Array) -> Array:
    """Whether an interval begins inside one of the calls of the same thread: (n,) bool."""
    place = np.searchsorted(calls["ts_ns"], rows["ts_ns"], side="right") - 1
    ends = (calls["ts_ns"] + calls["duration_ns"])[np.maximum(place, 0)]
    return (place >= 0) & (rows["ts_ns"] < ends)


def _within(begin_ns: Array, duration_ns: Array, marks: Array) -> Array:
    """Time of intervals that do not overlap, between each two marks: (len(marks) - 1,)."""
    order = np.argsort(begin_ns)
    begin, end = begin_ns[order], (begin_ns + duration_ns)[order]
    whole = np.concatenate([[0], np.cumsum(end - begin)])
    place = np.searchsorted(begin, marks, side="right")
    last = np.maximum(place - 1, 0)
    beyond = np.where(place > 0, np.maximum(end[last] - marks, 0), 0) if len(end) else np.zeros(len(marks))
    return np.diff(whole[place] - beyond)


def _usual_ns(length_ns: Array) -> float:
    """The median of the better half; calls in a row make short steps, which together are next to nothing."""
    ordered = np.sort(length_ns)
    ordered = ordered[np.cumsum(ordered) > _NOTHING * ordered.sum()]
    return float(np.median(ordered[: (len(ordered) + 1) // 2]))


def _judged(
    trace: Trace, steps: Steps, limits: Thresholds, usd_per_gpu_hour: float | None
) -> tuple[list[Verdict], list[dict[str, object]]]:
    usual_ns = _usual_ns(steps.length_ns)
    is_late = steps.length_ns > limits.late_factor_alone * usual_ns + limits.min_late_ns
    late_ns = float(steps.length_ns[is_late].sum())
    if is_late.sum() < limits.min_late_steps or late_ns < limits.moving_time_share * steps.length_ns.sum():
        return [], []
    usual = np.median(steps.spent_ns[~is_late], axis=0) if not is_late.all() else 0.0
    ledger = (steps.spent_ns[is_late] - usual).sum(axis=0)
    loaders = _loaders(trace, steps)
    if loaders:
        for category in (Category.ON_CPU, Category.OTHER_OFF, Category.LOCK, Category.NET):
            ledger[Category.CHILD - 1] += max(ledger[category - 1], 0.0)
            ledger[category - 1] = 0.0
    excess = Excess(
        total_ns=float(np.maximum(ledger, 0).sum()),
        ledger_ns=ledger,
        n_steps=int(is_late.sum()),
        calls=_in_late(trace.calls, steps, is_late),
        offcpu=_in_late(trace.offcpu, steps, is_late),
        host=_in_late(trace.host_events, steps, is_late),
        symbols=trace.symbols,
    )
    causes = [
        replace(part, evidence=loaders) if part.cause.name == "input_starvation" else part
        for part in explained(excess, limits.cause_share)
    ]
    first = int(np.flatnonzero(is_late)[0])
    process = _process(trace, steps)
    in_calls = float(steps.spent_ns[is_late][:, _IN_CALLS].sum() / max(late_ns, 1))
    evidence: dict[str, object] = {
        "pid": steps.pid,
        "command": process[1],
        "n_late_steps": int(is_late.sum()),
        "n_steps": len(steps.length_ns),
        "step_ms_usual": round(usual_ns / 1e6, 3),
        "step_ms_late": round(float(np.median(steps.length_ns[is_late])) / 1e6, 3),
        "in_gpu_calls_share": round(in_calls, 4),
    }
    if not causes or causes[0].cause.name in _NO_ALARM:
        because = f", it {causes[0].title}" if causes else ""
        return [], [{"what": f"Process {steps.pid} left its GPU alone at times{because}", **evidence}]
    since = int(steps.begin_ns[first])
    lost_s = excess.total_ns / 1e9
    usd = None if usd_per_gpu_hour is None else lost_s / 3600 * usd_per_gpu_hour
    observed_h = float(steps.length_ns.sum()) / 3.6e12
    verdict = Verdict(
        kind="process",
        summary="",
        ranks=[process[0]] if process[0] >= 0 else [],
        nodes=[name] if (name := trace.nodes[steps.node]) else [],
        n_late_rounds=int(is_late.sum()),
        n_rounds=len(steps.length_ns),
        late_ms={
            "median": round(float(np.median(steps.length_ns[is_late]) - usual_ns) / 1e6, 3),
            "max": round(float(steps.length_ns.max() - usual_ns) / 1e6, 3),
        },
        since_ns=wall_ns(trace, steps.node, since),
        n_incidents=1 + int((np.diff(np.flatnonzero(is_late)) > 1).sum()),
        causes=causes,
        confidence=round(min(0.9, 0.6 + 0.05 * int(is_late.sum())) * min(1.0, causes[0].share / 0.8), 2),
        cost=CostSaid(
            round(lost_s, 3),
            None if usd is None else round(usd, 4),
            None if usd is None or not observed_h else round(usd / observed_h, 4),
            True,
        ),
        advice=causes[0].cause.advice(causes[0].evidence),
        evidence=evidence,
    )
    return [verdict], []


_IN_CALLS = [category - 1 for category in sorted(set(_CATEGORY_OF.values()))]


def _in_late(rows: Array, steps: Steps, is_late: Array) -> Array:
    """The thread's rows that begin in a late step, and those of the whole process (thread 0)."""
    is_own = np.isin(rows["tid"], (0, steps.tid))
    mine = rows[(rows["node"] == steps.node) & (rows["pid"] == steps.pid) & is_own]
    place = np.searchsorted(steps.begin_ns, mine["ts_ns"], side="right") - 1
    end_ns = steps.begin_ns[-1] + steps.length_ns[-1]
    return mine[(place >= 0) & (mine["ts_ns"] < end_ns) & is_late[np.maximum(place, 0)]]


def _loaders(trace: Trace, steps: Steps) -> dict[str, object]:
    """What the data loader's workers did meanwhile; empty where there are none, or they did not work."""
    rows = trace.processes
    workers = rows["pid"][(rows["node"] == steps.node) & np.char.startswith(rows["comm"], _LOADER)]
    shares = [share for pid in workers if (share := _cpu_share(trace, steps, int(pid))) is not None]
    if not shares or max(shares) < 0.5:
        return {}
    return {"n_loader_workers": len(workers), "loader_cpu_share": round(float(np.median(shares)), 2)}


def _cpu_share(trace: Trace, steps: Steps, pid: int) -> float | None:
    """Share of its accounted time that a process was on the CPU, during the steps; None without an account."""
    rows = trace.snapshots
    mine = rows[(rows["node"] == steps.node) & (rows["pid"] == pid)]
    mine = mine[mine["ts_ns"] >= steps.begin_ns[0] - 60 * 10**9]
    if len(mine) < 2:
        return None
    spent = mine["ledger_ns"][-1] - mine["ledger_ns"][0]
    return float(spent[Category.ON_CPU - 1] / max(spent.sum(), 1))


def _process(trace: Trace, steps: Steps) -> tuple[int, str]:
    """Rank (-1 unknown) and command of the process."""
    rows = trace.processes
    mine = rows[(rows["node"] == steps.node) & (rows["pid"] == steps.pid)]
    return (int(mine["rank"][0]), mine["comm"][0].decode("utf-8", "replace")) if len(mine) else (UNKNOWN, "")


def _first_calls(trace: Trace, calls: Array) -> list[dict[str, object]]:
    """First calls that took far longer than the later ones: libraries load and compile then."""
    said: list[dict[str, object]] = []
    for key in np.unique(calls[["node", "pid", "symbol"]]):
        mine = calls[calls[["node", "pid", "symbol"]] == key]
        later = np.median(mine["duration_ns"][1:]) if len(mine) > 3 else np.inf
        if mine["duration_ns"][0] > max(10 * later, 10e6) and mine["op"][0] in (Op.LAUNCH, Op.GRAPH_LAUNCH):
            said.append(
                {
                    "what": f"The first {trace.symbols[int(key['symbol'])]} of process {key['pid']} loaded its kernels",
                    "ms": round(float(mine["duration_ns"][0]) / 1e6, 1),
                    "later_ms": round(float(later) / 1e6, 3),
                }
            )
    return said


def _looked_at(trace: Trace, all_steps: list[Steps]) -> dict[str, object]:
    times = np.concatenate([trace.calls["ts_ns"], trace.offcpu["ts_ns"]])
    ends = np.concatenate(
        [rows["ts_ns"] + np.maximum(rows["duration_ns"], 0) for rows in (trace.calls, trace.offcpu)]
    )
    return {
        "n_ranks": len(np.unique(trace.calls[["node", "pid"]])),
        "n_nodes": len(trace.nodes),
        "n_communicators": len(np.unique(trace.collectives["comm_hash"])),
        "n_rounds": len(trace.collectives),
        "n_steps": sum(len(steps.length_ns) for steps in all_steps),
        "n_calls": len(trace.calls),
        "n_lost_records": sum(trace.lost.values()),
        "seconds": round(float(ends.max() - times.min()) / 1e9, 3) if len(times) else 0.0,
    }
