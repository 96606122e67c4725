"""Jobs that stood still before the capture began: no call was seen, only where each rank stands, from outside.

That tells less than a round that some have entered and others have not. A rank waits when one of its Python threads, or
its main thread, is inside NCCL or CUDA. Where all but one wait and that one stands elsewhere, it is likely the one they
wait for; in all other cases nobody is named. Nothing is said unless every rank has stood at the same place for as long
as a hang takes to be one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from stallscope.diagnose.processes import exit_reason
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import CostSaid, Report, Verdict
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import user_frame
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.counted import counted
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CATEGORY_NAMES
from stallscope.events.trace import Trace

_WAITS = re.compile(r"\((lib(nccl|cuda|cudart)[-.][^()]*)\)$")
_NATIVE = re.compile(r"^\S+ \([^()]+\)$")
_HIDES = re.compile(r"\((libtorch|libc10)[^()]*\)$")
"""Inside these a thread may wait for another one that waits."""

_FEW = 3
_CONFIDENCE, _CONFIDENCE_OF_FEW = 0.6, 0.5


class _Stands(Enum):
    WAITS = "waits for the GPU or NCCL"
    ELSEWHERE = "elsewhere"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class _Rank:
    """Where a rank stands. since_ns, until_ns: of the looks that found it at this place."""

    rank: int
    node: int
    pid: int
    since_ns: int
    until_ns: int
    stands: _Stands
    frames: tuple[str, ...]


def is_for(trace: Trace) -> bool:
    """Whether a trace has no calls of ranks, but looks at where they stand."""
    if len(trace.collectives) or len(trace.spans) or not len(trace.positions):
        return False
    return not (trace.snapshots["n_collectives"] > 0).any()  # else this is a part of a longer trace


def report(trace: Trace, *, limits: Thresholds, usd_per_gpu_hour: float | None = None) -> Report | None:
    """The report on a trace for which is_for(); None where not every rank stands still."""
    ranks = _ranks(trace)
    if len(ranks) < 2 or len({one.rank for one in ranks}) < len(ranks):
        return None
    still_ns = min(one.until_ns for one in ranks) - max(one.since_ns for one in ranks)
    if still_ns < limits.hang_after_ns:
        return None
    verdict = _verdict(trace, ranks, still_ns, usd_per_gpu_hour)
    return Report(
        source=trace.source,
        looked_at=_looked_at(trace, ranks, still_ns),
        verdicts=[replace(verdict, summary=text.summary(verdict))],
    )


def nothing(trace: Trace) -> Report:
    """The report on a trace in which ranks were looked at and do not all stand still."""
    return Report(source=trace.source, looked_at=_looked_at(trace, _ranks(trace), 0), verdicts=[])


def _looked_at(trace: Trace, ranks: list[_Rank], still_ns: int) -> dict[str, object]:
    counts = dict.fromkeys(("n_communicators", "n_rounds", "n_steps"), 0)
    return {
        "n_ranks": len(ranks),
        "n_nodes": len({one.node for one in ranks}),
        **counts,
        "n_lost_records": sum(trace.lost.values()),
        "seconds": round(still_ns / 1e9, 3),
    }


def _ranks(trace: Trace) -> list[_Rank]:
    """The ranks that were alive at the end and have been looked at; where somebody has ended the whole job by signals,
    those that were alive before.
    """
    known = trace.processes[trace.processes["rank"] != UNKNOWN]
    alive = known[known["ended_ns"] == UNKNOWN]
    if not len(alive) and all(_was_killed(trace, int(one["node"]), int(one["pid"])) for one in known):
        alive = known
    found = [
        _rank(trace, int(one["node"]), int(one["pid"]), int(one["rank"]))
        for one in np.sort(alive, order=["ts_ns", "pid"])
        if ((trace.positions["node"] == one["node"]) & (trace.positions["pid"] == one["pid"])).any()
    ]
    return [one for rank in sorted({one.rank for one in found}) for one in _of_rank(found, rank)]


def _of_rank(found: list[_Rank], rank: int) -> list[_Rank]:
    """One process of a rank; several where two wait, as of two jobs.

    Children have their rank's environment and libraries, too. Where some run Python, the others are helpers; of those
    that are left the rank is the one that waits, else the eldest.
    """
    mine = [one for one in found if one.rank == rank]
    mine = [one for one in mine if user_frame.in_python(one.frames)] or mine
    return [one for one in mine if one.stands is _Stands.WAITS] or mine[:1]


def _rank(trace: Trace, node: int, pid: int, rank: int) -> _Rank:
    rows = trace.positions[(trace.positions["node"] == node) & (trace.positions["pid"] == pid)]
    looks = sorted(set(rows["ts_ns"].tolist()))
    stacks = [_main(rows[rows["ts_ns"] == ts_ns], pid) for ts_ns in looks]
    since = len(looks) - 1
    while since and _place(trace, stacks[since - 1]) == _place(trace, stacks[-1]):
        since -= 1
    newest = [trace.stacks.get(int(one["stack"]), ()) for one in rows[rows["ts_ns"] == looks[-1]]]
    frames = trace.stacks.get(stacks[-1], ())
    return _Rank(rank, node, pid, looks[since], looks[-1], _stands(frames, newest), frames)


def _was_killed(trace: Trace, node: int, pid: int) -> bool:
    return "ended_by" in exit_reason.end(trace.host_events, node, pid)


def _main(rows: Array, pid: int) -> int:
    """The stack of the main thread among the rows of one look."""
    mine = rows["stack"][rows["tid"] == pid]
    return int(mine[0]) if len(mine) else UNKNOWN


def _place(trace: Trace, stack: int) -> tuple[str, ...]:
    """Where a thread stands: one that waits by looking again and again is at other native frames each time."""
    frames = trace.stacks.get(stack, ())
    return tuple(user_frame.in_python(frames)) or frames


def _stands(main: Sequence[str], threads: Sequence[Sequence[str]]) -> _Stands:
    """main: frames of the main thread. threads: of all that were looked at."""
    if any(_WAITS.search(frame) for frames in threads for frame in frames):
        return _Stands.WAITS
    is_seen_through = any(_NATIVE.match(frame) for frame in main)
    if not is_seen_through or any(_HIDES.search(frame) for frame in main):
        return _Stands.UNKNOWN
    return _Stands.ELSEWHERE


def _verdict(trace: Trace, ranks: list[_Rank], still_ns: int, usd_per_gpu_hour: float | None) -> Verdict:
    apart = [one for one in ranks if one.stands is _Stands.ELSEWHERE]
    waiting = [one for one in ranks if one.stands is _Stands.WAITS]
    is_clear = len(apart) == 1 and len(waiting) == len(ranks) - 1
    gpu_seconds = len(waiting) * still_ns / 1e9
    usd = None if usd_per_gpu_hour is None else round(gpu_seconds / 3600 * usd_per_gpu_hour, 2)
    told = apart if is_clear else ranks
    return Verdict(
        kind="hang",
        summary="",
        ranks=[apart[0].rank] if is_clear else [],
        nodes=sorted({trace.nodes[one.node] for one in told}) if is_clear else [],
        since_ns=wall_ns(trace, ranks[0].node, max(one.since_ns for one in ranks)),
        n_incidents=1,
        confidence=(_CONFIDENCE if len(ranks) >= _FEW else _CONFIDENCE_OF_FEW) if is_clear else 0.3,
        victims=[one.rank for one in waiting],
        cost=CostSaid(round(gpu_seconds, 3), usd, None, is_lower_bound=True),
        advice=[
            f"Look at {user_frame.in_own_code(apart[0].frames)} first."
            if is_clear
            else "Compare where the ranks stand; start the agent before the job, to see which round they hang in."
        ],
        abstained_because=_why_likely(apart[0]) if is_clear else _why_nobody(ranks, apart, waiting),
        evidence={
            "captured_late": True,
            "waited_s": round(still_ns / 1e9, 1),
            "n_ranks": len(ranks),
            "doing": [_doing(trace, one) for one in told],
        },
    )


def _why_likely(apart: _Rank) -> str:
    return (
        f"rank {apart.rank} alone stands outside NCCL and CUDA; whether the others wait for it was not seen"
    )


def _why_nobody(ranks: list[_Rank], apart: list[_Rank], waiting: list[_Rank]) -> str:
    if len(waiting) == len(ranks):
        return "all wait for the GPU or NCCL"
    unknown = len(ranks) - len(apart) - len(waiting)
    parts = [
        (len(waiting), "wait for the GPU or NCCL"),
        (len(apart), "elsewhere"),
        (unknown, "not to be told"),
    ]
    return "of " + counted(len(ranks), "rank") + ": " + ", ".join(f"{n} {what}" for n, what in parts if n)


def _doing(trace: Trace, one: _Rank) -> dict[str, object]:
    told: dict[str, object] = {"rank": one.rank, "is_alive": True, "pid": one.pid, "stands": one.stands.value}
    mine = trace.snapshots[(trace.snapshots["node"] == one.node) & (trace.snapshots["pid"] == one.pid)]
    if len(mine):
        state = mine[mine["ts_ns"].argmax()]
        if state["category"]:
            told["state"] = CATEGORY_NAMES[int(state["category"]) - 1]
        if state["syscall_nr"] != UNKNOWN:
            told["syscall_nr"] = int(state["syscall_nr"])
    if one.frames:
        told["at"], told["stack"] = user_frame.in_own_code(one.frames), list(one.frames)
    return told
