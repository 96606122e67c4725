"""Jobs that stood still before the capture began: no call was seen, only where each rank stands, from outside.

That tells less than a round that some have entered and others have not. A rank waits when one of its Python threads, or
its main thread, is inside NCCL or CUDA. Where all but one wait and that one stands elsewhere, it is likely the one they
wait for; in all other cases nobody is named. Nothing is said unless every rank has stood at the same place for as long
as a hang takes to be one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from stallscope.diagnose.processes import exit_reason
from stallscope.diagnose.timeline import user_frame
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Trace

_WAITS = re.compile(r"\((lib(nccl|cuda|cudart)[-.][^()]*)\)$")
_NATIVE = re.compile(r"^\S+ \([^()]+\)$")
_HIDES = re.compile(r"\((libtorch|libc10)[^()]*\)$")
"""Inside these a thread may wait for another one that waits."""


class Stands(Enum):
    WAITS = "waits for the GPU or NCCL"
    ELSEWHERE = "elsewhere"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class StillRank:
    """Where a rank stands. since_ns, until_ns: of the looks that found it at this place."""

    rank: int
    node: int
    pid: int
    since_ns: int
    until_ns: int
    stands: Stands
    frames: tuple[str, ...]


def is_for(trace: Trace) -> bool:
    """Whether a trace has no calls of ranks, but looks at where they stand."""
    if len(trace.collectives) or len(trace.spans) or not len(trace.positions):
        return False
    return not (trace.snapshots["n_collectives"] > 0).any()  # else this is a part of a longer trace


def still_ranks(trace: Trace) -> list[StillRank]:
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


def _of_rank(found: list[StillRank], rank: int) -> list[StillRank]:
    """One process of a rank; several where two wait, as of two jobs.

    Children have their rank's environment and libraries, too. Where some run Python, the others are helpers; of those
    that are left the rank is the one that waits, else the eldest.
    """
    mine = [one for one in found if one.rank == rank]
    mine = [one for one in mine if user_frame.in_python(one.frames)] or mine
    return [one for one in mine if one.stands is Stands.WAITS] or mine[:1]


def _rank(trace: Trace, node: int, pid: int, rank: int) -> StillRank:
    rows = trace.positions[(trace.positions["node"] == node) & (trace.positions["pid"] == pid)]
    looks = sorted(set(rows["ts_ns"].tolist()))
    stacks = [_main(rows[rows["ts_ns"] == ts_ns], pid) for ts_ns in looks]
    since = len(looks) - 1
    while since and _place(trace, stacks[since - 1]) == _place(trace, stacks[-1]):
        since -= 1
    newest = [trace.stacks.get(int(one["stack"]), ()) for one in rows[rows["ts_ns"] == looks[-1]]]
    frames = trace.stacks.get(stacks[-1], ())
    return StillRank(rank, node, pid, looks[since], looks[-1], _stands(frames, newest), frames)


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


def _stands(main: Sequence[str], threads: Sequence[Sequence[str]]) -> Stands:
    """main: frames of the main thread. threads: of all that were looked at."""
    if any(_WAITS.search(frame) for frames in threads for frame in frames):
        return Stands.WAITS
    is_seen_through = any(_NATIVE.match(frame) for frame in main)
    if not is_seen_through or any(_HIDES.search(frame) for frame in main):
        return Stands.UNKNOWN
    return Stands.ELSEWHERE
