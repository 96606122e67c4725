"""The traced functions: one table. Which names, what operation each is, and which argument is what.

From here follow the symbols to look up, the cookie that each hook carries into the kernel (bpf/events.h tells
its bits) and the names in `calls.symbol`. Signatures: nccl.h 2.18 to 2.32, cuda_runtime_api.h and cuda.h 11 to 13.

libnccl exports each function twice (ncclX, pncclX) at one address: one hook. CUDA has code of its own for each
default stream flavour, and the driver versions of a function (_v2): all of them are hooked; a driver call inside
a runtime call is part of it. Launches are hooked only where asked for: a hook costs 0.5 to 2 us a call.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stallscope.events.kernel import Action
from stallscope.events.names import Category, Op

_RUNTIME_FLAVOURS = ("", "_ptsz", "_ptds")
_DRIVER_FLAVOURS = ("", "_v2", "_ptsz", "_ptds", "_v2_ptsz", "_v2_ptds")
_ARGUMENT_BITS = {"count": 40, "datatype": 44, "reduce_op": 48, "peer": 52, "comm": 56, "stream": 60}


class Operation(NamedTuple):
    """Functions that are alike.

    names: exported names without flavour, separated by spaces. inside: what the time in them is charged to.
    arguments: numbers of arguments, 1 is the first; "count" is elements or bytes, "peer" a rank, or the number
    of rows that multiplies the bytes of a copy, "datatype" of a copy its direction (cudaMemcpyKind).
    """

    names: str
    op: Op
    inside: Category = Category.NONE
    action: Action = Action.CALL
    arguments: Mapping[str, int] = {}


class Hook(NamedTuple):
    """One place to attach to: what Program.attach() takes."""

    offset: int  # of the function in the file
    cookie: int
    part: str  # of the kernel side: nccl, cuda or graph (bpf/*.bpf.c)
    symbol: str


def _collective(names: str, op: Op, **arguments: int) -> Operation:
    return Operation(names, op, action=Action.COLLECTIVE, arguments=arguments)


def _comm(names: str, op: Op, action: Action = Action.CALL) -> Operation:
    return Operation(names, op, action=action)


def _alloc(names: str, **arguments: int) -> Operation:
    return Operation(names, Op.ALLOC, Category.ALLOC, arguments=arguments)


def _free(names: str) -> Operation:
    return Operation(names, Op.FREE, Category.ALLOC)


def _copy(names: str, **arguments: int) -> Operation:
    return Operation(names, Op.COPY, Category.COPY, arguments=arguments)


def _copy_to_host(names: str, **arguments: int) -> Operation:
    """It waits for all that was enqueued before, like a synchronise call; bpf/cuda.bpf.c tells when it counts so."""
    return Operation(names, Op.COPY, Category.WAIT_GPU, arguments=arguments)


def _sync(names: str, **arguments: int) -> Operation:
    return Operation(names, Op.SYNC, Category.WAIT_GPU, arguments=arguments)


def _with_config(name: str) -> str:
    """A collective and its variant with a configuration as the last argument (nccl.h 2.32)."""
    return f"{name} {name}Config"


NCCL = (
    _collective(
        _with_config("ncclAllReduce"), Op.ALL_REDUCE, count=3, datatype=4, reduce_op=5, comm=6, stream=7
    ),
    _collective(
        _with_config("ncclReduceScatter"),
        Op.REDUCE_SCATTER,
        count=3,
        datatype=4,
        reduce_op=5,
        comm=6,
        stream=7,
    ),
    _collective(_with_config("ncclAllGather"), Op.ALL_GATHER, count=3, datatype=4, comm=5, stream=6),
    _collective(_with_config("ncclAlltoAll"), Op.ALL_TO_ALL, count=3, datatype=4, comm=5, stream=6),
    _collective(_with_config("ncclBroadcast"), Op.BROADCAST, count=3, datatype=4, peer=5, comm=6, stream=7),
    _collective("ncclBcast", Op.BROADCAST, count=2, datatype=3, peer=4, comm=5, stream=6),
    _collective(
        _with_config("ncclReduce"), Op.REDUCE, count=3, datatype=4, reduce_op=5, peer=6, comm=7, stream=8
    ),
    _collective(_with_config("ncclGather"), Op.GATHER, count=3, datatype=4, peer=5, comm=6, stream=7),
    _collective(_with_config("ncclScatter"), Op.SCATTER, count=3, datatype=4, peer=5, comm=6, stream=7),
    _collective("ncclSend", Op.SEND, count=2, datatype=3, peer=4, comm=5, stream=6),
    _collective("ncclRecv", Op.RECV, count=2, datatype=3, peer=4, comm=5, stream=6),
    _comm("ncclPutSignal ncclSignal ncclWaitSignal", Op.ONE_SIDED, Action.ENQUEUE),
    _comm("ncclGroupStart", Op.GROUP, Action.GROUP_START),
    _comm("ncclGroupEnd", Op.GROUP, Action.GROUP_END),
    _comm("ncclGroupSimulateEnd", Op.GROUP, Action.GROUP_SIMULATE),
    _comm("ncclGetUniqueId ncclCommGetUniqueId", Op.COMM_INIT),
    _comm("ncclCommInitRank ncclCommInitRankConfig", Op.COMM_INIT, Action.INIT_RANK),
    _comm("ncclCommInitRankScalable", Op.COMM_INIT, Action.INIT_SCALABLE),
    _comm("ncclCommInitAll", Op.COMM_INIT, Action.INIT_ALL),
    _comm("ncclCommSplit", Op.COMM_SPLIT, Action.SPLIT),
    _comm("ncclCommShrink", Op.COMM_SPLIT, Action.SHRINK),
    _comm("ncclCommGrow", Op.COMM_INIT, Action.GROW),
    _comm("ncclCommDestroy ncclCommAbort", Op.COMM_DESTROY, Action.DESTROY),
    _comm("ncclCommFinalize ncclCommRevoke", Op.COMM_DESTROY),
    _comm("ncclCommSuspend ncclCommResume", Op.COMM_SETUP),
    _comm("ncclCommRegister ncclCommDeregister", Op.COMM_SETUP),
    _comm("ncclCommWindowRegister ncclCommWindowDeregister", Op.COMM_SETUP),
    _comm("ncclDevCommCreate ncclDevCommDestroy", Op.COMM_SETUP),
)
"""Left out: what only answers from memory, and ncclMemAlloc, whose driver calls are seen. A test names them all."""

RUNTIME = (
    _sync("cudaDeviceSynchronize cudaThreadSynchronize cudaEventSynchronize"),
    _sync("cudaStreamSynchronize", stream=1),
    _alloc("cudaMalloc cudaMallocHost cudaHostAlloc cudaMallocManaged cudaHostRegister", count=2),
    _alloc("cudaMallocAsync cudaMallocFromPoolAsync", count=2),
    _alloc("cudaMallocPitch cudaMalloc3D cudaMallocArray cudaMalloc3DArray"),
    _free("cudaFree cudaFreeAsync cudaFreeHost cudaFreeArray cudaHostUnregister"),
    _copy("cudaMemcpy", count=3, datatype=4),
    _copy("cudaMemcpyAsync", count=3, datatype=4, stream=5),
    _copy("cudaMemcpyToSymbol cudaMemcpyFromSymbol", count=3),
    _copy("cudaMemcpyToSymbolAsync cudaMemcpyFromSymbolAsync", count=3, stream=6),
    _copy("cudaMemcpyPeer", count=5),
    _copy("cudaMemcpyPeerAsync", count=5, stream=6),
    _copy("cudaMemcpy2D", count=5, peer=6, datatype=7),
    _copy("cudaMemcpy2DAsync", count=5, peer=6, datatype=7, stream=8),
    _copy("cudaMemcpy3D cudaMemcpy3DPeer cudaMemcpy2DToArray cudaMemcpy2DFromArray cudaMemcpy2DArrayToArray"),
    _copy("cudaMemcpy3DAsync cudaMemcpy3DPeerAsync", stream=2),
    _copy("cudaMemcpyBatchAsync cudaMemcpy3DBatchAsync cudaMemcpyWithAttributesAsync"),
    Operation("cudaSetDevice", Op.NONE, action=Action.SET_DEVICE),
)

DRIVER = (
    _sync("cuCtxSynchronize cuEventSynchronize"),
    _sync("cuStreamSynchronize", stream=1),
    _alloc("cuMemAlloc cuMemAllocHost cuMemHostAlloc cuMemAllocManaged cuMemHostRegister", count=2),
    _alloc("cuMemAllocAsync cuMemAllocFromPoolAsync cuMemCreate cuMemMap", count=2),
    _alloc("cuMemAllocPitch cuMemSetAccess"),
    _free("cuMemFree cuMemFreeHost cuMemFreeAsync cuMemHostUnregister cuMemRelease cuMemUnmap"),
    _copy("cuMemcpy cuMemcpyHtoD cuMemcpyDtoD", count=3),
    _copy_to_host("cuMemcpyDtoH", count=3),
    _copy("cuMemcpyAsync cuMemcpyHtoDAsync cuMemcpyDtoDAsync", count=3, stream=4),
    _copy_to_host("cuMemcpyDtoHAsync", count=3, stream=4),
    _copy("cuMemcpyPeer", count=5),
    _copy("cuMemcpyPeerAsync", count=5, stream=6),
    _copy("cuMemcpy2D cuMemcpy2DUnaligned cuMemcpy3D cuMemcpy3DPeer"),
    _copy("cuMemcpy2DAsync cuMemcpy3DAsync cuMemcpy3DPeerAsync", stream=2),
    _copy("cuMemcpyBatchAsync cuMemcpy3DBatchAsync"),
)

RUNTIME_LAUNCHES = (
    Operation("cudaLaunchKernel", Op.LAUNCH, Category.LAUNCH, arguments={"stream": 8}),
    Operation("cudaLaunchKernelExC cudaLaunchCooperativeKernel", Op.LAUNCH, Category.LAUNCH),
    Operation("cudaGraphLaunch", Op.GRAPH_LAUNCH, Category.LAUNCH, arguments={"stream": 2}),
)

DRIVER_LAUNCHES = (
    Operation("cuLaunchKernel cuLaunchKernelEx cuLaunchCooperativeKernel", Op.LAUNCH, Category.LAUNCH),
    Operation("cuGraphLaunch", Op.GRAPH_LAUNCH, Category.LAUNCH, arguments={"stream": 2}),
)


def _graph(names: str, action: Action) -> Operation:
    return Operation(names, Op.GRAPH_LAUNCH, action=action)


RUNTIME_GRAPHS = (
    _graph("cudaStreamBeginCapture cudaStreamBeginCaptureToGraph", Action.CAPTURE_BEGIN),
    _graph("cudaStreamEndCapture", Action.CAPTURE_END),
    _graph(
        "cudaGraphInstantiate cudaGraphInstantiateWithFlags cudaGraphInstantiateWithParams",
        Action.INSTANTIATE,
    ),
    _graph("cudaGraphLaunch", Action.GRAPH_LAUNCH),
)

DRIVER_GRAPHS = (
    _graph("cuStreamBeginCapture cuStreamBeginCaptureToGraph", Action.CAPTURE_BEGIN),
    _graph("cuStreamEndCapture", Action.CAPTURE_END),
    _graph("cuGraphInstantiate cuGraphInstantiateWithFlags cuGraphInstantiateWithParams", Action.INSTANTIATE),
    _graph("cuGraphLaunch", Action.GRAPH_LAUNCH),
)


class Entry(NamedTuple):
    """An exported name, what it is, and which part of the kernel side is hooked to it. A name may have two."""

    symbol: str
    part: str
    operation: Operation


_TABLES = (
    ("nccl", NCCL, ("",)),
    ("cuda", RUNTIME + RUNTIME_LAUNCHES, _RUNTIME_FLAVOURS),
    ("cuda", DRIVER + DRIVER_LAUNCHES, _DRIVER_FLAVOURS),
    ("graph", RUNTIME_GRAPHS, _RUNTIME_FLAVOURS),
    ("graph", DRIVER_GRAPHS, _DRIVER_FLAVOURS),
)

ENTRIES = tuple(
    Entry(name + flavour, part, operation)
    for part, table, flavours in _TABLES
    for operation in table
    for name in operation.names.split()
    for flavour in flavours
)
"""Every exported name with its flavours."""

SYMBOLS: tuple[str, ...] = ("", *dict.fromkeys(entry.symbol for entry in ENTRIES))
"""Names by the number in `calls.symbol`; 0 is none."""

_NUMBER = {name: number for number, name in enumerate(SYMBOLS)}


def cookie(entry: Entry) -> int:
    """What the hook tells the kernel side: see enum action in bpf/events.h."""
    operation = entry.operation
    value = operation.op | operation.inside << 8 | _NUMBER[entry.symbol] << 16 | operation.action << 32
    for argument, number in operation.arguments.items():
        value |= number << _ARGUMENT_BITS[argument]
    return value


def hooks(offsets: Mapping[str, int], *, launches: bool = False) -> list[Hook]:
    """Where to attach in a file that has these functions.

    offsets: file offset of each function by its name; names that are not in the table are left out.
    Two names at one offset are one hook of each part, that of the name which stands first in the table.
    """
    found = [entry for entry in _chosen(launches) if entry.symbol in offsets]
    first = {(offsets[entry.symbol], entry.part): entry for entry in reversed(found)}
    return [
        Hook(offset, cookie(entry), part, entry.symbol) for (offset, part), entry in sorted(first.items())
    ]


def names(*, launches: bool = False) -> Iterable[str]:
    """The functions to look for in a file."""
    return list(dict.fromkeys(entry.symbol for entry in _chosen(launches)))


def _chosen(launches: bool) -> list[Entry]:
    """Without launch timing, the functions that are there only for it are left out."""
    return [entry for entry in ENTRIES if launches or entry.operation.inside is not Category.LAUNCH]
