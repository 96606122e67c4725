"""Logs of NCCL (NCCL_DEBUG=INFO or TRACE): communicators, ranks, hosts, calls by rank, transports, warnings.

The phrases are from src/init.cc, src/enqueue.cc, src/debug.cc and src/transport (NVIDIA/nccl, 2.12 to 2.29; commit
5067397c). Calls (opCount, hexadecimal) are logged with NCCL_DEBUG_SUBSYS=COLL; they count per process and operation
stream of a communicator and begin at 0. A log shows calls that were made, not that they completed: the last calls of
the ranks of a communicator are compared. Ranks whose last call is earlier than the other ranks' are named.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.events.counted import counted
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Op
from stallscope.events.trace import Gap
from stallscope.importers.operation_names import NCCL_OPS
from stallscope.importers.rank_statements import Failure, Progress, Statements
from stallscope.importers.registry import Importer
from stallscope.importers.texts import has_last_line, lines_of

_LINE = re.compile(
    r"(?P<host>[\w.-]+):(?P<pid>\d+):(?P<tid>\d+) \[(?P<device>\d+|-1)\] (?:\S+ \S+:\d+ |\S+:\d+ )?(?:\([^)]*\) )?"
    r"NCCL (?P<level>INFO|WARN|TRACE) (?P<text>.*)$"
)
_INIT = re.compile(
    r"comm (?P<comm>0x[0-9a-f]+) rank (?P<rank>\d+) (?:nranks|nRanks) (?P<size>\d+)(?:.*?commId (?P<id>0x[0-9a-f]+))?"
    r".*?(?P<state>Init START|Init COMPLETE)?$"
)
_CALL = re.compile(
    r"(?P<op>[A-Z]\w+): opCount (?P<count>[0-9a-f]+) sendbuff \S+ recvbuff \S+ count (?P<n>\d+) datatype (?P<type>\d+)"
    r".*?comm (?P<comm>0x[0-9a-f]+) \[nranks=(?P<size>\d+)\]"
)
_NET = re.compile(
    r"Channel \d+(?:/\d+)? : (?P<a>\d+)\[\w+\] -> (?P<b>\d+)\[\w+\](?: \[\w+\])? via (?P<via>[\w/]+)(?P<rest>.*)"
)
_NETWORK = re.compile(r"Using network (?P<name>\S+)")
_TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
"""ncclDataType_t, nccl.h."""

_FOLLOWS = re.compile(
    r"connection (?:closed|reset)|closed by (?:remote )?peer|aborted|Connect to .* failed", re.IGNORECASE
)
_MAX_WARNINGS = 2000

Process = tuple[str, int]


def _accepts(file: Path, head: bytes) -> bool:
    return b" NCCL INFO " in head or b" NCCL WARN " in head or b" NCCL TRACE " in head


@dataclass
class _Member:
    """A process in a communicator. rank: UNKNOWN until a line states it."""

    comm_id: str
    rank: int
    size: int
    is_complete: bool = False
    n_calls: int = 0
    last: str = ""
    op: Op = Op.NONE
    count: int = UNKNOWN
    op_count: int = UNKNOWN


@dataclass
class _Job:
    """The statements of the lines. members: by process and communicator address. cut_off: processes with a cut log."""

    members: dict[tuple[Process, str], _Member] = field(default_factory=dict)
    networks: dict[Process, str] = field(default_factory=dict)
    has_gdr: dict[Process, bool] = field(default_factory=dict)
    warnings: list[tuple[Process, str, int]] = field(default_factory=list)
    devices: dict[Process, int] = field(default_factory=dict)
    cut_off: set[Process] = field(default_factory=set)
    n_lines: int = 0


def collect(files: Iterable[Path], statements: Statements) -> None:
    """Add the statements of some logs."""
    job = _Job()
    for file in files:
        writers = set()
        for raw in lines_of(file):
            if "NCCL" in raw and (match := _LINE.search(raw)):
                job.n_lines += 1
                writers.add(_take(job, match))
        if not has_last_line(file):
            job.cut_off |= writers
    _state(job, statements)
    statements.sources.append(f"NCCL logs of {counted(len(job.devices), 'process')}")


def _take(job: _Job, match: re.Match[str]) -> Process:
    """One line. Returns its process."""
    process = match["host"], int(match["pid"])
    job.devices.setdefault(process, int(match["device"]))
    text = match["text"]
    if match["level"] == "WARN":
        if len(job.warnings) < _MAX_WARNINGS:
            job.warnings.append((process, text, job.n_lines))
    elif call := _CALL.search(text):
        member = job.members.setdefault((process, call["comm"]), _Member("", UNKNOWN, int(call["size"])))
        member.n_calls += 1
        member.op_count = max(member.op_count, int(call["count"], 16))
        member.op = NCCL_OPS.get(call["op"], Op.NONE)
        member.count = int(call["n"])
        number = int(call["type"])
        member.last = f"{call['op']} [{call['n']}] {_TYPES[number] if number < len(_TYPES) else ''}".strip()
    elif init := _INIT.search(text):
        member = job.members.setdefault((process, init["comm"]), _Member("", UNKNOWN, 0))
        member.rank, member.size = int(init["rank"]), int(init["size"])
        member.comm_id = init["id"] or member.comm_id
        member.is_complete |= init["state"] == "Init COMPLETE"
    elif network := _NETWORK.search(text):
        job.networks[process] = network["name"]
    elif (channel := _NET.search(text)) and channel["via"].startswith("NET/"):
        job.has_gdr[process] = job.has_gdr.get(process, False) or "GDRDMA" in channel["via"] + channel["rest"]
    return process


def _state(job: _Job, statements: Statements) -> None:
    """Turn the lines into statements on ranks."""
    ranks = _ranks(job)
    for (host, pid), rank in ranks.items():
        statements.writers.add(rank)
        statements.hosts.setdefault(rank, host)
        statements.pids.setdefault(rank, pid)
    size = max((member.size for member in job.members.values()), default=UNKNOWN)
    statements.world_size = max(statements.world_size, size)
    if job.cut_off:
        statements.omit("NCCL logs cut off", len(job.cut_off))
    if _are_several_jobs(job):
        statements.gaps.append(
            Gap(
                "the NCCL logs come from several jobs or attempts",
                "Give the logs of one attempt: remove older files.",
            )
        )
        return
    for comm, members in _communicators(job).items():
        _add_progress(statements, comm, [m for m in members if m[0] not in job.cut_off], ranks)
    _add_transports(job, statements, ranks)
    for process, text, number in job.warnings:
        kind = "aftermath" if _FOLLOWS.search(text) else "remark"
        statements.failures.append(
            Failure(ranks.get(process, UNKNOWN), kind, f"NCCL WARN {text}", number, host=process[0])
        )
    if not any(member.n_calls for member in job.members.values()) and not statements.progress:
        statements.gaps.append(
            Gap(
                "the NCCL logs contain no calls", "Log them with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL."
            )
        )
    else:
        statements.gaps.append(
            Gap(
                "NCCL logs show calls that were made, not that they completed",
                "Also dump the stacks of all ranks.",
            )
        )


def _are_several_jobs(job: _Job) -> bool:
    """Whether two processes without a common communicator use one GPU: they did not run at the same time."""
    comms: dict[Process, set[str]] = {}
    for (process, _), member in job.members.items():
        comms.setdefault(process, set()).add(member.comm_id)
    users: dict[tuple[str, int], list[Process]] = {}
    for process in comms:
        if job.devices[process] >= 0 and "" not in comms[process]:
            users.setdefault((process[0], job.devices[process]), []).append(process)
    return any(not comms[own[0]] & comms[other] for own in users.values() for other in own[1:])


def _ranks(job: _Job) -> dict[Process, int]:
    """The rank of each process: its rank in the largest communicator, otherwise by host, device and process id."""
    size = max((member.size for member in job.members.values() if member.rank != UNKNOWN), default=0)
    ranks: dict[Process, int] = {}
    for (process, _), member in job.members.items():
        if member.rank != UNKNOWN and member.size == size:
            ranks.setdefault(process, member.rank)
    if set(ranks) >= set(job.devices) and len(set(ranks.values())) == len(ranks):
        return ranks
    left = [
        process
        for process in sorted(job.devices, key=lambda p: (p[0], job.devices[p], p[1]))
        if process not in ranks
    ]
    free = [rank for rank in range(len(job.devices) + len(ranks)) if rank not in ranks.values()]
    return ranks | dict(zip(left, free, strict=False))


def _communicators(job: _Job) -> dict[str, list[tuple[Process, _Member]]]:
    """The members of each communicator: by its id, otherwise by equal size and position in the processes' order."""
    by_name: dict[str, list[tuple[Process, _Member]]] = {}
    n_of_size: dict[tuple[Process, int], int] = {}
    for (process, _), member in job.members.items():
        ordinal = n_of_size[process, member.size] = n_of_size.get((process, member.size), 0) + 1
        name = member.comm_id or f"{member.size} ranks, number {ordinal}"
        by_name.setdefault(name, []).append((process, member))
    return by_name


def _add_progress(
    statements: Statements, comm: str, members: list[tuple[Process, _Member]], ranks: dict[Process, int]
) -> None:
    """The calls of each member; the ranks that made most are ahead."""
    if not members:
        return
    statements.groups[comm] = f"communicator {comm}"
    calls = [member.n_calls for _, member in members]
    most = max(calls)
    if most == 0 and any(not member.is_complete and member.comm_id for _, member in members):
        _add_initialisation(statements, comm, members, ranks)
        return
    for process, member in members:
        statements.members.setdefault(comm, set()).add(ranks[process])
        if most == 0:
            continue
        progress = statements.progress.setdefault((comm, ranks[process]), Progress(comm))
        progress.enqueued = member.n_calls - 1
        progress.completed = min(calls) - 1
        progress.words = member.last
        if member.comm_id:  # otherwise the members are a guess, and a difference between them decides nothing
            progress.op, progress.count = member.op, member.count
        if member.n_calls == most and most > min(calls):
            progress.open_seq = member.n_calls - 1


def _add_initialisation(
    statements: Statements, comm: str, members: list[tuple[Process, _Member]], ranks: dict[Process, int]
) -> None:
    """A communicator that is being created: its creation is round 0. Ranks without a line have not begun it."""
    size = max(member.size for _, member in members)
    known = set(range(size)) if size == statements.world_size else set()
    statements.members[comm] = known | {ranks[process] for process, _ in members}
    for process, member in members:
        progress = statements.at(comm, ranks[process])
        progress.enqueued, progress.op, progress.words = 0, Op.COMM_INIT, "ncclCommInitRank"
        progress.completed = 0 if member.is_complete else UNKNOWN
        progress.open_seq = UNKNOWN if member.is_complete else 0


def _add_transports(job: _Job, statements: Statements, ranks: dict[Process, int]) -> None:
    """Processes whose network differs from the network of most: fallen back to sockets, or without GPUDirect."""
    for states, words in (
        (job.networks, "uses network {0} where most ranks use {1}"),
        (
            {p: "GPUDirect" if gdr else "no GPUDirect" for p, gdr in job.has_gdr.items()},
            "has {0} where most ranks have {1}",
        ),
    ):
        values = list(states.values())
        most_common = max(set(values), key=values.count) if values else ""
        for process, value in states.items():
            if value != most_common and 2 * values.count(most_common) > len(values):
                text = words.format(value, most_common)
                statements.failures.append(
                    Failure(ranks.get(process, UNKNOWN), "remark", text, 0, host=process[0])
                )


IMPORTER = Importer("NCCL log (NCCL_DEBUG=INFO or TRACE)", _accepts, collect=collect)
