"""One flight-recorder dump, field by field: the process groups of its rank, its calls, and how far they got.

A dump is a table with pg_config (members of the groups), pg_status (counters) and entries (calls), see
torch/csrc/distributed/c10d/FlightRecorder; formats 2.0 to 2.10. Everything in it comes from outside: a field of another
kind than PyTorch writes is an error. It does not tell its rank: that is the last number in the file's name, or what
its groups have in common.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

from stallscope.errors import BadTrace
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Datatype, Op
from stallscope.importers.plain_pickle import MOST_BYTES, plain

_MOST_RANKS = 1 << 20
_MOST_MEMBERSHIPS = 4_000_000  # of all groups together
_NOT_ALIKE = (Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER)  # ranks may give different counts

_DATATYPES = {
    "Byte": Datatype.UINT8,
    "Bool": Datatype.UINT8,
    "Char": Datatype.INT8,
    "Int": Datatype.INT32,
    "Long": Datatype.INT64,
    "Half": Datatype.FLOAT16,
    "BFloat16": Datatype.BFLOAT16,
    "Float": Datatype.FLOAT32,
    "Double": Datatype.FLOAT64,
    "Float8_e4m3fn": Datatype.FLOAT8_E4M3,
    "Float8_e5m2": Datatype.FLOAT8_E5M2,
}
_OPS = (  # the first that the name holds; longer names before those they hold
    ("reduce_scatter", Op.REDUCE_SCATTER),
    ("all_reduce", Op.ALL_REDUCE),
    ("allreduce", Op.ALL_REDUCE),
    ("all_gather", Op.ALL_GATHER),
    ("allgather", Op.ALL_GATHER),
    ("all_to_all", Op.ALL_TO_ALL),
    ("alltoall", Op.ALL_TO_ALL),
    ("barrier", Op.ALL_REDUCE),  # made of one
    ("broadcast", Op.BROADCAST),
    ("coalesced", Op.GROUP),
    ("scatter", Op.SCATTER),
    ("gather", Op.GATHER),
    ("reduce", Op.REDUCE),
)
_PEER = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")


@dataclass(frozen=True)
class Group:
    """A process group as one rank knows it. members: ranks of the job by rank in the group; () not told."""

    name: str
    description: str
    members: tuple[int, ...]

    @cached_property
    def comm_hash(self) -> int:
        told = f"{self.name}|{self.members or self.description}"
        return int.from_bytes(
            blake2b(told.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
        )


@dataclass(frozen=True)
class Call:
    """One entry of a dump. seq: unknown for point-to-point; collective_seq: the group's last collective by then."""

    group: str
    op: Op
    created_ns: int
    seq: int
    collective_seq: int
    peer: int
    count: int
    datatype: Datatype
    is_p2p: bool
    is_complete: bool
    is_started: bool


@dataclass(frozen=True)
class Dump:
    """What one rank's file tells. counters: last entered and completed seq, by group name."""

    rank: int
    groups: dict[str, Group]
    calls: list[Call]
    counters: dict[str, tuple[int, int]]
    knows_starts: bool
    nccl_version: str
    counts_p2p: set[str] = field(default_factory=set)


def dump_of(file: Path, known: dict[tuple[str, str, str], Group]) -> Dump:
    """One dump. known: groups by their texts, as the dumps so far tell them; grows."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise BadTrace(f"{file} is too large for a dump (at most {MOST_BYTES:,} bytes)")
        data = file.read_bytes()
    except OSError as error:
        raise BadTrace(f"cannot read {file}: {error.strerror or error}; check that you may") from error
    told = plain(data, str(file))
    if not isinstance(told, dict) or not isinstance(told.get("entries", []), list):
        raise BadTrace(f"{file} is no flight-recorder dump (no list of entries): check the path")
    try:
        groups = _groups(told.get("pg_config"), known)
        calls, ids = _calls(told.get("entries", []), groups)
        rank = _rank(file, groups)
        return Dump(
            rank=rank,
            groups=groups,
            calls=calls,
            counters=_counters(told.get("pg_status"), groups, ids),
            knows_starts=_knows_starts(told, calls),
            nccl_version=_text(told.get("nccl_version", ""), "nccl_version")[:32],
            counts_p2p={call.group for call in calls if call.is_p2p},
        )
    except _Odd as odd:
        raise BadTrace(f"{file} is not as PyTorch writes it ({odd}): was it changed?") from odd


class _Odd(Exception):
    """A field of a dump that cannot be understood."""


def _integer(value: object, what: str, *, low: int = -1, high: int = (1 << 62) - 1) -> int:
    if value is None:
        return UNKNOWN
    if type(value) is not int or not low <= value <= high:
        raise _Odd(f"{what} is {str(value)[:40] if isinstance(value, (int, str)) else type(value).__name__}")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, (str, int)):
        raise _Odd(f"{what} is a {type(value).__name__}")
    return str(value)[:400]


def _groups(told: object, known: dict[tuple[str, str, str], Group]) -> dict[str, Group]:
    if told is None:
        return {}
    if not isinstance(told, dict):
        raise _Odd("pg_config is no table")
    found = {}
    for key, one in told.items():
        if not isinstance(one, dict):
            raise _Odd("a group in pg_config is no table")
        name, description = _text(one.get("name", key), "a group's name"), _text(one.get("desc", ""), "desc")
        ranks = one.get("ranks")
        same = (name, description, ranks if isinstance(ranks, str) else repr(_members(ranks)))
        if same not in known:
            known[same] = Group(name, description, _members(ranks))
            if sum(len(group.members) for group in known.values()) > _MOST_MEMBERSHIPS:
                raise _Odd(f"more than {_MOST_MEMBERSHIPS:,} memberships")
        found[name] = known[same]
    return found


def _members(told: object) -> tuple[int, ...]:
    """Ranks of a group: a list, or its text; () when not told."""
    if isinstance(told, str):
        if not re.fullmatch(r"\[[\d, ]{0,8000000}\]", told):
            if told.strip():
                raise _Odd(f"a group's ranks are {told[:40]!r}")
            return ()
        told = [int(word) for word in re.findall(r"\d{1,9}", told)]
    if told is None:
        return ()
    if not isinstance(told, (list, tuple)):
        raise _Odd("a group's ranks are no list")
    ranks = tuple(_integer(rank, "a rank", low=0, high=_MOST_RANKS) for rank in told)
    if len(set(ranks)) != len(ranks):
        raise _Odd("a group names a rank twice")
    return ranks


def _rank(file: Path, groups: dict[str, Group]) -> int:
    """The rank that a dump is from: the last number in the file's name, or what all its groups have in common."""
    told = [set(group.members) for group in groups.values() if group.members]
    common = set.intersection(*told) if told else set()
    numbers = re.findall(r"\d+", file.name)
    if numbers and len(numbers[-1]) <= 7 and (not told or int(numbers[-1]) in common):
        return int(numbers[-1])
    if len(common) == 1:
        return common.pop()
    if numbers and told:
        raise BadTrace(
            f"{file}: its name says rank {numbers[-1][:9]}, its process groups say otherwise: "
            "name it after its rank, like _dump_3"
        )
    raise BadTrace(f"{file}: its name does not end in its rank: name it after its rank, like _dump_3")


def _calls(entries: list[Any], groups: dict[str, Group]) -> tuple[list[Call], dict[str, str]]:
    """The entries, each round of a group once; and the names of the groups by pg_id."""
    found: dict[tuple[object, ...], Call] = {}
    ids: dict[str, str] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise _Odd(f"entry {number} is no table")
        call = _call(entry)
        if "pg_id" in entry:
            ids[_text(entry["pg_id"], "pg_id")] = call.group
        if call.group not in groups:
            groups[call.group] = Group(call.group, _description(entry), ())
        # The parts of a coalesced call share one number and come before the whole.
        key = (call.group, call.op, call.peer, number) if call.seq == UNKNOWN else (call.group, call.seq)
        known = found.get(key)
        found[key] = call if known is None else _joined(known, call)
    return list(found.values()), ids


def _joined(first: Call, second: Call) -> Call:
    open_one = second if first.is_complete else first
    return first if open_one is first else second


def _description(entry: dict[str, Any]) -> str:
    told = entry.get("process_group")
    return _text(told[1], "process_group") if isinstance(told, (list, tuple)) and len(told) > 1 else ""


def _call(entry: dict[str, Any]) -> Call:
    told = entry.get("process_group", entry.get("pg_name", entry.get("pg_id")))
    group = _text(told[0] if isinstance(told, (list, tuple)) and told else told, "process_group")
    name = _text(entry.get("profiling_name", ""), "profiling_name").removeprefix("nccl:")
    op, peer = _operation(name)
    is_p2p = op in (Op.SEND, Op.RECV) or entry.get("is_p2p") is True
    collective_seq = _integer(entry.get("collective_seq_id", entry.get("seq_id")), "collective_seq_id")
    datatype = _datatype(entry.get("input_dtypes"))
    state = _text(entry.get("state", "scheduled"), "state")
    started = entry.get("time_discovered_started_ns")
    return Call(
        group=group,
        op=op,
        created_ns=max(
            _integer(entry.get("time_created_ns", entry.get("time_created_us")), "time_created"), 0
        ),
        seq=UNKNOWN if is_p2p else collective_seq,
        collective_seq=collective_seq,
        peer=peer,
        count=UNKNOWN if op in _NOT_ALIKE else _count(entry.get("input_sizes")),
        datatype=datatype,
        is_p2p=is_p2p,
        is_complete=state == "completed" or bool(entry.get("retired")),
        is_started=state in ("started", "completed") or isinstance(started, int),
    )


def _operation(name: str) -> tuple[Op, int]:
    """The operation that a profiling name tells, and the peer's rank in the group for send and recv."""
    pair = _PEER.match(name)
    if pair:
        return (Op.SEND if pair[1] == "send" else Op.RECV), int(pair[3])
    return next((op for word, op in _OPS if word in name.lower()), Op.NONE), UNKNOWN


def _count(sizes: object) -> int:
    """Elements of all tensors; unknown when not told or beyond reason."""
    if not isinstance(sizes, (list, tuple)):
        return UNKNOWN
    total = 0
    for shape in sizes[:65536]:
        if not isinstance(shape, (list, tuple)) or len(shape) > 64:
            raise _Odd("input_sizes is no list of shapes")
        total += prod(_integer(size, "a size", low=0, high=1 << 48) for size in shape)
    return total if total < 1 << 50 else UNKNOWN


def _datatype(told: object) -> Datatype:
    first = told[0] if isinstance(told, (list, tuple)) and told else None
    return _DATATYPES.get(first, Datatype.NONE) if isinstance(first, str) else Datatype.NONE


def _knows_starts(told: dict[str, Any], calls: list[Call]) -> bool:
    """Whether the dump tells starts on the GPU; by default PyTorch records none and every call is "scheduled"."""
    status = told.get("pg_status")
    rows = [one for one in status.values() if isinstance(one, dict)] if isinstance(status, dict) else []
    counted = [one.get("last_started_collective") for one in rows]
    return any(isinstance(n, int) and n > 0 for n in counted) or any(
        call.is_started and not call.is_complete for call in calls
    )


def _counters(told: object, groups: dict[str, Group], ids: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Last entered and completed seq by group name.

    pg_status goes by a number that each rank gives its groups as it makes them. The entries tell which name has
    which number; for the others, numbers and names in numerical order belong together, if that agrees with all
    entries.
    """
    if not isinstance(told, dict):
        return {}
    names = dict(ids)
    keys = [_text(key, "a group number") for key in told]
    if (
        len(keys) == len(groups)
        and all(key.isdecimal() for key in keys)
        and all(n.isdecimal() for n in groups)
    ):
        in_order = dict(zip(sorted(keys, key=int), sorted(groups, key=int), strict=True))
        if all(in_order.get(number) == name for number, name in ids.items()):
            names = in_order
    found = {}
    for key, one in told.items():
        name = names.get(str(key))
        if name is None or not isinstance(one, dict):
            continue
        found[name] = (
            _integer(one.get("last_enqueued_collective"), "last_enqueued_collective"),
            _integer(one.get("last_completed_collective"), "last_completed_collective"),
        )
    return found
