"""All arrivals, sorted by process and time, each with the interval that leads up to it.

The interval before an arrival began at the process's previous arrival, on any communicator. Its self time is its
length minus the waits in it. Differences of one process's clock need no other clock, so self time is exact
whatever the clocks of the hosts do.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.groups import numbered, order_of
from stallscope.diagnose.sequences import matched
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, CollectiveFlag, Op
from stallscope.events.trace import Trace

_MAY_WAIT_FOR_GPU = (Category.WAIT_GPU, Category.DEVICE, Category.LAUNCH, Category.COPY, Category.ALLOC)
"""Besides synchronise calls: a blocking copy or a free waits for what was enqueued before it, a launch on a full
queue for room."""


@dataclass(frozen=True)
class Timeline:
    """One row per arrival, sorted by process, then time; `n` rows, `p` processes.

    rows: the collectives (n,). process: int64 (n,), number of the process. is_first: bool (n,), the process's
    first arrival: it has no interval. is_whole: bool (n,), no record was lost within the interval.
    interval_ns, wait_ns, self_ns: int64 (n,), length of the interval, its waits, and the rest.
    host_ns: int64 (n,), the interval without any call that can wait for the GPU: what the host did itself.
    comm: int64 (n,), number of the communicator; p2p pairs are numbered like communicators of their own.
    member: int64 (n,), the process's place among those of the communicator.
    is_p2p: bool (n,). role: int64 (n,), the communicator's place in its process's program.
    node, pid, rank: int64 (p,) of the processes; ranks as the job numbers them, or the order of appearance.
    comm_hash: uint64 by communicator number.
    """

    rows: Array
    process: Array
    is_first: Array
    is_whole: Array
    interval_ns: Array
    wait_ns: Array
    self_ns: Array
    host_ns: Array
    comm: Array
    member: Array
    is_p2p: Array
    role: Array
    node: Array
    pid: Array
    rank: Array
    comm_hash: Array

    @property
    def n_processes(self) -> int:
        return len(self.pid)

    @property
    def has_ledger(self) -> bool:
        return bool(len(self.rows)) and not bool((self.rows["flags"] & CollectiveFlag.NO_LEDGER).all())


def timeline(trace: Trace, *, is_numbered: bool = False) -> Timeline:
    """The timeline of a trace; empty when it holds no collectives.

    is_numbered: rounds of ranks that were captured late have been put right before.
    """
    rows = trace.collectives
    process, n_processes = numbered(rows["node"], rows["pid"])
    node, pid = np.zeros(n_processes, np.int64), np.zeros(n_processes, np.int64)
    node[process], pid[process] = rows["node"], rows["pid"]
    order = _by_process_and_time(process, rows["ts_ns"], n_processes)
    rows, process = rows[order], process[order]
    rows = rows if is_numbered else matched(rows, process, trace.clocks)
    is_first = np.ones(len(rows), bool)
    is_first[1:] = process[1:] != process[:-1]
    interval_ns = np.diff(rows["ts_ns"], prepend=rows["ts_ns"][:1])
    interval_ns[is_first] = 0
    wait_ns = _spent_ns(rows, is_first, Category.WAIT_GPU)
    in_gpu_calls_ns = _spent_ns(rows, is_first, *_MAY_WAIT_FOR_GPU)
    comm, is_p2p, comm_hash, whole = _communicators(rows)
    return Timeline(
        rows=rows,
        process=process,
        is_first=is_first,
        is_whole=~is_first & ~_after_gap(rows, process, comm) & ~_begins_anew(rows, is_first),
        interval_ns=interval_ns,
        wait_ns=np.minimum(wait_ns, interval_ns),
        self_ns=np.maximum(interval_ns - wait_ns, 0),
        host_ns=np.maximum(interval_ns - in_gpu_calls_ns, 0),
        comm=comm,
        member=_members(comm, process),
        is_p2p=is_p2p,
        role=_roles(rows, process, whole),
        node=node,
        pid=pid,
        rank=_ranks(trace, node, pid),
        comm_hash=comm_hash,
    )


def _by_process_and_time(process: Array, ts_ns: Array, n_processes: int) -> Array:
    """The order of the rows by process, then time; quick when they come in order of time already."""
    order = order_of(process, n_processes)
    ordered, owner = ts_ns[order], process[order]
    if ((np.diff(ordered) < 0) & (np.diff(owner) == 0)).any():
        return np.lexsort((ts_ns, process))
    return order


def _members(comm: Array, process: Array) -> Array:
    """Place of each row's process among the processes of its communicator: int64 (n,)."""
    pair, n_pairs = numbered(comm, process)
    comm_of_pair = np.zeros(n_pairs, np.int64)
    comm_of_pair[pair] = comm
    first = np.searchsorted(comm_of_pair, comm_of_pair)
    return (np.arange(n_pairs) - first)[pair]


def _spent_ns(rows: Array, is_first: Array, *categories: Category) -> Array:
    """Time in some ledger categories within each interval: int64 (n,)."""
    total = sum(
        (rows["ledger_ns"][:, category - 1] for category in categories), np.zeros(len(rows), np.int64)
    )
    spent = np.diff(total, prepend=total[:1])
    return np.where(is_first, 0, np.maximum(spent, 0))


def _communicators(rows: Array) -> tuple[Array, Array, Array, Array]:
    """Number of the communicator of each row, whether it is point-to-point, the hashes by number, and a number that
    all point-to-point pairs of one communicator share with its collectives.

    Point-to-point calls match per (communicator, source, destination).
    """
    is_p2p = np.isin(rows["op"], (Op.SEND, Op.RECV))
    whole, _ = numbered(rows["comm_hash"])
    if is_p2p.any():
        own, peer = rows["comm_rank"].astype(np.int64), rows["peer_rank"].astype(np.int64)
        is_send = rows["op"] == Op.SEND
        source = np.where(is_p2p, np.where(is_send, own, peer), UNKNOWN)
        destination = np.where(is_p2p, np.where(is_send, peer, own), UNKNOWN)
        comm, n_comms = numbered(whole, source, destination)
    else:
        comm, n_comms = whole, int(whole.max(initial=-1)) + 1
    hashes = np.zeros(n_comms, np.uint64)
    hashes[comm] = rows["comm_hash"]
    return comm, is_p2p, hashes, whole


def _after_gap(rows: Array, process: Array, comm: Array) -> Array:
    """Whether a record of the same process and communicator is missing right before each row."""
    pair, n_pairs = numbered(process, comm)
    order = order_of(pair, n_pairs)
    seq = rows["seq"][order]
    same = np.diff(pair[order]) == 0
    gap = np.zeros(len(rows), bool)
    if (same & (np.diff(seq) < 0)).any():
        order = np.lexsort((rows["seq"], pair))
        seq, same = rows["seq"][order], np.diff(pair[order]) == 0
    gap[order[1:]] = same & (np.diff(seq) > 1)
    return gap


def _begins_anew(rows: Array, is_first: Array) -> Array:
    """Whether the running sums of a row count from another moment than those of the row before: bool (n,).

    So it is where an agent was started anew.
    """
    anew = np.zeros(len(rows), bool)
    late = np.flatnonzero((rows["flags"] & CollectiveFlag.LATE_ATTACH > 0) & ~is_first)
    anew[late] = (rows["ledger_ns"][late] < rows["ledger_ns"][late - 1]).any(axis=1)
    return anew


def _roles(rows: Array, process: Array, comm_of_hash: Array) -> Array:
    """The place of each row's communicator in its process's program: (size, n-th of that size by first use).

    comm_of_hash: int64 (n,), number of the communicator, the same for all its point-to-point pairs.
    """
    pair, n_pairs = numbered(process, comm_of_hash)
    if not n_pairs:
        return np.zeros(0, np.int64)
    first_row = np.full(n_pairs, len(rows))
    np.minimum.at(first_row, pair, np.arange(len(rows)))
    owner, nranks = process[first_row], rows["nranks"][first_row].astype(np.int64)
    order = np.lexsort((first_row, nranks, owner))
    begins = np.ones(n_pairs, bool)
    begins[1:] = (np.diff(owner[order]) != 0) | (np.diff(nranks[order]) != 0)
    start = np.maximum.accumulate(np.where(begins, np.arange(n_pairs), 0))
    ordinal = np.zeros(n_pairs, np.int64)
    ordinal[order] = np.arange(n_pairs) - start
    role, _ = numbered(nranks, ordinal)
    return role[pair]


def _ranks(trace: Trace, node: Array, pid: Array) -> Array:
    """The job's own numbers of the processes: int64 (p,).

    As their launcher told them; where it did not tell all (processes that a parent forked, say), as they are
    numbered in the largest communicator that all are in, when that contradicts nothing told; else in order.
    """
    told = {
        (int(row["node"]), int(row["pid"])): int(row["rank"])
        for row in trace.processes
        if row["rank"] != UNKNOWN
    }
    who = list(zip(node.tolist(), pid.tolist(), strict=True))
    ranks = np.array([told.get(one, UNKNOWN) for one in who], np.int64)
    is_known = ranks != UNKNOWN
    has_twins = len(np.unique(ranks[is_known])) < is_known.sum()
    if is_known.all() and not has_twins:
        return ranks
    numbered_in = _ranks_in_largest(trace, who)
    if numbered_in is not None and (has_twins or (numbered_in == ranks)[is_known].all()):
        return numbered_in
    return np.arange(len(ranks))


def _ranks_in_largest(trace: Trace, who: list[tuple[int, int]]) -> Array | None:
    """Each process's rank in the largest communicator that all of them are in; None without such a one."""
    columns = ["node", "pid", "comm_hash", "comm_rank", "nranks"]
    rows = trace.collectives
    number, n = numbered(rows["node"], rows["pid"], rows["comm_hash"])
    one_of_each = np.zeros(n, np.int64)
    one_of_each[number] = np.arange(len(rows))
    seen = np.concatenate([trace.communicators[columns], rows[columns][one_of_each]])
    seen = seen[(seen["comm_hash"] != 0) & (seen["comm_rank"] != UNKNOWN)]
    for nranks in np.unique(seen["nranks"])[::-1].tolist():
        if nranks < len(who):
            return None
        for comm_hash in np.unique(seen["comm_hash"][seen["nranks"] == nranks]).tolist():
            here = seen[(seen["comm_hash"] == comm_hash) & (seen["nranks"] == nranks)]
            rank_of = {(int(row["node"]), int(row["pid"])): int(row["comm_rank"]) for row in here}
            found = [rank_of.get(one, UNKNOWN) for one in who]
            if UNKNOWN not in found and len(set(found)) == len(found):
                return np.array(found, np.int64)
    return None
