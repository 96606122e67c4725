"""Hangs: rounds that some ranks have entered and others have not, for too long.

The ranks that are behind are named, not the ranks ahead. A rank that is behind because it waits in another round is a
victim: the waits are followed to the ranks that wait for no other rank, or to a circle. A round in flight is normal, so
no hang is reported before a limit has passed, unless a missing rank's process has ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered, order_of
from stallscope.diagnose.evidence_fields import RankActivity, merged
from stallscope.diagnose.processes import exit_reason
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import user_frame
from stallscope.diagnose.timeline.clocks import Clocks
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.diagnose.timeline.unseen_ranks import absent
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CATEGORY_NAMES, Category, Op, word
from stallscope.events.trace import Trace

_SEVERAL = 2  # missing ranks: a single missing rank has stopped
_NO_PROCESSES = np.zeros(0, np.int64)


@dataclass(frozen=True)
class StuckRound:
    """A round that cannot complete.

    missing: processes that have not entered it and wait for no other process. waiting: the processes that wait for
    them, directly or through other rounds. since_ns: the last entry of a present process. for_ns: the time since then.
    is_circle: the missing processes wait for each other in collectives of different communicators. doing: the state of
    each missing process. ranks, nodes: of the missing processes; some are not on the timeline (see absent).
    is_ahead: the missing processes are several, at least half of all, and ended with status 0, so the processes that
    wait may have made an extra call. n_unwatched: processes on nodes whose capture had ended before.
    """

    comm: int
    seq: int
    missing: Array
    waiting: Array
    since_ns: int
    for_ns: int
    is_circle: bool
    doing: tuple[RankActivity, ...]
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    is_ahead: bool = False
    n_unwatched: int = 0


@dataclass(frozen=True)
class _Open:
    """The first unfinished round of a communicator."""

    comm: int
    seq: int
    missing: Array
    present: Array
    since_ns: int


def stuck(
    timeline: Timeline, clocks: Clocks, trace: Trace, *, now_ns: int, limits: Thresholds
) -> StuckRound | None:
    """The hang at the end of a trace, if there is one.

    now_ns: the end of the capture, on the common clock.
    """
    arrival_ns = clocks.arrival_ns
    without_call = absent(timeline, trace)
    unwatched_ns = _unwatched_since_ns(without_call.timeline, clocks, trace)
    open_rounds = _open_rounds(timeline, arrival_ns, without_call.members, unwatched_ns)
    if not open_rounds:
        return None
    patience = patience_ns(timeline, arrival_ns, limits)
    timeline = without_call.timeline
    ended = ended_ns(timeline, clocks, trace)
    overdue = [
        open_round
        for open_round in open_rounds
        if _is_overdue(open_round, ended, now_ns=now_ns, patience_ns=patience, limits=limits)
    ]
    if not overdue:
        return None
    roots, is_circle = _roots(timeline, trace, overdue)
    if not roots:
        return None  # all wait in rounds that all have entered: no rank is missing
    first = min(
        (open_round for open_round in overdue if set(open_round.missing.tolist()) & set(roots)),
        key=lambda open_round: open_round.since_ns,
    )
    here = np.array([process for process in first.missing.tolist() if process in roots], np.int64)
    chosen = np.array(roots, np.int64) if is_circle else here
    present = {int(p) for open_round in overdue for p in open_round.present}
    waiting = sorted((present | _in_gpu_waits(timeline, trace)) - set(roots))
    states = tuple(
        doing(timeline, trace, process, end_ns, has_hung=end_ns - first.since_ns >= patience)
        for process, end_ns in zip(chosen.tolist(), ended[chosen].tolist(), strict=True)
    )
    return StuckRound(
        comm=first.comm,
        seq=first.seq,
        missing=chosen,
        waiting=np.array(waiting, np.int64),
        since_ns=first.since_ns,
        for_ns=_over_ns(first, ended, now_ns) - first.since_ns,
        is_circle=is_circle,
        doing=states,
        ranks=tuple(timeline.rank[chosen].tolist()),
        nodes=tuple(timeline.node[chosen].tolist()),
        n_unwatched=int((unwatched_ns < first.since_ns).sum()),
        is_ahead=len(chosen) >= max(len(waiting), _SEVERAL)
        and all(state.exit_status == 0 for state in states),
    )


def _roots(timeline: Timeline, trace: Trace, overdue: Sequence[_Open]) -> tuple[list[int], bool]:
    """The missing processes that wait for no other process, or that wait for each other; whether they do the latter."""
    is_blocked = {
        int(process)
        for open_round in overdue
        for process in open_round.present
        if _is_blocked(timeline, trace, int(process))
    }
    missing = {int(process) for open_round in overdue for process in open_round.missing}
    is_circle = missing <= is_blocked
    roots = sorted(
        process
        for process in missing
        if is_circle or (process not in is_blocked and not waits_for_gpu(timeline, trace, process))
    )
    if sum(trace.lost.values()):
        roots = [process for process in roots if not _may_have_entered(timeline, trace, process)]
    return roots, is_circle


def _unwatched_since_ns(timeline: Timeline, clocks: Clocks, trace: Trace) -> Array:
    """By process, on the common clock, when the capture on its node ended: int64 (p,); far ahead if the capture has not
    ended.
    """
    ends = np.full(timeline.n_processes, np.iinfo(np.int64).max)
    for node, end_ns in enumerate(trace.ends_ns):
        if end_ns >= 0 and node in clocks.offsets:
            ends[timeline.node == node] = clocks.common_ns(node, end_ns)
    return ends


def _open_rounds(
    timeline: Timeline, arrival_ns: Array, absent: Mapping[int, Array], unwatched_ns: Array
) -> list[_Open]:
    """The earliest round of each communicator that some members have not entered.

    absent: members that have entered no round, by communicator. unwatched_ns: by process, when the capture on its node
    ended: a member that was not behind yet may have entered the round since, and is left out.

    The round counts as open from the last call of the first blocked member. While all present members make calls, the
    rank behind is only late, or has other round numbers (it was attached late).
    """
    out = []
    for rows in _rows_of_unfinished(timeline, absent):
        seq_of, process = timeline.rows["seq"][rows], timeline.process[rows]
        order = np.lexsort((seq_of, process))
        is_last = np.append(np.diff(process[order]) != 0, True)
        members, reached = process[order[is_last]], np.maximum(seq_of[order[is_last]], -1)
        never = absent.get(int(timeline.comm[rows[0]]), _NO_PROCESSES)
        members, reached = np.append(members, never), np.append(reached, np.full(len(never), -1))
        earliest = _first_open(timeline, arrival_ns, rows, members, reached, unwatched_ns)
        if earliest and (unwatched_ns[earliest.missing] < earliest.since_ns).any():
            kept = unwatched_ns[members] >= earliest.since_ns
            earliest = _first_open(timeline, arrival_ns, rows, members[kept], reached[kept], unwatched_ns)
        if earliest:
            out.append(earliest)
    return out


def _first_open(
    timeline: Timeline, arrival_ns: Array, rows: Array, members: Array, reached: Array, unwatched_ns: Array
) -> _Open | None:
    """The first round that some members have entered and others have not. reached: the last round of each member.

    The last call of a member shows nothing where the capture on its node ended before the last call of all members.
    """
    if len(members) < 2 or reached.min() == reached.max():
        return None
    seq, seq_of = int(reached.min()) + 1, timeline.rows["seq"][rows]
    present, entered = members[reached >= seq], rows[seq_of == seq]
    last_call_ns = np.maximum.reduceat(arrival_ns, timeline.first[:-1]) if len(arrival_ns) else arrival_ns
    since = int(arrival_ns[entered if len(entered) else rows].max())
    watched = present[unwatched_ns[present] >= arrival_ns[rows].max()]
    since = max(since, int(last_call_ns[watched if len(watched) else present].min()))
    return _Open(int(timeline.comm[rows[0]]), seq, members[reached < seq], present, since)


def _rows_of_unfinished(timeline: Timeline, absent: Mapping[int, Array]) -> list[Array]:
    """The rows of each communicator whose latest round some members have not entered, perhaps also of others."""
    if not timeline.n_rounds:
        return []
    n_comms = len(timeline.comm_hash)
    last_round = np.zeros(n_comms, np.int64)
    np.maximum.at(last_round, timeline.comm, timeline.round)
    n_arrived = np.bincount(timeline.round, minlength=timeline.n_rounds)[last_round]
    is_open = n_arrived != timeline.n_members
    is_open[list(absent)] = True
    if len(timeline.meetings.irregular):  # a process is in a round twice
        is_open[:] = True
    rows = np.flatnonzero(is_open[timeline.comm])
    order = order_of(timeline.comm[rows], n_comms)
    rows = rows[order]
    return np.split(rows, np.flatnonzero(np.diff(timeline.comm[rows])) + 1) if len(rows) else []


def patience_ns(timeline: Timeline, arrival_ns: Array, limits: Thresholds) -> float:
    """The time without progress after which a job counts as hung.

    It follows from the longest typical pause: the 99th percentile of the gaps between arrivals of a process.
    """
    gaps = np.diff(arrival_ns)[~timeline.is_first[1:]]
    longest_gap = float(np.quantile(gaps, 0.99)) if len(gaps) else 0.0
    return max(limits.hang_after_ns, limits.hang_gap_factor * longest_gap)


def ended_ns(timeline: Timeline, clocks: Clocks, trace: Trace) -> Array:
    """The end of each process on the common clock: int64 (p,), UNKNOWN while it runs."""
    ended_at = {
        (int(row["node"]), int(row["pid"])): clocks.common_ns(int(row["node"]), int(row["ended_ns"]))
        for row in trace.processes
        if row["ended_ns"] != UNKNOWN
    }
    return np.array(
        [ended_at.get((int(n), int(p)), UNKNOWN) for n, p in zip(timeline.node, timeline.pid, strict=True)],
        np.int64,
    )


def _is_overdue(
    open_round: _Open, ended: Array, *, now_ns: int, patience_ns: float, limits: Thresholds
) -> bool:
    """Whether the present processes have waited long enough: for an ended rank a moment, otherwise patience_ns."""
    now_ns = _over_ns(open_round, ended, now_ns)
    if now_ns - open_round.since_ns >= patience_ns:
        return True
    gone = ended[open_round.missing]
    gone = gone[(gone != UNKNOWN) & (gone < now_ns)]
    return len(gone) > 0 and now_ns - max(open_round.since_ns, int(gone.max())) >= limits.dead_after_ns


def _over_ns(open_round: _Open, ended: Array, now_ns: int) -> int:
    """The end of the present processes' wait: now, or the first end of a present process if all have ended."""
    ends_ns = ended[open_round.present]
    return now_ns if (ends_ns == UNKNOWN).any() else min(now_ns, int(ends_ns.min()))


def _may_have_entered(timeline: Timeline, trace: Trace, process: int) -> bool:
    """Whether the records of a process's last calls may be lost.

    It has made more calls than were recorded, and the gaps between the recorded calls do not account for all of them.
    """
    state = _last_state(timeline, trace, process)
    if state is None or state["n_collectives"] == UNKNOWN:
        return False
    rows = np.arange(timeline.first[process], timeline.first[process + 1])
    seqs, comms = timeline.rows["seq"][rows], timeline.comm[rows]
    in_gaps = 0
    for comm in np.unique(comms).tolist():
        seqs_of_comm = seqs[(comms == comm) & (seqs != UNKNOWN)]
        in_gaps += int(seqs_of_comm.max()) + 1 - len(seqs_of_comm) if len(seqs_of_comm) else 0
    return int(state["n_collectives"]) - len(rows) > in_gaps


def _is_blocked(timeline: Timeline, trace: Trace, process: int) -> bool:
    """Whether a process that has entered an overdue round is blocked in it, by its last known state."""
    state = _last_state(timeline, trace, process)
    if state is not None and state["in_call"] == Op.NONE and state["alive"]:
        category = int(state["category"])
        return CATEGORY_NAMES[category - 1] not in ("sleep", "io", "net", "stopped") if category else True
    return True


def waits_for_gpu(timeline: Timeline, trace: Trace, process: int) -> bool:
    """Whether a process waits for a collective in its last known state."""
    state = _last_state(timeline, trace, process)
    return state is not None and bool(state["alive"]) and int(state["category"]) == Category.WAIT_GPU


def _in_gpu_waits(timeline: Timeline, trace: Trace) -> set[int]:
    """Processes that wait for any collective in their last known state."""
    rows = trace.snapshots[np.argsort(trace.snapshots["ts_ns"], kind="stable")]
    number, n = numbered(rows["node"], rows["pid"])
    newest = np.zeros(n, np.int64)
    newest[number] = np.arange(len(rows))
    rows = rows[newest]
    rows = rows[(rows["alive"] > 0) & (rows["category"] == Category.WAIT_GPU)]
    waiting = set(zip(rows["node"].tolist(), rows["pid"].tolist(), strict=True))
    identities = enumerate(zip(timeline.node.tolist(), timeline.pid.tolist(), strict=True))
    return {process for process, identity in identities if identity in waiting}


def _last_state(timeline: Timeline, trace: Trace, process: int, *, alive: bool = False) -> Array | None:
    """The newest snapshot of a process. alive: the newest snapshot before its end."""
    is_of_process = (trace.snapshots["pid"] == timeline.pid[process]) & (
        trace.snapshots["node"] == timeline.node[process]
    )
    rows = trace.snapshots[is_of_process & (trace.snapshots["alive"] > 0) if alive else is_of_process]
    return rows[np.argmax(rows["ts_ns"])] if len(rows) else None


def doing(
    timeline: Timeline, trace: Trace, process: int, end_ns: int, *, has_hung: bool = False
) -> RankActivity:
    """The last known state of a missing rank, for the evidence. has_hung: the process hung before it ended."""
    is_alive = end_ns == UNKNOWN
    state = _last_state(timeline, trace, process, alive=True)
    node, pid = int(timeline.node[process]), int(timeline.pid[process])
    arrival_ns = timeline.ts_ns[timeline.first[process] : timeline.first[process + 1]]
    activity = merged(
        RankActivity(int(timeline.rank[process]), is_alive),
        exit_reason.failed_call(trace, node, pid, after_ns=int(arrival_ns.max(initial=0))),
        RankActivity() if is_alive else exit_reason.end(trace.host_events, node, pid),
    )
    if state is None or not (is_alive or has_hung):
        return activity
    category, stack = int(state["category"]), user_frame.last_position(trace, timeline, process)
    is_stopped = category == Category.STOPPED
    return replace(
        activity,
        has_hung=None if is_alive else True,
        state=CATEGORY_NAMES[category - 1] if category else None,
        stopped_by=exit_reason.stopped_by(trace.host_events, node, pid) if is_stopped else None,
        syscall_nr=int(state["syscall_nr"]) if state["syscall_nr"] != UNKNOWN else None,
        in_call=word(Op, int(state["in_call"])) if state["in_call"] else None,
        at=user_frame.in_own_code(stack) if stack else None,
        stack=list(stack) if stack else None,
    )
