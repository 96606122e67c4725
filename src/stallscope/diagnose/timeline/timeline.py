"""All arrivals, sorted by process and time, each with the interval that leads up to it.

The interval before an arrival began at the process's previous arrival, on any communicator. Its self time is its
length minus the waits in it. Differences of one process's clock need no other clock, so self time is exact
regardless of the clocks of the hosts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered, order_of, positions_in_run
from stallscope.diagnose.arrays.parallel import ROWS_AT_ONCE, both, in_pieces
from stallscope.diagnose.arrays.round_tables import Tables
from stallscope.diagnose.arrays.row_order import RowsInOrder, flagged, in_order, taken
from stallscope.diagnose.timeline.late_attach import renumbered
from stallscope.diagnose.timeline.releases import released
from stallscope.events.columns import Columns, is_one_value
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, CollectiveFlag, Op
from stallscope.events.trace import Trace

_MAY_WAIT_FOR_GPU = (Category.WAIT_GPU, Category.DEVICE, Category.LAUNCH, Category.COPY, Category.ALLOC)
"""Synchronise calls; a blocking copy or a free, which wait for the work enqueued before them; a launch, which waits
for room in a full queue."""

_COLUMNS = (
    *("ts_ns", "comm_hash", "comm_rank", "peer_rank", "nranks", "seq"),
    *("op", "datatype", "count", "flags", "wait_leave_ns", "gpu_start_ns", "gpu_end_ns"),
)
NO_WAIT_NS = 10_000
"""Shorter calls are not waits."""

_SPARSE = 4  # largest range of round numbers, as a multiple of the rounds that occur


@dataclass(frozen=True)
class Membership:
    """Processes in communicators; `m` of them, in order of process, then communicator.

    pair: int64 (n,), the membership of each row. process, comm: int64 (m,). slot: int64 (m,), the index of the process
    in the communicator. first_row: int64 (m,).
    """

    pair: Array
    process: Array
    comm: Array
    slot: Array
    first_row: Array

    @staticmethod
    def of(process: Array, comm: Array) -> "Membership":
        pair, n_pairs = numbered(process, comm)
        first_row = np.zeros(n_pairs, np.int64)
        first_row[pair[::-1]] = np.arange(len(pair))[::-1]  # the last assignment wins
        comm_of, slot = comm[first_row], np.zeros(n_pairs, np.int64)
        order = np.argsort(comm_of, kind="stable")
        slot[order] = positions_in_run(comm_of[order])
        return Membership(pair, process[first_row], comm_of, slot, first_row)


@dataclass(frozen=True)
class Timeline:
    """One row per arrival, sorted by process, then time; `n` rows, `p` processes.

    rows: the collectives (n,). ts_ns: int64 (n,), arrivals, each on its node's clock. process: int64 (n,), number of
    the process. is_first: bool (n,), the process's first arrival: it has no interval. is_whole: bool (n,), no record
    that another process has was lost within the interval.
    wait_ns: int64 (n,), the waits in the interval.
    host_ns: int64 (n,), the interval without calls that can wait for the GPU: the host's own work.
    comm: int64 (n,), number of the communicator; p2p pairs are numbered like communicators of their own.
    is_p2p: bool (n,). role: (n,), the communicator's role in its process's program.
    round: int64 (n,), number of the round, in order of the communicators; meetings: the rounds laid out as tables.
    calls: the processes in communicators.
    node, pid, rank: int64 (p,) of the processes; ranks as the job numbers them, or the order of appearance.
    first: int64 (p + 1,), where each process's rows begin.
    comm_hash: uint64, and n_members: int64, by communicator number.
    """

    rows: RowsInOrder
    ts_ns: Array
    process: Array
    is_first: Array
    is_whole: Array
    wait_ns: Array
    host_ns: Array
    comm: Array
    is_p2p: Array
    role: Array
    round: Array
    n_rounds: int
    meetings: Tables
    calls: Membership
    node: Array
    pid: Array
    rank: Array
    first: Array
    comm_hash: Array
    n_members: Array

    @property
    def n_processes(self) -> int:
        return len(self.pid)

    @property
    def interval_ns(self) -> Array:
        """The length of each row's interval: int64 (n,). Computed at each access."""
        return _increase(self.ts_ns, self.first)

    @property
    def in_gpu_calls_ns(self) -> Array:
        """The interval minus the host's own work: int64 (n,). Computed at each access."""
        spent = self.interval_ns
        spent -= self.host_ns
        return spent

    @property
    def self_ns(self) -> Array:
        """The interval minus its waits: int64 (n,). Computed at each access."""
        return self.interval_ns - self.wait_ns

    @cached_property
    def comm_of_round(self) -> Array:
        """Number of the communicator of each round: int64 (n_rounds,)."""
        out = np.zeros(self.n_rounds, np.int64)
        out[self.round] = self.comm
        return out

    @cached_property
    def releases(self) -> tuple[Array, Array]:
        """The first release of each row's process from a wait after that arrival, int64 (n,), UNKNOWN if none was
        recorded; and whether the release was before the next arrival, bool (n,).
        """
        return released(self.ts_ns, self.rows["wait_leave_ns"], self.first)


def timeline_of(trace: Trace, *, is_numbered: bool = False) -> Timeline:
    """The timeline of a trace; empty when it holds no collectives.

    is_numbered: the rounds of ranks attached late are already corrected.
    """
    keys = in_order(trace.collectives, None, ("node", "pid", "ts_ns"))
    order, first = by_process_and_time(**keys)
    process = np.repeat(np.arange(len(first) - 1), np.diff(first))
    rows, waited, may_wait = _rows(trace, order, process, is_numbered=is_numbered)
    is_first = np.zeros(len(rows), bool)
    is_first[first[:-1]] = True
    comm, is_p2p, comm_hash, whole = _communicators(rows)
    (wait_ns, host_ns), (number, n_rounds) = both(
        lambda: _spent(rows["ts_ns"], waited, may_wait, first),
        lambda: numbered(comm, rows["seq"]),
        n=len(rows),
    )
    calls = Membership.of(process, comm)
    members = Membership.of(process, whole) if whole is not comm else calls
    sizes = rows["nranks"][members.first_row]
    one_each = rows.table[rows.at(members.first_row)]
    node, pid = (rows.table[name][rows.at(first[:-1])].astype(np.int64) for name in ("node", "pid"))
    meetings, is_whole = both(
        lambda: Tables.of(comm, calls.slot[calls.pair], number),
        lambda: (
            ~(
                is_first
                | _after_gap(_number_of_record(rows["seq"], number, calls), calls)
                | _is_after_restart(rows, is_first)
            )
        ),
        n=len(rows),
    )
    return Timeline(
        rows=rows,
        ts_ns=rows["ts_ns"],
        process=process,
        is_first=is_first,
        is_whole=is_whole,
        wait_ns=wait_ns,
        host_ns=host_ns,
        comm=comm,
        is_p2p=is_p2p,
        role=_roles(members, sizes, rows["seq"][members.first_row]),
        round=number,
        n_rounds=n_rounds,
        meetings=meetings,
        calls=calls,
        node=node,
        pid=pid,
        rank=_ranks(trace, node, pid, one_each),
        first=first,
        comm_hash=comm_hash,
        n_members=np.bincount(calls.comm, minlength=len(comm_hash)),
    )


def _rows(
    trace: Trace, order: Array | None, process: Array, *, is_numbered: bool
) -> tuple[RowsInOrder, Array, list[Array]]:
    """The collectives in order, with the frequently used columns; the cumulative time of their processes in GPU waits,
    int64 (n,); and the cumulative time in each category that may wait for the GPU, int64 (n,) each, to be summed.
    """
    if isinstance(trace.collectives, Columns):
        rows = RowsInOrder(trace.collectives, order, {}).keeping(*_COLUMNS)
        spent = {
            category: taken(trace.collectives.element("ledger_ns", category - 1), order)
            for category in _MAY_WAIT_FOR_GPU
        }
        waited = spent[Category.WAIT_GPU]
        may_wait = [column for column in spent.values() if not is_one_value(column)]
    else:
        waited, in_all = np.empty((2, len(process)), np.int64)

        def add(here: slice, rows: Array) -> None:
            ledger = rows["ledger_ns"]
            waited[here] = ledger[:, Category.WAIT_GPU - 1]
            in_all[here] = sum(ledger[:, category - 1] for category in _MAY_WAIT_FOR_GPU)

        rows = RowsInOrder(trace.collectives, order, {}).keeping(*_COLUMNS, for_rows=add)
        may_wait = [in_all]
    if not is_numbered:
        rows = rows.replacing(renumbered(rows, process, trace.clocks))
    return rows, waited, may_wait


def by_process_and_time(node: Array, pid: Array, ts_ns: Array) -> tuple[Array | None, Array]:
    """The order of the rows by process, then time, None if they already are in that order; and the first row of each
    process: int64 (n,), (p + 1,).

    Processes are numbered by node and pid. Fast if the rows of each process already are in order of time.
    """
    process, n_processes = _numbered_in_turn(node, pid)
    first = np.concatenate([[0], np.cumsum(np.bincount(process, minlength=n_processes))])
    order = None if (process[1:] >= process[:-1]).all() else order_of(process, n_processes)
    in_turn = taken(ts_ns, order)
    is_back = in_turn[1:] < in_turn[:-1]
    is_back[first[1:-1] - 1] = False
    if is_back.any():
        order = np.lexsort((ts_ns, process))
    return order, first


def _numbered_in_turn(node: Array, pid: Array) -> tuple[Array, int]:
    """As numbered(node, pid); faster if the rows of each pair are contiguous and the pairs are in order."""
    begins = np.empty(len(node), bool)
    begins[:1] = True
    np.not_equal(pid[1:], pid[:-1], out=begins[1:])
    begins[1:] |= node[1:] != node[:-1]
    first = np.flatnonzero(begins)
    nodes, pids = node[first].astype(np.int64), pid[first].astype(np.int64)
    if ((nodes[1:] > nodes[:-1]) | ((nodes[1:] == nodes[:-1]) & (pids[1:] > pids[:-1]))).all():
        return np.repeat(np.arange(len(first)), np.diff(first, append=len(node))), len(first)
    return numbered(node, pid)


def _spent(ts_ns: Array, waited_ns: Array, may_wait_ns: Sequence[Array], first: Array) -> tuple[Array, Array]:
    """The waits in each interval, and the host's own work in it: int64 (n,) each, 0 in first rows.

    waited_ns, may_wait_ns: the process's cumulative time in waits, and in each category of calls that may wait.
    """
    wait_ns, host_ns = np.empty((2, len(ts_ns)), np.int64)

    def fill(here: slice) -> None:
        begin = max(here.start, 1)
        own, before = slice(begin, here.stop), slice(begin - 1, here.stop - 1)
        interval = ts_ns[own] - ts_ns[before]
        np.minimum(np.maximum(waited_ns[own] - waited_ns[before], 0), interval, out=wait_ns[own])
        in_calls = np.zeros_like(interval)
        for spent in may_wait_ns:
            in_calls += spent[own]
            in_calls -= spent[before]
        np.maximum(interval - np.maximum(in_calls, 0), 0, out=host_ns[own])

    in_pieces(len(ts_ns), fill, rows_at_once=ROWS_AT_ONCE)
    wait_ns[first[:-1]] = 0
    host_ns[first[:-1]] = 0
    return wait_ns, host_ns


def _increase(total: Array, first: Array) -> Array:
    """The increase of a cumulative value of each process since the previous row: int64 (n,), 0 in first rows."""
    grown = np.empty_like(total)
    np.subtract(total[1:], total[:-1], out=grown[1:])
    grown[first[:-1]] = 0
    return grown


def _communicators(rows: RowsInOrder) -> tuple[Array, Array, Array, Array]:
    """Number of the communicator of each row, whether it is point-to-point, the hashes by number, and a number that
    all point-to-point pairs of one communicator share with its collectives.

    Point-to-point calls match per (communicator, source, destination).
    """
    op = rows["op"]
    is_p2p = (op == Op.SEND) | (op == Op.RECV)
    comm_hash = rows["comm_hash"]
    whole, n_comms = numbered(comm_hash)
    comm = whole
    if is_p2p.any():
        own, peer = rows["comm_rank"].astype(np.int64), rows["peer_rank"].astype(np.int64)
        is_send = op == Op.SEND
        source = np.where(is_p2p, np.where(is_send, own, peer), UNKNOWN)
        destination = np.where(is_p2p, np.where(is_send, peer, own), UNKNOWN)
        comm, n_comms = numbered(whole, source, destination)
    hashes = np.zeros(n_comms, np.uint64)
    hashes[comm] = comm_hash
    return comm, is_p2p, hashes, whole


def _number_of_record(seq: Array, number: Array, calls: Membership) -> Array:
    """Numbers that are consecutive for the records of a process in a communicator if no record is missing: int64 (n,).

    seq: int64 (n,); number: int64 (n,), of the round in the trace. A round of which no member has a record is not
    missing: a busy hub keeps only every k-th round, and the intervals of all members still begin together. Of a
    communicator with one recorded member every gap counts.
    """
    is_alone = (np.bincount(calls.comm) == 1)[calls.comm]
    return np.where(is_alone[calls.pair], seq, number) if is_alone.any() else number


def _after_gap(seq: Array, calls: Membership) -> Array:
    """Whether a record of the same process and communicator is missing right before each row.

    seq: consecutive numbers, see _number_of_record().
    """
    n, n_pairs = len(seq), len(calls.process)
    low, high = _range_of_each(seq, calls)
    span = high - low + 2  # one more, for the number before the first
    n_cells = float(span.sum(dtype=np.float64))
    if n_cells <= _SPARSE * n + n_pairs:
        before_first = np.cumsum(span) - span
        cell = (before_first + 1 - low)[calls.pair] + seq
        is_there = np.zeros(int(n_cells), bool)
        is_there[before_first] = True
        is_there[cell] = True
        if np.count_nonzero(is_there) == n + n_pairs:
            return ~is_there[cell - 1] if n_cells > n + n_pairs else np.zeros(n, bool)
    order = np.lexsort((seq, calls.pair))
    gap = np.zeros(n, bool)
    gap[order[1:]] = (np.diff(calls.pair[order]) == 0) & (np.diff(seq[order]) > 1)
    return gap


def _range_of_each(seq: Array, calls: Membership) -> tuple[Array, Array]:
    """The least and the largest number of each membership: int64 (m,) each."""
    last_row = np.zeros(len(calls.process), np.int64)
    last_row[calls.pair] = np.arange(len(seq))  # the last assignment wins
    low, high = seq[calls.first_row], seq[last_row]
    if (seq < low[calls.pair]).any() or (seq > high[calls.pair]).any():  # not in order of time
        np.minimum.at(low, calls.pair, seq)
        np.maximum.at(high, calls.pair, seq)
    return low, high


def _is_after_restart(rows: RowsInOrder, is_first: Array) -> Array:
    """Whether the cumulative values of a row restarted after the previous row: bool (n,).

    This is the case after a restart of the agent.
    """
    is_restart = np.zeros(len(rows), bool)
    is_late = flagged(rows["flags"], CollectiveFlag.LATE_ATTACH)
    if not is_late.any():
        return is_restart
    late = np.flatnonzero(is_late & ~is_first)
    is_restart[late] = (rows[late]["ledger_ns"] < rows[late - 1]["ledger_ns"]).any(axis=1)
    return is_restart


def _roles(members: Membership, nranks: Array, first_seq: Array) -> Array:
    """The role of each row's communicator in its process's program: (size, n-th of that size by first use).

    nranks, first_seq: (m,), the size of each membership's communicator and its first recorded round. A process that was
    attached late has a different order of first uses: its communicators get the roles that they have in other members.
    """
    order = np.lexsort((members.first_row, nranks, members.process))
    ordinal = np.zeros(len(order), np.int64)
    ordinal[order] = positions_in_run(members.process[order], nranks[order])
    first_of_all = np.full(int(members.comm.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first_of_all, members.comm, first_seq)
    # The order of first uses is wrong in all communicators of a process that lacks its first call in one of them.
    lacks = np.bincount(members.process, weights=first_seq > first_of_all[members.comm])
    earliest = np.lexsort((ordinal, lacks[members.process], first_seq, members.comm))
    model = earliest[positions_in_run(members.comm[earliest]) == 0]
    by_model, first_of_model = np.zeros((2, int(members.comm.max(initial=-1)) + 1), np.int64)
    by_model[members.comm[model]], first_of_model[members.comm[model]] = ordinal[model], first_seq[model]
    for process in np.unique(members.process[first_seq > first_of_model[members.comm]]).tolist():
        memberships = np.flatnonzero(members.process == process)
        roles_of_others = by_model[members.comm[memberships]]
        if numbered(nranks[memberships], roles_of_others)[1] == len(memberships):
            ordinal[memberships] = roles_of_others
    role, n_roles = numbered(nranks, ordinal)
    return role.astype(np.uint16 if n_roles <= 1 << 16 else np.int64)[members.pair]


def _ranks(trace: Trace, node: Array, pid: Array, memberships: Array) -> Array:
    """The ranks of the processes in the job: int64 (p,).

    The ranks come from the launcher. If it did not provide all of them (forked processes, for example), they come from
    the largest communicator with all processes, unless it contradicts a provided rank. Otherwise they follow the order
    of the processes.
    memberships: a collective of each process in each communicator.
    """
    rank_of = trace.launcher_ranks()
    identities = list(zip(node.tolist(), pid.tolist(), strict=True))
    ranks = np.array([rank_of.get(identity, UNKNOWN) for identity in identities], np.int64)
    is_known = ranks != UNKNOWN
    has_duplicates = len(np.unique(ranks[is_known])) < is_known.sum()
    if is_known.all() and not (has_duplicates and _has_duplicate_rank(identities, ranks, memberships)):
        return ranks
    numbered_in = _ranks_in_largest(trace, identities, memberships)
    if numbered_in is not None and (has_duplicates or (numbered_in == ranks)[is_known].all()):
        return numbered_in
    is_inherited = (
        len(np.unique(ranks)) == 1 and len(ranks) > 2
    )  # by all workers, from the process that forked them
    if is_known.all() and not is_inherited:
        return ranks  # processes that claim the same rank: see verdicts/claimed_rank.py
    return np.arange(len(ranks))


def _has_duplicate_rank(identities: list[tuple[int, int]], ranks: Array, memberships: Array) -> bool:
    """Whether a communicator has two processes with the same provided rank: otherwise they belong to several jobs."""
    rank_of = dict(zip(identities, ranks.tolist(), strict=True))
    rows = memberships[memberships["comm_hash"] != 0][["comm_hash", "node", "pid"]]
    ranked_comms = [(comm_hash, rank_of[node, pid]) for comm_hash, node, pid in np.unique(rows).tolist()]
    return len(set(ranked_comms)) < len(ranked_comms)


def _ranks_in_largest(trace: Trace, identities: list[tuple[int, int]], memberships: Array) -> Array | None:
    """The rank of each process in the largest communicator that has all processes; None without such a communicator."""
    columns = ["node", "pid", "comm_hash", "comm_rank", "nranks"]
    records = np.concatenate([trace.communicators[columns], memberships[columns]])
    records = records[(records["comm_hash"] != 0) & (records["comm_rank"] != UNKNOWN)]
    for nranks in np.unique(records["nranks"])[::-1].tolist():
        if nranks < len(identities):
            return None
        for comm_hash in np.unique(records["comm_hash"][records["nranks"] == nranks]).tolist():
            members = records[(records["comm_hash"] == comm_hash) & (records["nranks"] == nranks)]
            rank_of = {(int(row["node"]), int(row["pid"])): int(row["comm_rank"]) for row in members}
            ranks = [rank_of.get(identity, UNKNOWN) for identity in identities]
            if UNKNOWN not in ranks and len(set(ranks)) == len(ranks):
                return np.array(ranks, np.int64)
    return None
