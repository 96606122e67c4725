"""Jobs that hung before the capture began: no call was recorded, only the stacks of each rank, from outside.

Stacks are weaker evidence than a round that only some ranks have entered. A rank waits when one of its Python threads,
or its main thread, is inside NCCL or CUDA. If all ranks but one wait, the other ranks likely wait for that rank. In all
other cases no rank is named. A verdict requires that every rank was at the same location for the time after which a
job counts as hung.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from stallscope.diagnose.processes import exit_reason
from stallscope.diagnose.timeline import user_frame
from stallscope.events.layout import UNKNOWN, Array, process_keys
from stallscope.events.trace import Trace

_WAITS = re.compile(r"\((lib(nccl|cuda|cudart)[-.][^()]*)\)$")
_NATIVE = re.compile(r"^\S+ \([^()]+\)$")
_HIDES = re.compile(r"\((libtorch|libc10)[^()]*\)$")
"""Inside these libraries a thread may wait for another thread that waits."""


class RankState(Enum):
    WAITS = "waits for the GPU or NCCL"
    ELSEWHERE = "elsewhere"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class StillRank:
    """The location of a rank. since_ns, until_ns: of the samples with the rank at this location."""

    rank: int
    node: int
    pid: int
    since_ns: int
    until_ns: int
    state: RankState
    frames: tuple[str, ...]


def is_for(trace: Trace) -> bool:
    """Whether a trace has no calls of ranks, but samples of their stacks. The processes of engines are not ranks."""
    is_engine = np.isin(process_keys(trace.positions), process_keys(trace.servers))
    if len(trace.collectives) or len(trace.spans) or is_engine.all():
        return False
    return not (trace.snapshots["n_collectives"] > 0).any()  # otherwise this is a part of a longer trace


def still_ranks(trace: Trace) -> list[StillRank]:
    """The ranks that were alive at the end and were sampled; if signals ended the whole job, the ranks that were alive
    before.
    """
    known = trace.processes[trace.processes["rank"] != UNKNOWN]
    alive = known[known["ended_ns"] == UNKNOWN]
    if not len(alive) and all(_was_killed(trace, int(row["node"]), int(row["pid"])) for row in known):
        alive = known
    processes = [
        _rank(trace, int(row["node"]), int(row["pid"]), int(row["rank"]))
        for row in np.sort(alive, order=["ts_ns", "pid"])
        if ((trace.positions["node"] == row["node"]) & (trace.positions["pid"] == row["pid"])).any()
    ]
    ranks = sorted({process.rank for process in processes})
    return [process for rank in ranks for process in _of_rank(processes, rank)]


def _of_rank(processes: list[StillRank], rank: int) -> list[StillRank]:
    """The process of a rank; several processes if two wait, as in two jobs.

    Child processes inherit the environment and libraries of their rank. If some processes run Python, the others are
    helpers. Among the remaining processes the rank is the process that waits, otherwise the oldest process.
    """
    of_rank = [process for process in processes if process.rank == rank]
    of_rank = [process for process in of_rank if user_frame.in_python(process.frames)] or of_rank
    return [process for process in of_rank if process.state is RankState.WAITS] or of_rank[:1]


def _rank(trace: Trace, node: int, pid: int, rank: int) -> StillRank:
    rows = trace.positions[(trace.positions["node"] == node) & (trace.positions["pid"] == pid)]
    sample_times = sorted(set(rows["ts_ns"].tolist()))
    stacks = [_main(rows[rows["ts_ns"] == ts_ns], pid) for ts_ns in sample_times]
    since = len(sample_times) - 1
    while since and _location(trace, stacks[since - 1]) == _location(trace, stacks[-1]):
        since -= 1
    newest = [trace.stacks.get(int(row["stack"]), ()) for row in rows[rows["ts_ns"] == sample_times[-1]]]
    frames = trace.stacks.get(stacks[-1], ())
    return StillRank(rank, node, pid, sample_times[since], sample_times[-1], _state(frames, newest), frames)


def _was_killed(trace: Trace, node: int, pid: int) -> bool:
    return exit_reason.end(trace.host_events, node, pid).ended_by is not None


def _main(rows: Array, pid: int) -> int:
    """The stack of the main thread among the rows of one sample time."""
    stacks = rows["stack"][rows["tid"] == pid]
    return int(stacks[0]) if len(stacks) else UNKNOWN


def _location(trace: Trace, stack: int) -> tuple[str, ...]:
    """The location of a thread, by its Python frames: a thread that polls is in different native frames each time."""
    frames = trace.stacks.get(stack, ())
    return tuple(user_frame.in_python(frames)) or frames


def _state(main: Sequence[str], threads: Sequence[Sequence[str]]) -> RankState:
    """main: frames of the main thread. threads: of all sampled threads."""
    if any(_WAITS.search(frame) for frames in threads for frame in frames):
        return RankState.WAITS
    is_readable = any(_NATIVE.match(frame) for frame in main)
    if not is_readable or any(_HIDES.search(frame) for frame in main):
        return RankState.UNKNOWN
    return RankState.ELSEWHERE
