"""Members of communicators without a call on them: known from the communicator records only.

A rank may be late for its first collective: it loads data, compiles, or has died. The timeline has no rows of such a
process, or none on that communicator; the others wait in the communicator's first round.
"""

from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Trace

Process = tuple[int, int]
"""A process: node and pid."""


@dataclass(frozen=True)
class AbsentRanks:
    """timeline: the timeline, with the processes without any call appended: they have no rows. members: by number of
    the communicator, int64 numbers of the processes without a call on it. n_unseen: by number of the communicator, how
    many of its ranks have no record: they are on machines that were not traced.
    """

    timeline: Timeline
    members: dict[int, Array]
    n_unseen: dict[int, int]


def absent(timeline: Timeline, trace: Trace) -> AbsentRanks:
    """The members that have made no call, for communicators whose first round was recorded."""
    first_seq = np.full(len(timeline.comm_hash), np.iinfo(np.int64).max)
    np.minimum.at(first_seq, timeline.calls.comm, timeline.rows["seq"][timeline.calls.first_row])
    is_whole = ~timeline.is_p2p[timeline.calls.first_row] & (
        timeline.rows["comm_hash"][timeline.calls.first_row] != 0
    )
    known = np.unique(timeline.calls.comm[is_whole & (first_seq[timeline.calls.comm] == 0)])
    comm_of = {int(timeline.comm_hash[comm]): comm for comm in known.tolist()}
    number: dict[Process, int] = {
        process: i
        for i, process in enumerate(zip(timeline.node.tolist(), timeline.pid.tolist(), strict=True))
    }
    ranks = _Ranks(timeline, trace)
    present = set(zip(timeline.calls.comm.tolist(), timeline.calls.process.tolist(), strict=True))
    members: dict[int, list[int]] = {}
    n_ranks: dict[int, int] = {}
    extra: list[tuple[int, int, int]] = []
    for node, pid, comm_hash, comm_rank, nranks in trace.communicators[
        ["node", "pid", "comm_hash", "comm_rank", "nranks"]
    ].tolist():
        comm = comm_of.get(comm_hash)
        if comm is None:
            continue
        n_ranks[comm] = max(n_ranks.get(comm, 0), nranks)
        process = node, pid
        if process not in number and (rank := ranks.of(process, comm_rank)) != UNKNOWN:
            number[process] = timeline.n_processes + len(extra)
            extra.append((node, pid, rank))
        member = number.get(process, UNKNOWN)
        if member != UNKNOWN and (comm, member) not in present:
            members.setdefault(comm, []).append(member)
    silent_members = {comm: np.unique(np.array(here, np.int64)) for comm, here in members.items()}
    n_here = {comm: int(timeline.n_members[comm]) + len(silent_members.get(comm, ())) for comm in n_ranks}
    return AbsentRanks(
        timeline=_wider(timeline, extra),
        members=silent_members,
        n_unseen={comm: n - n_here[comm] for comm, n in n_ranks.items() if n > n_here[comm]},
    )


def n_unseen(timeline: Timeline, trace: Trace) -> int:
    """The least number of ranks of the job without a record: the most ranks that a communicator lacks.

    A communicator has several numbers on the timeline if pairs of its ranks send to each other.
    """
    comm_hash, comm = np.unique(timeline.comm_hash, return_inverse=True)
    n_ranks = np.zeros(len(comm_hash), np.int64)
    np.maximum.at(n_ranks, comm[timeline.calls.comm], timeline.rows["nranks"][timeline.calls.first_row])
    member = np.unique(comm[timeline.calls.comm] * timeline.n_processes + timeline.calls.process)
    n_lacking = n_ranks - np.bincount(member // max(timeline.n_processes, 1), minlength=len(comm_hash))
    n_lacking[comm_hash == 0] = 0
    if n_lacking.max(initial=0) <= 0:
        return 0
    number = {int(comm_hash[i]): i for i in np.flatnonzero(n_lacking > 0).tolist()}
    node, pid = timeline.node[member % timeline.n_processes], timeline.pid[member % timeline.n_processes]
    with_rows = set(zip((member // timeline.n_processes).tolist(), node.tolist(), pid.tolist(), strict=True))
    silent = {
        (number[entry], node, pid)
        for node, pid, entry in trace.communicators[["node", "pid", "comm_hash"]].tolist()
        if entry in number
    } - with_rows
    np.subtract.at(n_lacking, [entry for entry, _, _ in silent], 1)
    return int(n_lacking.max(initial=0))


class _Ranks:
    """Unique ranks for processes that are not on the timeline: from the launcher, otherwise from the communicator."""

    def __init__(self, timeline: Timeline, trace: Trace) -> None:
        self._taken = set(timeline.rank.tolist())
        self._provided = trace.launcher_ranks()

    def of(self, process: Process, comm_rank: int) -> int:
        for rank in (self._provided.get(process, UNKNOWN), comm_rank):
            if rank != UNKNOWN and rank not in self._taken:
                self._taken.add(rank)
                return rank
        return UNKNOWN


def _wider(timeline: Timeline, extra: list[tuple[int, int, int]]) -> Timeline:
    if not extra:
        return timeline
    node, pid, rank = np.array(extra, np.int64).T
    return replace(
        timeline,
        node=np.concatenate([timeline.node, node]),
        pid=np.concatenate([timeline.pid, pid]),
        rank=np.concatenate([timeline.rank, rank]),
        first=np.concatenate([timeline.first, np.full(len(extra), timeline.first[-1])]),
    )
