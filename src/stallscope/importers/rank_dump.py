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
from math import prod
from pathlib import Path
from typing import Any

from stallscope.errors import BadTrace
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Datatype, Op
from stallscope.importers.file_ranks import ranks_in_name
from stallscope.importers.plain_pickle import MOST_BYTES, plain
from stallscope.importers.texts import head_of, opened, text_of

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
_OPS = (  # the first entry that the name contains; longer names before their parts
    ("reduce_scatter", Op.REDUCE_SCATTER),
    ("all_reduce", Op.ALL_REDUCE),
    ("allreduce", Op.ALL_REDUCE),
    ("all_gather", Op.ALL_GATHER),
    ("allgather", Op.ALL_GATHER),
    ("all_to_all", Op.ALL_TO_ALL),
    ("alltoall", Op.ALL_TO_ALL),
    ("barrier", Op.ALL_REDUCE),  # implemented by an all-reduce
    ("broadcast", Op.BROADCAST),
    ("coalesced", Op.GROUP),
    ("scatter", Op.SCATTER),
    ("gather", Op.GATHER),
    ("reduce", Op.REDUCE),
)
_INSTALLED = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<frozen |^\?\?|\.(?:cpp|cc|h|so)\b|/torch/"
)
_PEER = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})")


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
class Call:
    """One entry of a dump. seq: unknown for point-to-point; collective_seq: the group's last collective by then.

    words: the operation with its sizes and types, as PyTorch names them. frame: the caller's line, "" where unknown.
    """

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
    words: str = ""
    frame: str = ""


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
            nccl_version=_text(content.get("nccl_version", ""), "nccl_version")[:32],
            counts_p2p={call.group for call in calls if call.is_p2p},
        )
    except _Odd as odd:
        raise BadTrace(f"{file} is not as PyTorch writes it ({odd}): was it changed?") from odd


def _content(file: Path) -> Any:
    """The values of a pickle or of JSON."""
    if head_of(file).lstrip()[:1] in (b"{", b"["):
        try:
            return json.loads(text_of(file, MOST_BYTES))
        except (ValueError, RecursionError) as error:
            raise BadTrace(f"{file} is damaged JSON ({error}): copy it again") from error
    try:
        with opened(file) as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadTrace(f"cannot read {file}: {error.strerror or error}; check its permissions") from error
    return plain(data, str(file))


class _Odd(Exception):
    """A field of a dump that cannot be understood."""


def _integer(value: object, what: str, *, low: int = -1, high: int = (1 << 62) - 1) -> int:
    if value is None:
        return UNKNOWN
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):  # JSON dumps write counters as text
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        raise _Odd(f"{what} is {str(value)[:40] if isinstance(value, (int, str)) else type(value).__name__}")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, (str, int)):
        raise _Odd(f"{what} is a {type(value).__name__}")
    return str(value)[:400]


def _groups(output: object, known: dict[tuple[str, str, str], Group]) -> dict[str, Group]:
    if output is None:
        return {}
    if not isinstance(output, dict):
        raise _Odd("pg_config is not a table")
    result = {}
    for key, entry in output.items():
        if not isinstance(entry, dict):
            raise _Odd("a group in pg_config is not a table")
        name, description = (
            _text(entry.get("name", key), "a group's name"),
            _text(entry.get("desc", ""), "desc"),
        )
        ranks = entry.get("ranks")
        same = (name, description, ranks if isinstance(ranks, str) else repr(_members(ranks)))
        if same not in known:
            known[same] = Group(name, description, _members(ranks))
            if sum(len(group.members) for group in known.values()) > _MOST_MEMBERSHIPS:
                raise _Odd(f"more than {_MOST_MEMBERSHIPS:,} memberships")
        result[name] = known[same]
    return result


def _members(value: object) -> tuple[int, ...]:
    """Ranks of a group: a list, or its text; () if they are not stated."""
    if isinstance(value, str):
        if not re.fullmatch(r"\[[\d, ]{0,8000000}\]", value):
            if value.strip():
                raise _Odd(f"a group's ranks are {value[:40]!r}")
            return ()
        value = [int(word) for word in re.findall(r"\d{1,9}", value)]
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise _Odd("a group's ranks are not a list")
    ranks = tuple(_integer(rank, "a rank", low=0, high=_MOST_RANKS) for rank in value)
    if len(set(ranks)) != len(ranks):
        raise _Odd("a group names a rank twice")
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
            f"{file}: no number in its name is a rank of its process groups: name it after its rank, like _dump_3"
        )
    raise BadTrace(f"{file}: its name holds no rank: name it after its rank, like _dump_3")


def _calls(entries: list[Any], groups: dict[str, Group]) -> tuple[list[Call], dict[str, str]]:
    """The entries, each round of a group once; and the names of the groups by pg_id."""
    result: dict[tuple[object, ...], Call] = {}
    ids: dict[str, str] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise _Odd(f"entry {number} is not a table")
        call = _call(entry)
        if "pg_id" in entry:
            ids[_text(entry["pg_id"], "pg_id")] = call.group
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
        _text(response[1], "process_group")
        if isinstance(response, (list, tuple)) and len(response) > 1
        else ""
    )


def _call(entry: dict[str, Any]) -> Call:
    name_of_group = entry.get("process_group", entry.get("pg_name", entry.get("pg_id")))
    group = _text(
        name_of_group[0] if isinstance(name_of_group, (list, tuple)) and name_of_group else name_of_group,
        "process_group",
    )
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
        created_ns=_created_ns(entry),
        seq=UNKNOWN if is_p2p else collective_seq,
        collective_seq=collective_seq,
        peer=peer,
        count=UNKNOWN if op in _NOT_ALIKE else _count(entry.get("input_sizes")),
        datatype=datatype,
        is_p2p=is_p2p,
        is_complete=state == "completed" or bool(entry.get("retired")),
        is_started=state in ("started", "completed") or (isinstance(started, int) and started > 0),
        words=_words(name, entry),
        frame=_frame(entry.get("frames")),
    )


def _created_ns(entry: dict[str, Any]) -> int:
    """The time of the call on the host; 0 if the dump does not state it."""
    if entry.get("time_created_ns") is None:
        return max(_integer(entry.get("time_created_us"), "time_created_us", high=1 << 52), 0) * 1000
    return max(_integer(entry["time_created_ns"], "time_created_ns"), 0)


def _words(name: str, entry: dict[str, Any]) -> str:
    """The operation with shapes and types: all_reduce [1024, 8] BFloat16."""
    sizes, types = entry.get("input_sizes"), entry.get("input_dtypes")
    shape = str(sizes[0]) if isinstance(sizes, list | tuple) and len(sizes) else ""
    kind = str(types[0]) if isinstance(types, list | tuple) and len(types) else ""
    return " ".join(word for word in (name[:40], shape[:40], kind[:20]) if word)


def _frame(frames: object) -> str:
    """The innermost line of the program's own code, as "file.py:12 function"; "" without such a line."""
    if not isinstance(frames, list | tuple):
        return ""
    rows = [frame for frame in frames[:256] if isinstance(frame, dict)]
    lines = [
        f"{str(row.get('filename'))[-200:]}:{row.get('line')} {str(row.get('name'))[:60]}"
        for row in rows
        if row.get("filename")
    ]
    own = [line for line in lines if not _INSTALLED.search(line)]
    return (own or lines or [""])[0]


def _operation(name: str) -> tuple[Op, int]:
    """The operation in a profiling name, and the peer's rank in the group for send and recv."""
    pair = _PEER.match(name)
    if pair:
        return (Op.SEND if pair[1] == "send" else Op.RECV), int(pair[3])
    return next((op for word, op in _OPS if word in name.lower()), Op.NONE), UNKNOWN


def _count(sizes: object) -> int:
    """Elements of all tensors; unknown if not stated or implausible."""
    if not isinstance(sizes, (list, tuple)):
        return UNKNOWN
    total = 0
    for shape in sizes[:65536]:
        if not isinstance(shape, (list, tuple)) or len(shape) > 64:
            raise _Odd("input_sizes is not a list of shapes")
        total += prod(_integer(size, "a size", low=0, high=1 << 48) for size in shape)
    return total if total < 1 << 50 else UNKNOWN


def _datatype(datatypes: object) -> Datatype:
    first = datatypes[0] if isinstance(datatypes, (list, tuple)) and datatypes else None
    return _DATATYPES.get(first, Datatype.NONE) if isinstance(first, str) else Datatype.NONE


def _knows_starts(dump: dict[str, Any], calls: list[Call]) -> bool:
    """Whether the dump records starts on the GPU; by default PyTorch records none and every call is "scheduled"."""
    status = dump.get("pg_status")
    rows = [row for row in status.values() if isinstance(row, dict)] if isinstance(status, dict) else []
    counted = [row.get("last_started_collective") for row in rows]
    return any(_integer(n, "last_started_collective") > 0 for n in counted) or any(
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
    keys = [_text(key, "a group number") for key in status]
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
            _integer(entry.get("last_enqueued_collective"), "last_enqueued_collective"),
            _integer(entry.get("last_completed_collective"), "last_completed_collective"),
        )
    return result
