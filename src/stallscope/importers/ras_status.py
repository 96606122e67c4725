"""Answers of NCCL's RAS service (see ras_answer), one or more: which rank of a communicator stays behind.

Each answer counts, for every rank of every communicator, the collectives it has entered, per operation. Ranks that are
one apart at one moment do not show a hang: a job is stuck only if two answers, ten seconds apart or more, state the
same counts. Answers as text state no time; equal counts in two such answers count as a stuck job. A rank that
RAS calls dead or unresponsive is missing in one answer already. RAS does not state whether a collective has completed,
so equal counts that do not move leave the answer open.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CollectiveFlag, Op
from stallscope.events.trace import Clock, Coverage, Gap, Trace
from stallscope.importers.operation_names import NCCL_OPS
from stallscope.importers.ras_answer import IN_PROGRESS, Answer, Member, answers_of, is_answer
from stallscope.importers.registry import Importer, Unread, each_readable

_MIN_STANDSTILL_NS = 10 * 10**9
_RESULTS = {
    1: "unhandled CUDA error",
    2: "unhandled system error",
    3: "internal error",
    6: "remote process error",
}
"""ncclResult_t in words (ncclGetErrorString)."""

_DUMP_STACKS = (
    "Dump the stacks of all ranks (py-spy dump --pid PID), which show whether they wait in a collective."
)
_ASK_AGAIN = "Run ncclras again 30 s later and give both answers."

_Comm = list[Member]


@dataclass(frozen=True)
class _Change:
    """The last answer, compared with the latest answer that is ten seconds older or more. still: communicators whose
    counts are the same in both; moved: those whose counts differ. still_s: seconds between the two, 0 where unknown.
    """

    last: Answer
    still: set[int]
    moved: set[int]
    still_s: float


def _accepts(path: object, head: bytes) -> bool:
    return is_answer(head)


def _read(files: Sequence[Path], unread: Unread) -> Trace:
    answers = [answer for parts in each_readable(files, answers_of, unread) for answer in parts]
    if not answers:
        raise BadTrace(f"{files[0]} contains no complete answer of ncclras: ask again with -f json")
    return trace_of_answers(sorted(answers, key=lambda answer: answer.at_ns))


def trace_of_answers(answers: list[Answer]) -> Trace:
    """The trace of answers in the order of time."""
    return _trace(_change(answers), n_answers=len(answers))


def _change(answers: list[Answer]) -> _Change:
    last = answers[-1]
    for answer in reversed(answers[:-1]):
        is_timed = answer.at_ns != UNKNOWN and last.at_ns != UNKNOWN
        if is_timed and last.at_ns - answer.at_ns < _MIN_STANDSTILL_NS:
            continue
        then, now = _counts(answer), _counts(last)
        still = {comm for comm, counts in now.items() if then.get(comm) == counts}
        moved = {
            comm for comm, counts in now.items() if comm in then and _has_moved(then[comm], counts)
        } - still
        return _Change(last, still, moved, (last.at_ns - answer.at_ns) / 1e9 if is_timed else 0.0)
    return _Change(last, set(), set(), 0.0)


def _has_moved(then: dict[int, dict[str, int] | None], now: dict[int, dict[str, int] | None]) -> bool:
    """Whether the counts of all ranks of a communicator increased."""
    both = [
        (before, now[rank])
        for rank, before in then.items()
        if before is not None and now.get(rank) is not None
    ]
    totals = [(sum(before.values()), sum((after or {}).values())) for before, after in both]
    return bool(totals) and all(after > before for before, after in totals)


def _counts(answer: Answer) -> dict[int, dict[int, dict[str, int] | None]]:
    counts: dict[int, dict[int, dict[str, int] | None]] = {}
    for member in answer.members:
        counts.setdefault(member.comm_hash, {})[member.rank] = member.counts
    return counts


def _trace(change: _Change, *, n_answers: int) -> Trace:
    last = change.last
    comms = _by_communicator(last)
    nodes = tuple(sorted({member.host for member in last.members})) or ("",)
    node_of = {host: i for i, host in enumerate(nodes)}
    pid_of = _pids(last)
    ranks = _job_ranks(last, pid_of)
    unplaced = _unplaced(comms, ranks)
    rows = [
        _row(
            member,
            at_ns=last.at_ns,
            process=(node_of[member.host], pid_of[member.comm_hash, member.rank]),
            **entered,
        )
        for comm_hash, comm in comms.items()
        for member, entered in _entered(comm, is_still=comm_hash in change.still and not unplaced)
    ]
    at_ns = max(last.at_ns, 0)
    return Trace(
        collectives=np.concatenate(rows) if rows else layout.empty(layout.COLLECTIVES),
        communicators=_communicators(last, node_of, pid_of),
        processes=_processes(last, node_of, pid_of, ranks),
        snapshots=_snapshots(last, node_of, pid_of),
        nodes=nodes,
        clocks=tuple(Clock(i, at_ns, at_ns) for i in range(len(nodes))) if at_ns else (),
        ends_ns=(at_ns,) * len(nodes),
        source=f"{n_answers} answer{'s' * (n_answers > 1)} of NCCL's RAS service",
        facts={"nccl_version": last.version} if last.version else {},
        coverage=Coverage(
            blind_spots=("slowness",), gaps=(*_unplaced_gaps(unplaced), *_gaps(change, comms, n_answers))
        ),
    )


def _by_communicator(answer: Answer) -> dict[int, _Comm]:
    comms: dict[int, _Comm] = {}
    for member in answer.members:
        comms.setdefault(member.comm_hash, []).append(member)
    return comms


def _pids(answer: Answer) -> dict[tuple[int, int], int]:
    """The process id by communicator and rank: the rank itself where the answer does not state the process."""
    return {
        (member.comm_hash, member.rank): member.pid if member.pid != UNKNOWN else member.rank
        for member in answer.members
    }


def _job_ranks(answer: Answer, pid_of: dict[tuple[int, int], int]) -> dict[tuple[str, int], int]:
    """The rank of each process in the largest communicator."""
    size = max((member.size for member in answer.members), default=0)
    widest = [member for member in answer.members if member.size == size]
    return {
        (member.host, pid_of[member.comm_hash, member.rank]): member.rank
        for member in widest
        if member.comm_hash == widest[0].comm_hash
    }


def _unplaced(comms: dict[int, _Comm], ranks: dict[tuple[str, int], int]) -> list[Member]:
    """Listed members of smaller communicators whose rank in the job is not known: text does not state all processes."""
    are_all_known = all(member.pid != UNKNOWN for comm in comms.values() for member in comm)
    if are_all_known or len(comms) < 2:
        return []
    members = [member for comm in comms.values() for member in comm if member.pid != UNKNOWN]
    return [member for member in members if (member.host, member.pid) not in ranks]


def _unplaced_gaps(members: list[Member]) -> Iterator[Gap]:
    """The members that are behind in their communicators, by process, because their ranks in the job are unknown."""
    least = {
        comm: min(m.entered for m in members if m.comm_hash == comm)
        for comm in {m.comm_hash for m in members}
    }
    behind = [member for member in members if member.entered == least[member.comm_hash]]
    if behind:
        names = ", ".join(
            f"process {m.pid} on {m.host} (GPU {m.device}, rank {m.rank} of communicator {m.comm_hash:016x})"
            for m in behind[:4]
        )
        yield Gap(
            f"{names} is behind its peers in that communicator; the text does not state its rank in the job",
            "Dump the stacks of that process (py-spy dump --pid PID). ncclras -f json (NCCL 2.28.7 or later) states "
            "the ranks of all processes.",
        )


def _is_silent(member: Member) -> bool:
    return member.is_dead or member.is_unresponsive


def _is_starting(comm: _Comm) -> bool:
    """Whether a communicator is still being created."""
    return any(member.init_state == IN_PROGRESS for member in comm)


def _entered(comm: _Comm, *, is_still: bool) -> Iterator[tuple[Member, dict[str, int]]]:
    """The last round that each member has entered: seq, op, flags. It is open if other ranks never enter it."""
    answered = [member for member in comm if member.counts is not None]
    is_for_good = is_still or any(_is_silent(member) for member in comm)
    if _is_starting(comm):
        flags = CollectiveFlag.OPEN if is_still else 0
        yield from ((member, {"seq": 0, "op": Op.COMM_INIT, "flags": flags}) for member in answered)
        return
    operations = {op for member in answered for op in member.counts or {}}
    least = {op: min((member.counts or {}).get(op, 0) for member in answered) for op in operations}
    most = max((member.entered for member in answered), default=0)
    is_uneven = any(member.counts != answered[0].counts for member in answered)
    lacks_one = is_uneven or len(answered) < len(comm)
    for member in answered:
        ahead = [op for op, n in (member.counts or {}).items() if n > least[op]]
        if not member.entered:
            continue
        is_open = is_for_good and lacks_one and (member.entered == most or bool(ahead))
        yield (
            member,
            {
                "seq": member.entered - 1,
                "op": NCCL_OPS.get(ahead[0], Op.NONE) if len(ahead) == 1 else Op.NONE,
                "flags": CollectiveFlag.OPEN if is_open else 0,
            },
        )


def _row(member: Member, *, at_ns: int, process: tuple[int, int], seq: int, op: int, flags: int) -> Array:
    row = layout.empty(layout.COLLECTIVES, 1)
    row["ts_ns"], row["node"], row["pid"] = max(at_ns, 0), process[0], process[1]
    row["comm_hash"], row["comm_rank"], row["nranks"] = member.comm_hash, member.rank, member.size
    row["seq"], row["op"] = seq, op
    row["flags"] = CollectiveFlag.NO_LEDGER | flags
    return row


def _communicators(answer: Answer, node_of: dict[str, int], pid_of: dict[tuple[int, int], int]) -> Array:
    rows = layout.empty(layout.COMMUNICATORS, len(answer.members))
    for row, member in zip(rows, answer.members, strict=True):
        row["ts_ns"], row["node"] = max(answer.at_ns, 0), node_of[member.host]
        row["pid"] = pid_of[member.comm_hash, member.rank]
        row["comm_hash"], row["comm_rank"], row["nranks"] = member.comm_hash, member.rank, member.size
        row["last_entered"] = member.entered - 1 if member.counts is not None else UNKNOWN
    return rows


def _processes(
    answer: Answer,
    node_of: dict[str, int],
    pid_of: dict[tuple[int, int], int],
    ranks: dict[tuple[str, int], int],
) -> Array:
    known = {(member.host, pid_of[member.comm_hash, member.rank]): member.device for member in answer.members}
    rows = layout.empty(layout.PROCESSES, len(known))
    for row, ((host, pid), device) in zip(rows, sorted(known.items()), strict=True):
        row["node"], row["pid"], row["device"] = node_of[host], pid, device
        row["rank"], row["nranks"] = ranks.get((host, pid), UNKNOWN), len(ranks)
    return rows


def _snapshots(answer: Answer, node_of: dict[str, int], pid_of: dict[tuple[int, int], int]) -> Array:
    """One row for each process that answered: a process without a row is silent."""
    entered: dict[tuple[str, int], int] = {}
    for member in answer.members:
        if member.counts is not None or (not _is_silent(member) and member.pid != UNKNOWN):
            key = member.host, pid_of[member.comm_hash, member.rank]
            entered[key] = entered.get(key, 0) + member.entered
    rows = layout.empty(layout.SNAPSHOTS, len(entered))
    for row, ((host, pid), n) in zip(rows, sorted(entered.items()), strict=True):
        row["ts_ns"], row["node"], row["pid"] = max(answer.at_ns, 0), node_of[host], pid
        row["alive"], row["n_collectives"] = 1, n
    return rows


def _gaps(change: _Change, comms: dict[int, _Comm], n_answers: int) -> Iterator[Gap]:
    """Why the answers do not show whether the job hangs."""
    if not comms:
        yield Gap("the answer lists no communicator", "Run ncclras while the job runs.")
    if n_answers < 2:
        yield Gap("there is only one answer, which cannot show whether the counts increase", _ASK_AGAIN)
    elif not change.still and not change.moved:
        yield Gap("no two answers taken 10 s or more apart show whether the counts increase", _ASK_AGAIN)
    frozen = [comm for comm in change.still if comm in comms]
    even = [comm for comm in frozen if len({member.entered for member in comms[comm]}) == 1]
    if frozen and not change.moved and len(even) == len(frozen):
        during = f" within {change.still_s:.0f} s" if change.still_s else ""
        reason = (
            f"all counts are equal and did not change{during}: a hang inside a collective, or an idle job"
        )
        yield Gap(reason, _DUMP_STACKS)
    for member in (member for comm in comms.values() for member in comm):
        if member.async_error not in (0, IN_PROGRESS):
            words = _RESULTS.get(member.async_error, f"error {member.async_error}")
            reason = f"rank {member.rank} on {member.host} reports the asynchronous error {words!r}"
            yield Gap(reason, "Read the NCCL WARN lines of that rank's log.")


IMPORTER = Importer("NCCL RAS answers (text or JSON)", _accepts, _read)
