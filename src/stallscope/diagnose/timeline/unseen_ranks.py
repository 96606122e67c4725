"""Members of communicators that have never made a call on them: known from the communicators alone.

A rank may stay behind before its first collective: it loads data, compiles, or has died meanwhile. The timeline has
no rows of such a process, or none on that communicator; the others wait in the communicator's first round.
"""

from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Trace

Who = tuple[int, int]
"""A process: node and pid."""


@dataclass(frozen=True)
class Absent:
    """line: the timeline with the processes that made no call at all put last: they have no rows. members: by number
    of the communicator, int64 numbers of the processes that made none on it. n_unseen: by number of the communicator,
    how many of its ranks no record names: they are on machines that were not traced.
    """

    line: Timeline
    members: dict[int, Array]
    n_unseen: dict[int, int]


def absent(line: Timeline, trace: Trace) -> Absent:
    """Who of the members has made no call, for communicators whose first round was seen."""
    first_seq = np.full(len(line.comm_hash), np.iinfo(np.int64).max)
    np.minimum.at(first_seq, line.calls.comm, line.rows["seq"][line.calls.first_row])
    is_whole = ~line.is_p2p[line.calls.first_row] & (line.rows["comm_hash"][line.calls.first_row] != 0)
    known = np.unique(line.calls.comm[is_whole & (first_seq[line.calls.comm] == 0)])
    comm_of = {int(line.comm_hash[comm]): comm for comm in known.tolist()}
    number: dict[Who, int] = {
        who: i for i, who in enumerate(zip(line.node.tolist(), line.pid.tolist(), strict=True))
    }
    ranks = _Ranks(line, trace)
    came = set(zip(line.calls.comm.tolist(), line.calls.process.tolist(), strict=True))
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
        who = node, pid
        if who not in number and (rank := ranks.of(who, comm_rank)) != UNKNOWN:
            number[who] = line.n_processes + len(extra)
            extra.append((node, pid, rank))
        process = number.get(who, UNKNOWN)
        if process != UNKNOWN and (comm, process) not in came:
            members.setdefault(comm, []).append(process)
    found = {comm: np.unique(np.array(here, np.int64)) for comm, here in members.items()}
    n_here = {comm: int(line.n_members[comm]) + len(found.get(comm, ())) for comm in n_ranks}
    return Absent(
        line=_wider(line, extra),
        members=found,
        n_unseen={comm: n - n_here[comm] for comm, n in n_ranks.items() if n > n_here[comm]},
    )


def n_unseen(line: Timeline, trace: Trace) -> int:
    """Ranks of the job that no record names, at least: those that the communicator which lacks most is short of.

    A communicator has several numbers on the timeline where pairs of its ranks send to each other.
    """
    comm_hash, comm = np.unique(line.comm_hash, return_inverse=True)
    n_ranks = np.zeros(len(comm_hash), np.int64)
    np.maximum.at(n_ranks, comm[line.calls.comm], line.rows["nranks"][line.calls.first_row])
    member = np.unique(comm[line.calls.comm] * line.n_processes + line.calls.process)
    n_lacking = n_ranks - np.bincount(member // max(line.n_processes, 1), minlength=len(comm_hash))
    n_lacking[comm_hash == 0] = 0
    if n_lacking.max(initial=0) <= 0:
        return 0
    number = {int(comm_hash[i]): i for i in np.flatnonzero(n_lacking > 0).tolist()}
    node, pid = line.node[member % line.n_processes], line.pid[member % line.n_processes]
    came = set(zip((member // line.n_processes).tolist(), node.tolist(), pid.tolist(), strict=True))
    silent = {
        (number[one], node, pid)
        for node, pid, one in trace.communicators[["node", "pid", "comm_hash"]].tolist()
        if one in number
    } - came
    np.subtract.at(n_lacking, [one for one, _, _ in silent], 1)
    return int(n_lacking.max(initial=0))


class _Ranks:
    """Ranks for processes that are not on the timeline: as told, else as in the communicator; each once."""

    def __init__(self, line: Timeline, trace: Trace) -> None:
        self._taken = set(line.rank.tolist())
        self._told = trace.told_ranks()

    def of(self, who: Who, comm_rank: int) -> int:
        for rank in (self._told.get(who, UNKNOWN), comm_rank):
            if rank != UNKNOWN and rank not in self._taken:
                self._taken.add(rank)
                return rank
        return UNKNOWN


def _wider(line: Timeline, extra: list[tuple[int, int, int]]) -> Timeline:
    if not extra:
        return line
    node, pid, rank = np.array(extra, np.int64).T
    return replace(
        line,
        node=np.concatenate([line.node, node]),
        pid=np.concatenate([line.pid, pid]),
        rank=np.concatenate([line.rank, rank]),
        first=np.concatenate([line.first, np.full(len(extra), line.first[-1])]),
    )
