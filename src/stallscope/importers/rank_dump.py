"""One flight-recorder dump, field by field: the process groups of its rank, its calls, and how far they got.

A dump is a table with pg_config (members of the groups), pg_status (counters) and entries (calls), see
torch/csrc/distributed/c10d/FlightRecorder; formats 2.0 to 2.10, as pickle or JSON. PyTorch 2.1 and 2.2 write the bare
list of entries (TraceUtils.h, v2.2.0). Everything in a dump comes from outside: a field of another kind than PyTorch
writes is an error. A dump does not name its rank: see rank_of_dump().
"""

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from stallscope.errors import BadTrace
from stallscope.events.layout import UNKNOWN
from stallscope.importers.dump_call import Call, OddField, call_of, integer, text
from stallscope.importers.file_ranks import ranks_in_name
from stallscope.importers.plain_pickle import MAX_BYTES, plain
from stallscope.importers.texts import head_of, opened, text_of

_MAX_RANKS = 1 << 20
_MAX_MEMBERSHIPS = 4_000_000  # of all groups together


@dataclass(frozen=True)
class Group:
    """A process group as one rank knows it. members: ranks of the job by rank in the group; () unknown."""

    name: str
    description: str
    members: tuple[int, ...]

    @cached_property
    def comm_hash(self) -> int:
        identity = f"{self.name}|{self.members or self.description}"
        return int.from_bytes(
            blake2b(identity.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
        )

    @property
    def words(self) -> str:
        """Its known description and name: default_pg (group 0)."""
        if self.description and self.description != "undefined":
            return f"{self.description[:60]} (group {self.name[:60]})"
        return f"group {self.name[:60]}"


@dataclass(frozen=True)
class Dump:
    """The content of one rank's file. counters: last entered and completed seq, by group name."""

    file: Path
    rank: int
    groups: dict[str, Group]
    calls: list[Call]
    counters: dict[str, tuple[int, int]]
    knows_starts: bool
    nccl_version: str
    counts_p2p: set[str] = field(default_factory=set)


def dump_of(file: Path, known: dict[tuple[str, str, str], Group]) -> Dump:
    """One dump. known: groups by their texts, as the dumps so far state them; grows."""
    content = _content(file)
    if isinstance(content, list):
        content = {"entries": content}
    if not isinstance(content, dict) or not isinstance(content.get("entries", []), list):
        raise BadTrace(f"{file} is not a flight-recorder dump (no list of entries): check the path")
    try:
        groups = _groups(content.get("pg_config"), known)
        calls, ids = _calls(content.get("entries", []), groups)
        return Dump(
            file=file,
            rank=rank_of_dump(file, groups),
            groups=groups,
            calls=calls,
            counters=_counters(content.get("pg_status"), groups, ids),
            knows_starts=_knows_starts(content, calls),
            nccl_version=text(content.get("nccl_version", ""), "nccl_version")[:32],
            counts_p2p={call.group for call in calls if call.is_p2p},
        )
    except OddField as odd:
        raise BadTrace(f"{file} is not in PyTorch's format ({odd}): copy the original again") from odd


def _content(file: Path) -> Any:
    """The values of a pickle or of JSON."""
    if head_of(file).lstrip()[:1] in (b"{", b"["):
        try:
            return json.loads(text_of(file, MAX_BYTES))
        except (ValueError, RecursionError) as error:
            raise BadTrace(f"{file} is damaged JSON ({error}): copy it again") from error
    try:
        with opened(file) as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadTrace(f"cannot read {file}: {error.strerror or error}; check its permissions") from error
    return plain(data, str(file))


def _groups(output: object, known: dict[tuple[str, str, str], Group]) -> dict[str, Group]:
    if output is None:
        return {}
    if not isinstance(output, dict):
        raise OddField("pg_config is not a table")
    result = {}
    for key, entry in output.items():
        if not isinstance(entry, dict):
            raise OddField("a group in pg_config is not a table")
        name, description = (
            text(entry.get("name", key), "a group's name"),
            text(entry.get("desc", ""), "desc"),
        )
        ranks = entry.get("ranks")
        same = (name, description, ranks if isinstance(ranks, str) else repr(_members(ranks)))
        if same not in known:
            known[same] = Group(name, description, _members(ranks))
            if sum(len(group.members) for group in known.values()) > _MAX_MEMBERSHIPS:
                raise OddField(f"more than {_MAX_MEMBERSHIPS:,} memberships")
        result[name] = known[same]
    return result


def _members(value: object) -> tuple[int, ...]:
    """Ranks of a group: a list, or its text; () if they are not stated."""
    if isinstance(value, str):
        if not re.fullmatch(r"\[[\d, ]{0,8000000}\]", value):
            if value.strip():
                raise OddField(f"a group's ranks are {value[:40]!r}")
            return ()
        value = [int(word) for word in re.findall(r"\d{1,9}", value)]
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise OddField("a group's ranks are not a list")
    ranks = tuple(integer(rank, "a rank", low=0, high=_MAX_RANKS) for rank in value)
    if len(set(ranks)) != len(ranks):
        raise OddField("a group names a rank twice")
    return ranks


def rank_of_dump(file: Path, groups: dict[str, Group]) -> int:
    """The rank of a dump: by its file's or folder's name, or the only member that all its groups share.

    A number that is not a member of every group is not the rank.
    """
    memberships = [set(group.members) for group in groups.values() if group.members]
    common = set.intersection(*memberships) if memberships else set()
    numbers = ranks_in_name(file)
    ranks = [number for number in numbers if not memberships or number in common]
    if len(common) == 1:
        return common.pop()
    if ranks:
        return ranks[0]
    if numbers and memberships:
        raise BadTrace(
            f"{file}: its name contains no rank of its process groups: name it after its rank, like _dump_3"
        )
    raise BadTrace(f"{file}: its name contains no rank: name it after its rank, like _dump_3")


def _calls(entries: list[Any], groups: dict[str, Group]) -> tuple[list[Call], dict[str, str]]:
    """The entries, each round of a group once; and the names of the groups by pg_id."""
    result: dict[tuple[object, ...], Call] = {}
    ids: dict[str, str] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise OddField(f"entry {number} is not a table")
        call = call_of(entry)
        if "pg_id" in entry:
            ids[text(entry["pg_id"], "pg_id")] = call.group
        if call.group not in groups:
            groups[call.group] = Group(call.group, _description(entry), ())
        # The parts of a coalesced call share one number and come before the whole.
        key = (call.group, call.op, call.peer, number) if call.seq == UNKNOWN else (call.group, call.seq)
        known = result.get(key)
        result[key] = call if known is None else _joined(known, call)
    return list(result.values()), ids


def _joined(first: Call, second: Call) -> Call:
    open_one = second if first.is_complete else first
    return first if open_one is first else second


def _description(entry: dict[str, Any]) -> str:
    response = entry.get("process_group")
    return (
        text(response[1], "process_group")
        if isinstance(response, (list, tuple)) and len(response) > 1
        else ""
    )


def _knows_starts(dump: dict[str, Any], calls: list[Call]) -> bool:
    """Whether the dump records starts on the GPU; by default PyTorch records none and every call is "scheduled"."""
    status = dump.get("pg_status")
    rows = [row for row in status.values() if isinstance(row, dict)] if isinstance(status, dict) else []
    counted = [row.get("last_started_collective") for row in rows]
    return any(integer(n, "last_started_collective") > 0 for n in counted) or any(
        call.is_started and not call.is_complete for call in calls
    )


def _counters(status: object, groups: dict[str, Group], ids: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Last entered and completed seq by group name.

    pg_status uses a number that each rank gives its groups as it makes them. The entries show which name has
    which number; for the others, numbers and names in numerical order belong together, if that agrees with all
    entries.
    """
    if not isinstance(status, dict):
        return {}
    names = dict(ids)
    keys = [text(key, "a group number") for key in status]
    if (
        len(keys) == len(groups)
        and all(key.isdecimal() for key in keys)
        and all(n.isdecimal() for n in groups)
    ):
        in_order = dict(zip(sorted(keys, key=int), sorted(groups, key=int), strict=True))
        if all(in_order.get(number) == name for number, name in ids.items()):
            names = in_order
    result = {}
    for key, entry in status.items():
        name = names.get(str(key))
        if name is None or not isinstance(entry, dict):
            continue
        result[name] = (
            integer(entry.get("last_enqueued_collective"), "last_enqueued_collective"),
            integer(entry.get("last_completed_collective"), "last_completed_collective"),
        )
    return result
