"""The trace of statements on ranks (see rank_statements).

A rank without a known process id has its rank as process id. Statements become: memberships with the last enqueued and
completed collective, open collectives for time-outs, positions for stacks, and annotations for failures (see
events/failure_labels).
"""

import hashlib

import numpy as np

from stallscope.events import layout
from stallscope.events.call_labels import CALL_LABEL, call_label, group_fact
from stallscope.events.failure_labels import FAILURE_LABELS, STATED, failure_label
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CollectiveFlag
from stallscope.events.trace import Clock, Coverage, Gap, Trace
from stallscope.importers.rank_statements import Progress, Statements

_NOT_SHOWN = Gap(
    "logs and stack dumps do not show whether a job runs well",
    "Give a profile of all ranks (torch.profiler), or trace the job live (stallscope trace).",
)
_UNRANKED = 1 << 30  # process ids of failures that name no rank


def comm_hash_of(group: str) -> int:
    """The identity of a group that lines name."""
    return int.from_bytes(hashlib.blake2b(group.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def statement_trace(statements: Statements) -> Trace:
    """The statements as a trace."""
    statements.leave_out_impossible_numbers()
    statements.add_silent_members()
    if statements.world_size == UNKNOWN and statements.progress:  # a job has all ranks below its largest rank
        known = statements.writers | {rank for _, rank in statements.progress}
        statements.world_size = max(known) + 1
    ranks = sorted(
        {rank for _, rank in statements.progress}
        | set(statements.stacks)
        | statements.writers
        | {failure.rank for failure in statements.failures if failure.rank >= 0}
        | set(range(max(statements.world_size, 0)))
        | set().union(*statements.members.values())
    )
    hosts = tuple(sorted({statements.hosts.get(rank, "") for rank in ranks})) or ("",)
    processes = {
        rank: (hosts.index(statements.hosts.get(rank, "")), statements.pids.get(rank, rank)) for rank in ranks
    }
    if len(set(processes.values())) < len(processes):  # processes of containers may share an id
        processes = {rank: (node, rank) for rank, (node, _) in processes.items()}
    times = [failure.ts_ns for failure in statements.failures] + [
        progress.ts_ns for progress in statements.progress.values()
    ]
    last_ns = max(times, default=0)
    stacks, positions = _positions(statements, processes, last_ns)
    return Trace(
        collectives=_collectives(statements, processes),
        communicators=_communicators(statements, processes),
        processes=_processes(statements, processes),
        snapshots=_snapshots(statements, processes, last_ns),
        annotations=_annotations(statements, processes),
        positions=positions,
        stacks=dict(enumerate(stacks)),
        nodes=hosts,
        clocks=tuple(Clock(i, last_ns, last_ns) for i in range(len(hosts))) if statements.has_times else (),
        ends_ns=(last_ns,) * len(hosts),
        source="; ".join(statements.sources),
        facts=statements.facts
        | {STATED: "; ".join(statements.sources)}
        | {group_fact(comm_hash_of(group)): words for group, words in statements.groups.items()},
        coverage=Coverage(
            blind_spots=("slowness",),
            omitted=statements.omitted,
            gaps=tuple(statements.gaps) or (_waiting(statements) or _NOT_SHOWN,),
        ),
    )


def _waiting(statements: Statements) -> Gap | None:
    """The ranks that state a time-out, if the files state nothing on the ranks they wait for."""
    waiting = {
        rank: progress for (_, rank), progress in statements.progress.items() if progress.open_seq != UNKNOWN
    }
    if not waiting:
        return None
    first = next(iter(waiting.values()))
    ranks = ", ".join(map(str, sorted(waiting)[:8]))
    where = f"round {first.open_seq} ({first.words}) of {statements.groups.get(first.group, first.group)}"
    subject = f"rank {ranks} waits" if len(waiting) == 1 else f"ranks {ranks} wait"
    return Gap(
        f"{subject} in {where}, and the files do not show the progress of the other ranks",
        "Give the logs, the stacks or the flight-recorder dumps of the other ranks.",
    )


Processes = dict[int, tuple[int, int]]


def _collectives(statements: Statements, processes: Processes) -> Array:
    stated = [
        (rank, progress)
        for (_, rank), progress in statements.progress.items()
        if _last_seq(progress) != UNKNOWN
    ]
    rows = layout.empty(layout.COLLECTIVES, len(stated))
    knows_starts = any(progress.started > UNKNOWN for _, progress in stated)
    for row, (rank, progress) in zip(rows, stated, strict=True):
        row["node"], row["pid"] = processes[rank]
        row["ts_ns"], row["comm_hash"], row["comm_rank"] = progress.ts_ns, comm_hash_of(progress.group), rank
        row["nranks"] = _size(statements, progress.group)
        row["seq"], row["op"], row["count"] = _last_seq(progress), progress.op, progress.count
        is_open = progress.open_seq != UNKNOWN or progress.enqueued > progress.completed
        not_started = is_open and knows_starts and UNKNOWN < progress.started < row["seq"]
        row["flags"] = (
            CollectiveFlag.NO_LEDGER
            | (CollectiveFlag.OPEN if is_open else 0)
            | (CollectiveFlag.NOT_STARTED if not_started else 0)
        )
    return rows[np.argsort(rows["ts_ns"], kind="stable")]


def _last_seq(progress: Progress) -> int:
    """The round that holds a rank: the round that timed out, otherwise the first round not seen complete."""
    if progress.open_seq != UNKNOWN:
        return progress.open_seq
    return (
        min(progress.completed + 1, progress.enqueued) if progress.completed != UNKNOWN else progress.enqueued
    )


def _size(statements: Statements, group: str) -> int:
    is_world = statements.world_size != UNKNOWN and len(statements.members[group]) > 0 and group in _WORLD
    return statements.world_size if is_world else UNKNOWN


_WORLD = ("default_pg", "0")
"""The group of all ranks, as c10d names it."""


def _communicators(statements: Statements, processes: Processes) -> Array:
    memberships = {
        (group, rank): statements.progress.get((group, rank))
        for group, members in statements.members.items()
        for rank in (set(processes) if group in _WORLD else members)
    }
    rows = layout.empty(layout.COMMUNICATORS, len(memberships))
    for row, ((group, rank), progress) in zip(rows, memberships.items(), strict=True):
        row["node"], row["pid"] = processes[rank]
        row["comm_hash"], row["comm_rank"], row["nranks"] = (
            comm_hash_of(group),
            rank,
            _size(statements, group),
        )
        if progress is not None:
            row["last_entered"] = max(progress.enqueued, progress.open_seq)
            row["last_completed"] = progress.completed
    return rows


def _processes(statements: Statements, processes: Processes) -> Array:
    rows = layout.empty(layout.PROCESSES, len(processes))
    for row, (rank, (node, pid)) in zip(rows, processes.items(), strict=True):
        row["node"], row["pid"], row["rank"] = node, pid, rank
        row["nranks"] = max(statements.world_size, len(processes))
    return rows


def _snapshots(statements: Statements, processes: Processes, last_ns: int) -> Array:
    """One row for each rank whose progress a line states: a rank without a row is silent."""
    stated = sorted(
        {rank for (_, rank), progress in statements.progress.items() if _last_seq(progress) != UNKNOWN}
    )
    rows = layout.empty(layout.SNAPSHOTS, len(stated))
    for row, rank in zip(rows, stated, strict=True):
        row["ts_ns"], row["alive"] = last_ns, 1
        row["node"], row["pid"] = processes[rank]
    return rows


def _positions(
    statements: Statements, processes: Processes, last_ns: int
) -> tuple[list[tuple[str, ...]], Array]:
    """The stacks, and a row for each thread of each rank, main thread first, and for each failure with a stack."""
    number: dict[tuple[str, ...], int] = {}
    values = [
        (last_ns + 1, processes[rank], thread, stack)
        for rank, threads in statements.stacks.items()
        for thread, stack in enumerate(threads)
    ]
    values += [
        (failure.ts_ns, processes.get(failure.rank, (0, _UNRANKED)), 0, failure.stack)
        for failure in statements.failures
        if failure.stack
    ]
    rows = layout.empty(layout.POSITIONS, len(values))
    for row, (ts_ns, process, thread, stack) in zip(rows, values, strict=True):
        row["ts_ns"], row["stack"] = ts_ns, number.setdefault(stack, len(number))
        row["node"], row["pid"] = process
        row["tid"] = process[1] + thread
    return list(number), rows


def _annotations(statements: Statements, processes: Processes) -> Array:
    values: list[tuple[int, tuple[int, int], bytes, bytes]] = []
    for (_, rank), progress in statements.progress.items():
        if progress.words or progress.line:
            label = call_label(
                progress.words, statements.groups.get(progress.group, progress.group), progress.line
            )
            values.append((progress.ts_ns, processes[rank], CALL_LABEL, label))
    for failure in statements.failures:
        process = processes.get(failure.rank, (0, _UNRANKED))
        label = failure_label(failure.words, failure.status, pid=failure.pid, host=failure.host)
        values.append((failure.ts_ns, process, FAILURE_LABELS[failure.kind], label))
    rows = layout.empty(layout.ANNOTATIONS, len(values))
    for row, (ts_ns, process, kind, value) in zip(rows, values, strict=True):
        row["ts_ns"], row["label"], row["value"] = ts_ns, kind, value
        row["node"], row["pid"] = process
    return rows
