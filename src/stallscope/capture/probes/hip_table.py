"""The traced functions of AMD's HIP runtime (libamdhip64): the functions of CUDA's runtime with the same arguments.

Source: hip_runtime_api.h of ROCm 6. Kinds of copies have the same numbers. Graphs are not read: the collectives of a
graph are unknown. RCCL (librccl) exports NCCL's names. Tested with stub libraries, not on AMD hardware.
"""

from collections.abc import Iterable, Iterator

from stallscope.capture.probes import cuda_table
from stallscope.capture.probes.operation import Operation
from stallscope.events.kernel import Action
from stallscope.events.names import Op

_SAME_ARGUMENTS = {
    f"cuda{name}": f"hip{name}"
    for name in (
        *("DeviceSynchronize", "EventSynchronize", "StreamSynchronize", "SetDevice", "DeviceReset"),
        *("Malloc", "MallocManaged", "MallocAsync", "MallocPitch", "HostRegister"),
        *("Free", "FreeAsync", "HostUnregister"),
        *("Memcpy", "MemcpyAsync", "MemcpyPeer", "MemcpyPeerAsync", "Memcpy2D", "Memcpy2DAsync"),
        *("Memset", "MemsetAsync", "Memset2D", "Memset2DAsync"),
        *("LaunchKernel", "LaunchCooperativeKernel", "LaunchHostFunc", "StreamAddCallback"),
        *("StreamWaitEvent", "EventRecord", "EventCreate", "EventCreateWithFlags", "EventDestroy"),
        *("StreamCreate", "StreamCreateWithFlags", "StreamCreateWithPriority", "StreamDestroy"),
    )
} | {
    "cudaHostAlloc": "hipHostMalloc",
    "cudaFreeHost": "hipHostFree",
    "cuLaunchKernel": "hipModuleLaunchKernel",
}


def _of_hip(operations: Iterable[Operation]) -> Iterator[Operation]:
    """The operations whose functions HIP has, by their HIP names."""
    for operation in operations:
        names = [_SAME_ARGUMENTS[name] for name in operation.names.split() if name in _SAME_ARGUMENTS]
        if names:
            yield operation._replace(names=" ".join(names))


LEDGER = (*_of_hip(cuda_table.RUNTIME_LEDGER), Operation("hipSetDevice", Op.NONE, action=Action.SET_DEVICE))
COUNTED = tuple(_of_hip(cuda_table.RUNTIME_COUNTED))
LAUNCHES = tuple(_of_hip(cuda_table.RUNTIME_LAUNCHES + cuda_table.DRIVER_LAUNCHES))
