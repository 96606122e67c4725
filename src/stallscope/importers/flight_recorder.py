"""PyTorch flight-recorder dumps: one pickle per rank, in a folder or alone, written when a job hung or failed.

A dump tells, for each process group of its rank, which collectives were called and not completed, and how far
the group's counters got (torch/csrc/distributed/c10d/FlightRecorder, formats 2.0 to 2.10). It does not tell its
rank, host or process: the rank is the last number in the file's name, and stands in for the process id.

Times are when the host made the calls, by the wall clocks of hosts that are not told apart. A rank that the groups
name and that left no dump becomes a process without a snapshot.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import DATATYPE_BYTES, CollectiveFlag, Datatype, Op
from stallscope.events.trace import Clock, Trace
from stallscope.importers.plain_pickle import MOST_BYTES, plain
from stallscope.importers.registry import Importer

_HEAD_BYTES = 1 << 16
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_WORDS = (b"nccl_version", b"pg_config", b"pg_status", b"entries", b"collective_seq_id")
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
class _Group:
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
class _Call:
    """One entry of a dump."""

    group: str
    op: Op
    created_ns: int
    seq: int
    collective_seq: int
    peer: int
    count: int
    datatype: Datatype
    is_complete: bool
    is_started: bool


@dataclass(frozen=True)
class _Dump:
    """What one rank's file tells. counters: last entered and completed seq, by group name."""

    rank: int
    groups: dict[str, _Group]
    calls: list[_Call]
    counters: dict[str, tuple[int, int]]
    knows_starts: bool
    nccl_version: str
    counts_p2p: set[str] = field(default_factory=set)


def _sniff(path: Path) -> bool:
    return any(_looks_like_a_dump(file) for file in _files(path))


def _files(path: Path) -> list[Path]:
    try:
        return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    except OSError:
        return []


def _looks_like_a_dump(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError:
        return False
    return bool(_PICKLE.match(head)) and any(word in head for word in _WORDS)


def _read(path: Path) -> Trace:
    files = [file for file in _files(path) if _looks_like_a_dump(file)]
    if not files:
        raise BadTrace(f"{path} holds no flight-recorder dump: check the path")
    dumps: dict[int, _Dump] = {}
    known: dict[tuple[str, str, str], _Group] = {}
    for file in files:
        dump = _dump(file, known)
        if dump.rank in dumps:
            raise BadTrace(
                f"{file}: there is another dump of rank {dump.rank} beside it: keep one dump per rank"
            )
        dumps[dump.rank] = dump
    return _trace([dumps[rank] for rank in sorted(dumps)])


def _dump(file: Path, known: dict[tuple[str, str, str], _Group]) -> _Dump:
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
        return _Dump(
            rank=rank,
            groups=groups,
            calls=calls,
            counters=_counters(told.get("pg_status"), groups, ids),
            knows_starts=_knows_starts(told, calls),
            nccl_version=str(told.get("nccl_version", ""))[:32],
            counts_p2p={call.group for call in calls if call.op in (Op.SEND, Op.RECV)},
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


def _groups(told: object, known: dict[tuple[str, str, str], _Group]) -> dict[str, _Group]:
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
            known[same] = _Group(name, description, _members(ranks))
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


def _rank(file: Path, groups: dict[str, _Group]) -> int:
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


def _calls(entries: list[Any], groups: dict[str, _Group]) -> tuple[list[_Call], dict[str, str]]:
    """The entries, each round of a group once; and the names of the groups by pg_id."""
    found: dict[tuple[object, ...], _Call] = {}
    ids: dict[str, str] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise _Odd(f"entry {number} is no table")
        call = _call(entry)
        if "pg_id" in entry:
            ids[_text(entry["pg_id"], "pg_id")] = call.group
        if call.group not in groups:
            groups[call.group] = _Group(call.group, _description(entry), ())
        # The parts of a coalesced call share one number and come before the whole.
        key = (call.group, call.op, call.peer, number) if call.seq == UNKNOWN else (call.group, call.seq)
        known = found.get(key)
        found[key] = call if known is None else _joined(known, call)
    return list(found.values()), ids


def _joined(first: _Call, second: _Call) -> _Call:
    open_one = second if first.is_complete else first
    return first if open_one is first else second


def _description(entry: dict[str, Any]) -> str:
    told = entry.get("process_group")
    return _text(told[1], "process_group") if isinstance(told, (list, tuple)) and len(told) > 1 else ""


def _call(entry: dict[str, Any]) -> _Call:
    told = entry.get("process_group", entry.get("pg_name", entry.get("pg_id")))
    group = _text(told[0] if isinstance(told, (list, tuple)) and told else told, "process_group")
    name = _text(entry.get("profiling_name", ""), "profiling_name").removeprefix("nccl:")
    op, peer = _operation(name)
    is_p2p = op in (Op.SEND, Op.RECV)
    collective_seq = _integer(entry.get("collective_seq_id", entry.get("seq_id")), "collective_seq_id")
    datatype = _datatype(entry.get("input_dtypes"))
    state = _text(entry.get("state", "scheduled"), "state")
    started = entry.get("time_discovered_started_ns")
    return _Call(
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


def _knows_starts(told: dict[str, Any], calls: list[_Call]) -> bool:
    """Whether the dump tells starts on the GPU; by default PyTorch records none and every call is "scheduled"."""
    status = told.get("pg_status")
    rows = [one for one in status.values() if isinstance(one, dict)] if isinstance(status, dict) else []
    counted = [one.get("last_started_collective") for one in rows]
    return any(isinstance(n, int) and n > 0 for n in counted) or any(
        call.is_started and not call.is_complete for call in calls
    )


def _counters(told: object, groups: dict[str, _Group], ids: dict[str, str]) -> dict[str, tuple[int, int]]:
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


def _trace(dumps: list[_Dump]) -> Trace:
    groups = _known_groups(dumps)
    ranks = sorted({rank for group in groups.values() for rank in group.members} | {d.rank for d in dumps})
    made = [call.created_ns for dump in dumps for call in dump.calls if call.created_ns > 0]
    first_ns, last_ns = (min(made), max(made)) if made else (0, 0)
    with_p2p = {dump.groups[name].comm_hash for dump in dumps for name in dump.counts_p2p}
    versions = sorted({dump.nccl_version for dump in dumps} - {""})
    return Trace(
        collectives=_collectives(dumps, first_ns),
        communicators=_communicators(dumps, groups, with_p2p, first_ns=first_ns),
        processes=_processes(ranks, first_ns),
        snapshots=_snapshots(dumps, with_p2p, last_ns),
        clocks=(Clock(0, last_ns, last_ns),) if made else (),
        ends_ns=(last_ns,) if made else (),
        source=f"PyTorch flight-recorder dumps of {len(dumps)} of {len(ranks)} ranks",
        facts={"nccl_version": ", ".join(versions)[:200]} if versions else {},
    )


def _known_groups(dumps: list[_Dump]) -> dict[int, _Group]:
    return {group.comm_hash: group for dump in dumps for group in dump.groups.values()}


def _collectives(dumps: list[_Dump], first_ns: int) -> Array:
    parts = [_rows(dump, first_ns) for dump in dumps]
    rows = np.concatenate(parts) if parts else layout.empty(layout.COLLECTIVES)
    return rows[np.argsort(rows["ts_ns"], kind="stable")]


def _rows(dump: _Dump, first_ns: int) -> Array:
    rows = layout.empty(layout.COLLECTIVES, len(dump.calls))
    rows["pid"] = dump.rank
    places = {name: _place(group, dump.rank) for name, group in dump.groups.items()}
    for row, call in zip(rows, dump.calls, strict=True):
        group = dump.groups[call.group]
        row["ts_ns"] = call.created_ns or first_ns
        row["comm_hash"], row["nranks"] = group.comm_hash, len(group.members) or UNKNOWN
        row["comm_rank"] = places[call.group]
        row["seq"], row["op"], row["peer_rank"] = call.seq, call.op, call.peer
        row["datatype"], row["count"] = call.datatype, call.count
        if call.count != UNKNOWN and call.datatype:
            row["count_bytes"] = call.count * DATATYPE_BYTES[call.datatype]
        row["flags"] = _flags(dump, call)
    return rows


def _flags(dump: _Dump, call: _Call) -> int:
    if call.is_complete:
        return CollectiveFlag.NO_LEDGER
    not_started = CollectiveFlag.NOT_STARTED if dump.knows_starts and not call.is_started else 0
    return CollectiveFlag.NO_LEDGER | CollectiveFlag.OPEN | not_started


def _place(group: _Group, rank: int) -> int:
    return group.members.index(rank) if rank in group.members else UNKNOWN


def _communicators(
    dumps: list[_Dump], groups: dict[int, _Group], with_p2p: set[int], *, first_ns: int
) -> Array:
    """Memberships: those the dumps tell with their counters, and those of ranks without a dump."""
    rows, told = [], set()
    for dump in dumps:
        for group in dump.groups.values():
            entered, completed = _progress(dump, group, group.comm_hash in with_p2p)
            place = _place(group, dump.rank)
            rows.append((group.comm_hash, dump.rank, place, len(group.members), entered, completed))
            told.add((group.comm_hash, dump.rank))
    for comm_hash, group in groups.items():
        silent = [(i, rank) for i, rank in enumerate(group.members) if (comm_hash, rank) not in told]
        rows += [(comm_hash, rank, i, len(group.members), UNKNOWN, UNKNOWN) for i, rank in silent]
    out = layout.empty(layout.COMMUNICATORS, len(rows))
    out["ts_ns"] = first_ns
    if rows:
        columns = list(zip(*rows, strict=True))
        out["comm_hash"] = np.array(columns[0], np.uint64)
        names = ("pid", "comm_rank", "nranks", "last_entered", "last_completed")
        for name, column in zip(names, columns[1:], strict=True):
            out[name] = column
    out["nranks"][out["nranks"] == 0] = UNKNOWN
    return out


def _progress(dump: _Dump, group: _Group, has_p2p: bool) -> tuple[int, int]:
    """Seq of the last collective that a rank entered in a group, and of the last one it saw complete.

    In a group that also sends point to point the counters count either: there only the entries tell.
    """
    if not has_p2p:
        return dump.counters.get(group.name, (UNKNOWN, UNKNOWN))
    seqs = [call.collective_seq for call in dump.calls if call.group == group.name]
    return max(seqs, default=UNKNOWN), UNKNOWN


def _processes(ranks: list[int], first_ns: int) -> Array:
    rows = layout.empty(layout.PROCESSES, len(ranks))
    rows["ts_ns"], rows["pid"], rows["rank"], rows["nranks"] = first_ns, ranks, ranks, len(ranks)
    return rows


def _snapshots(dumps: list[_Dump], with_p2p: set[int], last_ns: int) -> Array:
    rows = layout.empty(layout.SNAPSHOTS, len(dumps))
    rows["ts_ns"], rows["alive"] = last_ns, 1
    for row, dump in zip(rows, dumps, strict=True):
        row["pid"] = dump.rank
        told = [
            counters
            for name, counters in dump.counters.items()
            if dump.groups[name].comm_hash not in with_p2p and UNKNOWN not in counters
        ]
        if told:
            row["n_collectives"], row["n_completed"] = (sum(column) for column in zip(*told, strict=True))
    return rows


IMPORTER = Importer("flight-recorder dumps", _sniff, _read)
