"""Names of operations and datatypes by NCCL and PyTorch, as the files of both contain them."""

from stallscope.events.names import Datatype, Op

NCCL_OPS = {
    "AllReduce": Op.ALL_REDUCE,
    "AllGather": Op.ALL_GATHER,
    "ReduceScatter": Op.REDUCE_SCATTER,
    "Broadcast": Op.BROADCAST,
    "Reduce": Op.REDUCE,
    "AlltoAll": Op.ALL_TO_ALL,
    "Gather": Op.GATHER,
    "Scatter": Op.SCATTER,
    "Send": Op.SEND,
    "Recv": Op.RECV,
}
"""ncclFuncStr, src/misc/utils.cc."""

TORCH_DATATYPES = {
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
"""c10::toString(ScalarType)."""
