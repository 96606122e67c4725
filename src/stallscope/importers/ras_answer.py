"""Answers of NCCL's RAS service, as JSON (ncclras -f json, NCCL 2.28.7 and newer) or as text (NCCL 2.24 and newer).

The formats follow src/ras/client_support.cc (NVIDIA/nccl, 2.24 to 2.29; commit 5067397c). A file may hold several
answers, and lines of the socket's protocol ("OK", "SERVER PROTOCOL 2") around them. The text lists the counts of a
communicator only where its ranks differ, with the ranks of the smaller groups; the text states no time.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stallscope.errors import BadTrace
from stallscope.events.layout import UNKNOWN
from stallscope.importers.texts import text_of

_MAX_BYTES = 200 << 20
_MAX_RANKS = 1 << 20
IN_PROGRESS = 7  # ncclInProgress, nccl.h


@dataclass(frozen=True)
class Member:
    """A rank in a communicator. counts: entered collectives by operation, None where it did not answer.

    init_state, async_error: ncclResult_t, 0 for success.
    """

    comm_hash: int
    rank: int
    size: int
    host: str = ""
    pid: int = UNKNOWN
    device: int = UNKNOWN
    counts: dict[str, int] | None = None
    is_dead: bool = False
    is_unresponsive: bool = False
    init_state: int = 0
    async_error: int = 0
    is_aborted: bool = False

    @property
    def entered(self) -> int:
        """Collectives of all operations."""
        return sum(self.counts.values()) if self.counts else 0


@dataclass(frozen=True)
class Answer:
    """at_ns: wall time, UNKNOWN in text."""

    at_ns: int
    version: str
    members: tuple[Member, ...]


def is_answer(head: bytes) -> bool:
    """Whether a file holds answers, by its first bytes."""
    return (b'"nccl_version"' in head and b'"communicators_count"' in head) or (
        re.search(rb"Job summary\r?\n===", head) is not None and b"Communicators..." in head
    )


def answers_of(file: Path) -> list[Answer]:
    """The answers in a file, in its order. Raises BadTrace."""
    return answers_in(text_of(file, _MAX_BYTES).replace("\r\n", "\n"), str(file))


def answers_in(text: str, source: str) -> list[Answer]:
    """The answers in a text. source: its name in messages. Raises BadTrace."""
    try:
        if '"communicators_count"' in text:
            return [_from_json(value) for value in _objects(text)]
        parts = [part for part in re.split(r"(?m)^(?=NCCL version )", text) if "Communicators" in part]
        if parts and not text.endswith("\n"):
            parts[-1] = parts[-1].rpartition("\n")[0]
        return [answer for part in parts if (answer := _from_text(part))]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
        raise BadTrace(
            f"{source} is a damaged answer of ncclras ({reason}): ask again with -f json"
        ) from error


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a text in order; a truncated last object is left out."""
    decoder, at, n_objects = json.JSONDecoder(), 0, 0
    while (begin := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, begin)
        except ValueError:
            if n_objects:
                return
            raise
        n_objects += 1
        yield value


def _from_json(value: dict[str, Any]) -> Answer:
    at = datetime.strptime(str(value["timestamp"]), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    members = tuple(member for comm in value["communicators"] for member in _json_members(comm))
    return Answer(int(at.timestamp()) * 10**9, str(value["nccl_version"])[:64], members)


def _json_members(comm: dict[str, Any]) -> Iterator[Member]:
    comm_hash, size = int(str(comm["hash"]), 16) & (2**64 - 1), _number(comm["size"])
    for row in [*comm.get("ranks", ()), *comm.get("missing_ranks", ())]:
        state = row.get("status", {})
        counts = row.get("collective_counts")
        yield Member(
            comm_hash=comm_hash,
            rank=_number(row["rank"]),
            size=size,
            host=str(row.get("host", ""))[:256],
            pid=_number(row["pid"]) if row.get("pid", UNKNOWN) != UNKNOWN else UNKNOWN,
            device=_number(row["cuda_dev"]) if "cuda_dev" in row else UNKNOWN,
            counts=None if counts is None else {str(op): _number(n) for op, n in counts.items()},
            is_dead=bool(state.get("considered_dead")),
            is_unresponsive=bool(state.get("unresponsive")),
            init_state=_number(state.get("init_state", 0)),
            async_error=_number(state.get("async_error", 0)),
            is_aborted=bool(state.get("abort_flag")),
        )


def _number(value: object) -> int:
    number = int(value) if isinstance(value, int | str) else UNKNOWN
    if not 0 <= number < 2**31:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return number


_GROUP_ROW = re.compile(r"^ *(\d+) +(\d+) +(\d+) +(\S+) +(\S+) +(\d+) +(\S+) +(\S+)\s*$")
_COMM = re.compile(r"^#(\d+)-(\d+) \(([0-9a-f]+)\) (\w+)")
_OPERATION = re.compile(r"Communicator ranks have different (\w+) operation counts")
_MANY = re.compile(
    r"^  (\d+) ranks? (?:have|has) (?:launched up to operation (\d+)|(not launched) any operations)"
)
_OWN = re.compile(r"^  Rank (\d+)(?: has (?:launched up to operation (\d+)|(not launched) any operations))?")
_OWNER = re.compile(r"GPU (\d+)\S* managed by process (\d+) on node (\S+)")
_MANY_STATUS = re.compile(r"^  (\d+) ranks? (?:have|has) status (\w+)")
_OWN_STATUS = re.compile(r"^  Rank (\d+) has status (\w+)")
_DEAD_PROCESS = re.compile(r"^  Process (\d+) on node (\S+) managing GPUs? (.*)")


@dataclass
class _Comm:
    """The state of one communicator while its lines are read. counts, status: by rank; rest: of ranks not
    listed. listed: ranks that the lines on an operation cover.
    """

    comm_hash: int
    size: int
    owners: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    counts: dict[str, dict[int, int]] = field(default_factory=dict)
    rest: dict[str, int] = field(default_factory=dict)
    status: dict[int, str] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    listed: dict[str, int] = field(default_factory=dict)

    def differs(self) -> bool:
        """Whether lines state how the ranks differ."""
        return bool(self.listed or self.status or self.missing)

    def lacks_ranks(self) -> bool:
        """Whether the counts of an operation cover only a part of the ranks: the text ends in the middle."""
        return any(0 < n < self.size - len(self.missing) for n in self.listed.values())


def _from_text(text: str) -> Answer | None:
    """One answer; None if it ends in the middle."""
    if not re.search(r"(?m)^Warnings$", text):
        return None
    version = re.match(r"NCCL version (\S+)", text)
    sizes: dict[int, int] = {}
    comms: dict[str, _Comm] = {}
    dead: dict[tuple[str, int], bool] = {}
    current, error, operation, group, n_uneven = None, "", "", 0, 0
    for line in text.splitlines():
        if row := _GROUP_ROW.match(line):
            sizes[int(row[1])] = int(row[5].split("-")[-1])
            n_uneven += int(row[2]) if "MISMATCH" in row[8] else 0
        elif title := _COMM.match(line):
            size = min(sizes.get(int(title[1]), 0), _MAX_RANKS)
            current = comms.setdefault(title[3], _Comm(int(title[3], 16), size))
            error, operation = title[4], ""
        elif line in ("DEAD", "INCOMPLETE", "TIMEOUT"):
            current, error = None, line
        elif current is None:
            if error == "DEAD" and (process := _DEAD_PROCESS.match(line)):
                dead[process[2], int(process[1])] = True
        elif match := _OPERATION.search(line):
            operation, group = match[1], 0
        elif operation and (many := _MANY.match(line)):
            group = _number(many[2] or 0)
            current.listed[operation] = current.listed.get(operation, 0) + _number(many[1])
            current.rest[operation] = max(current.rest.get(operation, 0), group)
        elif many := _MANY_STATUS.match(line):
            group = 0
            operation = ""
        elif own := _OWN.match(line):
            _add_rank(current, line, own, operation=operation, group=group, error=error)
    if any(comm.lacks_ranks() for comm in comms.values()) or n_uneven > sum(
        map(_Comm.differs, comms.values())
    ):
        return None
    members = tuple(member for comm in comms.values() for member in _text_members(comm, dead))
    hosts = {member.host for member in members} - {""}
    if len(hosts) == 1:  # the text lists only the hosts of ranks that differ
        members = tuple(replace(member, host=next(iter(hosts))) for member in members)
    return Answer(UNKNOWN, version[1][:64] if version else "", members)


def _add_rank(comm: _Comm, line: str, own: re.Match[str], *, operation: str, group: int, error: str) -> None:
    rank = _number(own[1])
    if owner := _OWNER.search(line):
        comm.owners[rank] = owner[3][:256], _number(owner[2]), _number(owner[1])
    if error == "INCOMPLETE":
        comm.missing.add(rank)
    elif status := _OWN_STATUS.match(line):
        comm.status[rank] = status[2]
    elif operation:
        count = _number(own[2]) if own[2] else 0 if own[3] else group
        if own[2] or own[3]:  # otherwise a rank of the group above
            comm.listed[operation] = comm.listed.get(operation, 0) + 1
        comm.counts.setdefault(operation, {})[rank] = count


def _text_members(comm: _Comm, dead: dict[tuple[str, int], bool]) -> Iterator[Member]:
    """The members of a communicator. A rank that no line names has the count of the largest group."""
    listed = {
        *comm.owners,
        *comm.missing,
        *comm.status,
        *(rank for own in comm.counts.values() for rank in own),
    }
    for rank in range(max(comm.size, max(listed, default=-1) + 1)):
        host, pid, device = comm.owners.get(rank, ("", UNKNOWN, UNKNOWN))
        operations = {*comm.counts, *comm.rest}
        is_missing = rank in comm.missing
        counts = {op: comm.counts.get(op, {}).get(rank, comm.rest.get(op, 0)) for op in operations}
        yield Member(
            comm_hash=comm.comm_hash,
            rank=rank,
            size=comm.size or len(listed),
            host=host,
            pid=pid,
            device=device,
            counts=None if is_missing else counts,
            is_dead=dead.get((host, pid), False),
            init_state=IN_PROGRESS if comm.status.get(rank) == "INIT" else 0,
            is_aborted=comm.status.get(rank) == "ABORT",
        )
