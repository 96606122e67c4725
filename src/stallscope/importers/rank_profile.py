"""The profile of one rank as arrays, independent of the recording tool: its calls, its CPU work, its collectives."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Datatype, Op

CALL = np.dtype(
    [
        *(("begin_ns", "i8"), ("duration_ns", "i8"), ("tid", "i8")),
        *(("op", "u2"), ("symbol", "u4"), ("correlation", "i8")),
    ]
)
WORK = np.dtype([("begin_ns", "i8"), ("end_ns", "i8"), ("tid", "i8"), ("is_loader", "?")])
KERNEL = np.dtype(
    [("begin_ns", "i8"), ("end_ns", "i8"), ("correlation", "i8"), ("stream", "i8"), ("collective", "i4")]
)
STEP = np.dtype([("begin_ns", "i8"), ("number", "i8")])


@dataclass(frozen=True)
class Collective:
    """The arguments of a kernel. group: "" if they state no group; ranks: () if they list none."""

    op: Op
    group: str = ""
    description: str = ""
    ranks: tuple[int, ...] = ()
    ranks_text: str = ""
    size: int = UNKNOWN
    datatype: Datatype = Datatype.NONE
    count: int = UNKNOWN
    peer: int = UNKNOWN

    @property
    def has_arguments(self) -> bool:
        """Whether the group is known."""
        return bool(self.group)

    @property
    def comm_hash(self) -> int:
        """The group's identity: several groups may have the same name."""
        words = f"{self.group}|{self.ranks_text}|{self.size}"
        return int.from_bytes(hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=8).digest())

    @property
    def group_words(self) -> str:
        """The group in words."""
        return (
            f"{self.description[:60]} (group {self.group[:60]})"
            if self.description
            else f"group {self.group[:60]}"
        )


@dataclass
class Profile:
    """One rank. Arrays of the types above, in any order; calls name their function by number in names.

    host: "" where it is unknown. omitted: events that were left out, by reason. is_cut_off: the end is missing.
    """

    file: Path
    rank: int = UNKNOWN
    nranks: int = UNKNOWN
    pid: int = 0
    host: str = ""
    names: list[str] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    calls: Array = field(default_factory=lambda: np.empty(0, CALL))
    work: Array = field(default_factory=lambda: np.empty(0, WORK))
    kernels: Array = field(default_factory=lambda: np.empty(0, KERNEL))
    steps: Array = field(default_factory=lambda: np.empty(0, STEP))
    omitted: dict[str, int] = field(default_factory=dict)
    is_cut_off: bool = False

    @property
    def label(self) -> str:
        """The rank, or the file where the rank is unknown."""
        return f"rank {self.rank}" if self.rank != UNKNOWN else self.file.name

    @property
    def span_ns(self) -> tuple[int, int]:
        """From the first event to the last."""
        begins = np.concatenate([self.calls["begin_ns"], self.kernels["begin_ns"]])
        return (int(begins.min()), int(begins.max())) if len(begins) else (0, 0)


_KERNEL_NAME = re.compile(r"nccl|rccl|msccl", re.IGNORECASE)
_OWN_ALL_REDUCE = re.compile(
    r"cross_device_reduce|(?<!block)(?<!warp)(?<!block_)(?<!warp_)all_?reduce", re.IGNORECASE
)
"""All-reduce kernels of engines: vLLM, SGLang, AITER, FlashInfer, TensorRT-LLM, symmetric memory of PyTorch."""

_OPS_BY_NAME = (
    (re.compile(r"reduce_?scatter", re.IGNORECASE), Op.REDUCE_SCATTER),
    (re.compile(r"all_?reduce", re.IGNORECASE), Op.ALL_REDUCE),
    (re.compile(r"all_?gather", re.IGNORECASE), Op.ALL_GATHER),
    (re.compile(r"all_?to_?all", re.IGNORECASE), Op.ALL_TO_ALL),
    (re.compile(r"broadcast", re.IGNORECASE), Op.BROADCAST),
    (re.compile(r"reduce(?!r)", re.IGNORECASE), Op.REDUCE),
)


def op_of_name(name: str) -> Op | None:
    """The collective that an operator's name states, if any."""
    return next((op for word, op in _OPS_BY_NAME if word.search(name)), None)


def op_of_kernel(name: str) -> Op | None:
    """The collective that a kernel's name states; NONE for a communication kernel whose name does not state it, None
    for any other kernel.
    """
    plain = name.split("(")[0]
    if not _KERNEL_NAME.match(name):
        return Op.ALL_REDUCE if _OWN_ALL_REDUCE.search(plain) else None
    return op_of_name(plain) or Op.NONE
