"""Maps senders' words for operations, types and communicators to our words."""

import re
from collections.abc import Callable

from stallscope.events.names import Op

_OPS = {op.name.lower() for op in Op}
_SAME_OP = {
    "bcast": "broadcast",
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
}
_SAME_OP |= {"reducescatter": "reduce_scatter"}
COLLECTIVE_OPS = frozenset(op.name.lower() for op in Op if Op.NONE < op <= Op.RECV)

REDUCE_OPS = ("sum", "prod", "max", "min", "avg")
"""ncclRedOp_t in order (nccl.h 2.28)."""

_HEX = re.compile(r"(?:0x)?([0-9a-fA-F]{1,16})")


def op(word: str) -> str:
    """all_reduce for AllReduce, ncclAllReduce, allreduce, all-reduce; other words unchanged."""
    bare = word.removeprefix("nccl")
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower().replace("-", "_").replace(" ", "_")
    snake = _SAME_OP.get(snake.replace("_", ""), snake)
    return snake if snake in _OPS else word


def datatype(word: str) -> str:
    """float32 for ncclFloat32."""
    return word.removeprefix("nccl").lower() if word.startswith("nccl") else word


def reduce_op(word: str) -> str:
    """sum for ncclSum."""
    bare = word.removeprefix("nccl").lower()
    return bare if bare in REDUCE_OPS else word


def comm_hash(word: str) -> str:
    """16 hexadecimal digits for a 64-bit hash in any notation; other words unchanged."""
    match = _HEX.fullmatch(word)
    is_number = match and (word.startswith("0x") or len(word) == 16)
    return f"{int(match[1], 16):016x}" if match and is_number else word


TEXT: dict[str, Callable[[str], str]] = {
    "op": op,
    "datatype": datatype,
    "reduce_op": reduce_op,
    "comm_hash": comm_hash,
}
"""By column: from a sender's word to ours."""


def _hash_of(number: int) -> str:
    return f"{number & (1 << 64) - 1:016x}"


def _reduce_op_of(number: int) -> str:
    return REDUCE_OPS[number - 1] if 0 < number <= len(REDUCE_OPS) else ""


NUMBER: dict[str, Callable[[int], str]] = {
    "comm_hash": _hash_of,
    "parent_hash": _hash_of,
    "reduce_op": _reduce_op_of,
}
"""By column: from a sender's number to our word; "" for unknown. Other columns: the number's digits."""


def signed(word: str) -> int | None:
    """The signed 64-bit number with the bits of 16 hexadecimal digits; None for anything else."""
    if len(word) != 16 or not _HEX.fullmatch(word):
        return None
    number = int(word, 16)
    return number - (1 << 64) if number >> 63 else number
