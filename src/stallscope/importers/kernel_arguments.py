"""The arguments of a communication kernel in a torch.profiler trace, by ParamCommsUtils.hpp (PyTorch 2.2 to 2.11)."""

import re
from typing import Any

from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Datatype, Op
from stallscope.importers.operation_names import TORCH_DATATYPES
from stallscope.importers.rank_profile import Collective

_OPS = {
    "allreduce": Op.ALL_REDUCE,
    "all_reduce": Op.ALL_REDUCE,
    "allreduce_coalesced": Op.ALL_REDUCE,
    "all_gather": Op.ALL_GATHER,
    "allgather": Op.ALL_GATHER,
    "_allgather_base": Op.ALL_GATHER,
    "allgather_into_tensor_coalesced": Op.ALL_GATHER,
    "reduce_scatter": Op.REDUCE_SCATTER,
    "_reduce_scatter_base": Op.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Op.REDUCE_SCATTER,
    "broadcast": Op.BROADCAST,
    "_broadcast_oop": Op.BROADCAST,
    "reduce": Op.REDUCE,
    "_reduce_oop": Op.REDUCE,
    "all_to_all": Op.ALL_TO_ALL,
    "all_to_allv": Op.ALL_TO_ALL,
    "alltoall": Op.ALL_TO_ALL,
    "alltoall_base": Op.ALL_TO_ALL,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "send": Op.SEND,
    "recv": Op.RECV,
    "barrier": Op.ALL_REDUCE,
}
"""c10d's names of collectives ("Collective name" of the kernel's arguments)."""


def collective_of(arguments: dict[str, Any]) -> Collective:
    """The collective that a kernel's arguments state."""
    ranks_text = str(arguments.get("Process Group Ranks", ""))[:65536]
    ranks = () if "..." in ranks_text else tuple(int(word) for word in re.findall(r"\d{1,9}", ranks_text))
    op = _OPS.get(str(arguments.get("Collective name")).lower().removeprefix("nccl:"), Op.NONE)
    peer = (
        whole(arguments.get("Dst Rank" if op == Op.SEND else "Src Rank"))
        if op in (Op.SEND, Op.RECV)
        else UNKNOWN
    )
    size = whole(arguments.get("Group size"))
    return Collective(
        op=op,
        group=str(arguments.get("Process Group Name", ""))[:200] or f"of {size}",
        description=str(arguments.get("Process Group Description", ""))[:200],
        ranks=ranks,
        ranks_text=ranks_text,
        size=size,
        datatype=TORCH_DATATYPES.get(str(arguments.get("dtype")), Datatype.NONE),
        count=whole(arguments.get("In msg nelems")),
        peer=peer,
    )


def whole(value: object) -> int:
    """The number if it fits 32 bits, otherwise -1 (unknown)."""
    return value if isinstance(value, int) and -(2**31) <= value < 2**31 else UNKNOWN
