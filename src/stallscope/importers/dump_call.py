"""One call of a flight-recorder dump: an entry of its list. A field of another kind than PyTorch writes is an error."""

import re
from dataclasses import dataclass
from math import prod
from typing import Any

from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Datatype, Op
from stallscope.importers.operation_names import TORCH_DATATYPES

_UNEVEN_OPS = (Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER)  # ranks may give different counts
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


class OddField(Exception):
    """A field of a dump that cannot be understood."""


def integer(value: object, what: str, *, low: int = -1, high: int = (1 << 62) - 1) -> int:
    if value is None:
        return UNKNOWN
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):  # JSON dumps write counters as text
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        raise OddField(
            f"{what} is {str(value)[:40] if isinstance(value, (int, str)) else type(value).__name__}"
        )
    return value


def text(value: object, what: str) -> str:
    if not isinstance(value, (str, int)):
        raise OddField(f"{what} is a {type(value).__name__}")
    return str(value)[:400]


def call_of(entry: dict[str, Any]) -> Call:
    name_of_group = entry.get("process_group", entry.get("pg_name", entry.get("pg_id")))
    group = text(
        name_of_group[0] if isinstance(name_of_group, (list, tuple)) and name_of_group else name_of_group,
        "process_group",
    )
    name = text(entry.get("profiling_name", ""), "profiling_name").removeprefix("nccl:")
    op, peer = _operation(name)
    is_p2p = op in (Op.SEND, Op.RECV) or entry.get("is_p2p") is True
    collective_seq = integer(entry.get("collective_seq_id", entry.get("seq_id")), "collective_seq_id")
    datatype = _datatype(entry.get("input_dtypes"))
    state = text(entry.get("state", "scheduled"), "state")
    started = entry.get("time_discovered_started_ns")
    return Call(
        group=group,
        op=op,
        created_ns=_created_ns(entry),
        seq=UNKNOWN if is_p2p else collective_seq,
        collective_seq=collective_seq,
        peer=peer,
        count=UNKNOWN if op in _UNEVEN_OPS else _count(entry.get("input_sizes")),
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
        return max(integer(entry.get("time_created_us"), "time_created_us", high=1 << 52), 0) * 1000
    return max(integer(entry["time_created_ns"], "time_created_ns"), 0)


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
            raise OddField("input_sizes is not a list of shapes")
        total += prod(integer(size, "a size", low=0, high=1 << 48) for size in shape)
    return total if total < 1 << 50 else UNKNOWN


def _datatype(datatypes: object) -> Datatype:
    first = datatypes[0] if isinstance(datatypes, (list, tuple)) and datatypes else None
    return TORCH_DATATYPES.get(first, Datatype.NONE) if isinstance(first, str) else Datatype.NONE
