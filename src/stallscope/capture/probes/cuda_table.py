"""The traced functions of CUDA: runtime (cuda_runtime_api.h) and driver (cuda.h), 11 to 13.

There are three kinds: functions whose time is charged in the ledger (LEDGER), functions that are only counted
(COUNTED), and launches, which are counted, or charged if launch timing is requested (LAUNCHES). A runtime function and
the driver function below it are adjacent. Functions that create or release memory whose size is not in their arguments
(arrays, imported handles) are traced, but are not part of a balance.
"""

from stallscope.capture.probes.operation import Operation
from stallscope.events.kernel import HookGroup, Shape
from stallscope.events.names import Category, Direction, MemoryKind, Op

_H2D, _D2H, _D2D = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST, Direction.DEVICE_TO_DEVICE
_BY_ADDRESS, _PEER = Direction.BY_ADDRESS, Direction.PEER
_HOT = HookGroup.HOT


def _sync(names: str, group: HookGroup = HookGroup.ALWAYS, **arguments: int) -> Operation:
    return Operation(names, Op.SYNC, Category.WAIT_GPU, arguments=arguments, group=group)


def _alloc(names: str, memory: MemoryKind, *, shape: Shape = Shape.ALLOC, **arguments: int) -> Operation:
    if shape is not Shape.PLAIN:
        arguments = {"count": 2, "out": 1} | arguments
    return Operation(names, Op.ALLOC, Category.ALLOC, arguments=arguments, shape=shape, memory=memory)


def _free(names: str, memory: MemoryKind, *, shape: Shape = Shape.FREE, **arguments: int) -> Operation:
    return Operation(names, Op.FREE, Category.ALLOC, arguments=arguments, shape=shape, memory=memory)


def _copy(
    names: str, direction: Direction = Direction.NONE, *, shape: Shape = Shape.COPY, **arguments: int
) -> Operation:
    """Functions whose names are all asynchronous are governed."""
    is_async = all("Async" in name for name in names.split())
    group = HookGroup.COPIES if is_async else HookGroup.ALWAYS
    return Operation(
        names,
        Op.COPY,
        Category.COPY,
        arguments=arguments,
        shape=shape,
        direction=direction,
        group=group,
    )


def _counted(
    names: str, op: Op, group: HookGroup = HookGroup.ALWAYS, *, scale: int = 1, **arguments: int
) -> Operation:
    shape = Shape.OUT if "out" in arguments else Shape.PLAIN
    return Operation(names, op, arguments=arguments, group=group, shape=shape, scale=scale)


def _launch(names: str, shape: Shape, **arguments: int) -> Operation:
    return Operation(names, Op.LAUNCH, Category.LAUNCH, arguments=arguments, shape=shape)


def _node_changes(prefix: str) -> str:
    """Functions that change a node of an executable graph: their first argument is that graph."""
    parameters = ("Kernel", "Memcpy", "Memset", "Host", "ChildGraph", "", "ExternalSemaphoresSignal")
    of_runtime = ("Memcpy{}1D", "Memcpy{}FromSymbol", "Memcpy{}ToSymbol") if prefix == "cuda" else ()
    return " ".join(
        [
            *(f"{prefix}GraphExec{kind}NodeSetParams" for kind in (*parameters, "ExternalSemaphoresWait")),
            *(f"{prefix}GraphExec{kind.format('NodeSetParams')}" for kind in of_runtime),
            *(f"{prefix}GraphExecEvent{kind}NodeSetEvent" for kind in ("Record", "Wait")),
            f"{prefix}GraphNodeSetEnabled",
        ]
    )


RUNTIME_LEDGER = (
    _sync("cudaDeviceSynchronize cudaThreadSynchronize", HookGroup.WAITS),
    _sync("cudaEventSynchronize", HookGroup.RUNTIME_WAITS, handle=1),
    _sync("cudaStreamSynchronize", HookGroup.RUNTIME_WAITS, stream=1),
    _sync("cudaExecutionCtxSynchronize", handle=1),
    _sync("cudaDeviceFlushGPUDirectRDMAWrites"),
    _alloc("cudaMalloc", MemoryKind.DEVICE),
    _alloc("cudaMallocManaged", MemoryKind.MANAGED),
    _alloc("cudaMallocHost cudaHostAlloc", MemoryKind.HOST),
    _alloc("cudaHostRegister", MemoryKind.REGISTERED, shape=Shape.REGISTER),
    _alloc("cudaMallocAsync", MemoryKind.POOL, stream=3),
    _alloc("cudaMallocFromPoolAsync", MemoryKind.POOL, handle=3, stream=4),
    _alloc("cudaMallocPitch", MemoryKind.DEVICE, shape=Shape.ALLOC_PITCH, count=4),
    _alloc("cudaMalloc3D", MemoryKind.DEVICE, shape=Shape.ALLOC_3D),
    _alloc("cudaMallocArray cudaMalloc3DArray cudaMallocMipmappedArray", MemoryKind.ARRAY, shape=Shape.PLAIN),
    _alloc("cudaMemPoolCreate", MemoryKind.POOL, shape=Shape.PLAIN),
    _alloc("cudaIpcOpenMemHandle cudaImportExternalMemory", MemoryKind.DEVICE, shape=Shape.PLAIN),
    _alloc(
        "cudaMemPoolImportFromShareableHandle cudaMemPoolImportPointer", MemoryKind.POOL, shape=Shape.PLAIN
    ),
    _free("cudaFree", MemoryKind.DEVICE),
    _free("cudaFreeAsync", MemoryKind.POOL, stream=2),
    _free("cudaFreeHost", MemoryKind.HOST),
    _free("cudaHostUnregister", MemoryKind.REGISTERED),
    _free("cudaFreeArray cudaFreeMipmappedArray", MemoryKind.ARRAY, shape=Shape.PLAIN, handle=1),
    _free("cudaMemPoolDestroy cudaMemPoolTrimTo", MemoryKind.POOL, shape=Shape.PLAIN, handle=1),
    _free("cudaDeviceGraphMemTrim", MemoryKind.POOL, shape=Shape.PLAIN),
    _free("cudaIpcCloseMemHandle cudaDestroyExternalMemory", MemoryKind.DEVICE, shape=Shape.PLAIN, handle=1),
    _copy("cudaMemcpy", count=3, kind=4, target=1, source=2),
    _copy("cudaMemcpyAsync", count=3, kind=4, target=1, source=2, stream=5),
    _copy("cudaMemcpyToSymbol", count=3, kind=5, source=2),
    _copy("cudaMemcpyToSymbolAsync", count=3, kind=5, source=2, stream=6),
    _copy("cudaMemcpyFromSymbol", count=3, kind=5, target=1),
    _copy("cudaMemcpyFromSymbolAsync", count=3, kind=5, target=1, stream=6),
    _copy("cudaMemcpyPeer", _PEER, count=5, target=1, source=3),
    _copy("cudaMemcpyPeerAsync", _PEER, count=5, target=1, source=3, stream=6),
    _copy("cudaMemcpy2D", count=5, rows=6, kind=7, target=1, source=3),
    _copy("cudaMemcpy2DAsync", count=5, rows=6, kind=7, target=1, source=3, stream=8),
    _copy("cudaMemcpy2DToArray", count=6, rows=7, kind=8, target=1, source=4),
    _copy("cudaMemcpy2DToArrayAsync", count=6, rows=7, kind=8, target=1, source=4, stream=9),
    _copy("cudaMemcpy2DFromArray", count=6, rows=7, kind=8, target=1, source=3),
    _copy("cudaMemcpy2DFromArrayAsync", count=6, rows=7, kind=8, target=1, source=3, stream=9),
    _copy("cudaMemcpy2DArrayToArray", count=7, rows=8, kind=9),
    _copy("cudaMemcpyToArray", count=5, kind=6, target=1, source=4),
    _copy("cudaMemcpyToArrayAsync", count=5, kind=6, target=1, source=4, stream=7),
    _copy("cudaMemcpyFromArray", count=5, kind=6, target=1, source=2),
    _copy("cudaMemcpyFromArrayAsync", count=5, kind=6, target=1, source=2, stream=7),
    _copy("cudaMemcpy3D", shape=Shape.RUNTIME_3D),
    _copy("cudaMemcpy3DAsync", shape=Shape.RUNTIME_3D, stream=2),
    _copy("cudaMemcpy3DPeer", _PEER, shape=Shape.RUNTIME_3D_PEER),
    _copy("cudaMemcpy3DPeerAsync", _PEER, shape=Shape.RUNTIME_3D_PEER, stream=2),
    _copy("cudaMemcpyWithAttributesAsync", _BY_ADDRESS, count=3, target=1, source=2, stream=5),
    _copy("cudaMemcpyBatchAsync cudaMemcpy3DBatchAsync", _BY_ADDRESS, shape=Shape.PLAIN),
    _copy("cudaMemcpy3DWithAttributesAsync", _BY_ADDRESS, shape=Shape.PLAIN),
    _copy("cudaMemcpyArrayToArray", count=7, kind=8),
    _copy("cudaMemPrefetchBatchAsync cudaMemDiscardAndPrefetchBatchAsync", _BY_ADDRESS, shape=Shape.PLAIN),
    _copy("cudaMemPrefetchAsync cudaMemPrefetchAsync_v2", _BY_ADDRESS, shape=Shape.PLAIN, count=2),
)

DRIVER_LEDGER = (
    _sync("cuCtxSynchronize", HookGroup.WAITS),
    _sync("cuEventSynchronize", HookGroup.WAITS, handle=1),
    _sync("cuStreamSynchronize", HookGroup.WAITS, stream=1),
    _sync("cuFlushGPUDirectRDMAWrites"),
    _alloc("cuMemAlloc", MemoryKind.DEVICE),
    _alloc("cuMemAllocManaged", MemoryKind.MANAGED),
    _alloc("cuMemAllocHost cuMemHostAlloc", MemoryKind.HOST),
    _alloc("cuMemHostRegister", MemoryKind.REGISTERED, shape=Shape.REGISTER),
    _alloc("cuMemAllocAsync", MemoryKind.POOL, stream=3),
    _alloc("cuMemAllocFromPoolAsync", MemoryKind.POOL, handle=3, stream=4),
    _alloc("cuMemAllocPitch", MemoryKind.DEVICE, shape=Shape.ALLOC_PITCH, count=4),
    _alloc("cuMemCreate", MemoryKind.VMM, shape=Shape.CREATE),
    Operation(
        "cuMemRetainAllocationHandle",
        Op.ALLOC,
        Category.ALLOC,
        arguments={"out": 1},
        shape=Shape.RETAIN,
        memory=MemoryKind.VMM,
    ),
    _alloc("cuMemMap", MemoryKind.VMM, shape=Shape.PLAIN, count=2, handle=4),
    _alloc("cuMemSetAccess cuMemAddressReserve", MemoryKind.VMM, shape=Shape.PLAIN, count=2),
    _alloc("cuMemImportFromShareableHandle", MemoryKind.VMM, shape=Shape.PLAIN),
    # A bind to a multicast object waits until all its devices have been added (cuda.h).
    _alloc("cuMulticastCreate cuMulticastAddDevice", MemoryKind.VMM, shape=Shape.PLAIN),
    _alloc("cuMulticastBindMem cuMulticastBindAddr", MemoryKind.VMM, shape=Shape.PLAIN, handle=1),
    _alloc("cuArrayCreate cuArray3DCreate cuMipmappedArrayCreate", MemoryKind.ARRAY, shape=Shape.PLAIN),
    _alloc("cuMemPoolCreate", MemoryKind.POOL, shape=Shape.PLAIN),
    _alloc("cuIpcOpenMemHandle cuImportExternalMemory", MemoryKind.DEVICE, shape=Shape.PLAIN),
    _alloc("cuMemPoolImportFromShareableHandle cuMemPoolImportPointer", MemoryKind.POOL, shape=Shape.PLAIN),
    _free("cuMemFree", MemoryKind.DEVICE),
    _free("cuMemFreeAsync", MemoryKind.POOL, stream=2),
    _free("cuMemFreeHost", MemoryKind.HOST),
    _free("cuMemHostUnregister", MemoryKind.REGISTERED),
    _free("cuMemRelease", MemoryKind.VMM),
    _free("cuMemUnmap cuMemAddressFree", MemoryKind.VMM, shape=Shape.PLAIN, count=2),
    _free("cuMulticastUnbind", MemoryKind.VMM, shape=Shape.PLAIN, handle=1),
    _free("cuArrayDestroy cuMipmappedArrayDestroy", MemoryKind.ARRAY, shape=Shape.PLAIN, handle=1),
    _free("cuMemPoolDestroy cuMemPoolTrimTo", MemoryKind.POOL, shape=Shape.PLAIN, handle=1),
    _free("cuDeviceGraphMemTrim", MemoryKind.POOL, shape=Shape.PLAIN),
    _free("cuIpcCloseMemHandle cuDestroyExternalMemory", MemoryKind.DEVICE, shape=Shape.PLAIN, handle=1),
    _copy("cuMemcpy", _BY_ADDRESS, count=3, target=1, source=2),
    _copy("cuMemcpyAsync", _BY_ADDRESS, count=3, target=1, source=2, stream=4),
    _copy("cuMemcpyHtoD", _H2D, count=3, target=1, source=2),
    _copy("cuMemcpyHtoDAsync", _H2D, count=3, target=1, source=2, stream=4),
    _copy("cuMemcpyDtoH", _D2H, count=3, target=1, source=2),
    _copy("cuMemcpyDtoHAsync", _D2H, count=3, target=1, source=2, stream=4),
    _copy("cuMemcpyDtoD", _D2D, count=3, target=1, source=2),
    _copy("cuMemcpyDtoDAsync", _D2D, count=3, target=1, source=2, stream=4),
    _copy("cuMemcpyHtoA", _H2D, count=4, target=1, source=3),
    _copy("cuMemcpyHtoAAsync", _H2D, count=4, target=1, source=3, stream=5),
    _copy("cuMemcpyAtoH", _D2H, count=4, target=1, source=2),
    _copy("cuMemcpyAtoHAsync", _D2H, count=4, target=1, source=2, stream=5),
    _copy("cuMemcpyDtoA", _D2D, count=4, target=1, source=3),
    _copy("cuMemcpyAtoD", _D2D, count=4, target=1, source=2),
    _copy("cuMemcpyAtoA", _D2D, count=5, target=1, source=3),
    _copy("cuMemcpyPeer", _PEER, count=5, target=1, source=3),
    _copy("cuMemcpyPeerAsync", _PEER, count=5, target=1, source=3, stream=6),
    _copy("cuMemcpy2D cuMemcpy2DUnaligned", shape=Shape.DRIVER_2D),
    _copy("cuMemcpy2DAsync", shape=Shape.DRIVER_2D, stream=2),
    _copy("cuMemcpy3D", shape=Shape.DRIVER_3D),
    _copy("cuMemcpy3DAsync", shape=Shape.DRIVER_3D, stream=2),
    _copy("cuMemcpy3DPeer", _PEER, shape=Shape.DRIVER_3D),
    _copy("cuMemcpy3DPeerAsync", _PEER, shape=Shape.DRIVER_3D, stream=2),
    _copy("cuMemcpyWithAttributesAsync", _BY_ADDRESS, count=3, target=1, source=2, stream=5),
    _copy("cuMemcpyBatchAsync cuMemcpy3DBatchAsync", _BY_ADDRESS, shape=Shape.PLAIN),
    _copy("cuMemcpy3DWithAttributesAsync", _BY_ADDRESS, shape=Shape.PLAIN),
    _copy("cuMemPrefetchBatchAsync cuMemDiscardAndPrefetchBatchAsync", _BY_ADDRESS, shape=Shape.PLAIN),
    _copy("cuMemPrefetchAsync", _BY_ADDRESS, shape=Shape.PLAIN, count=2),
)

RUNTIME_COUNTED = (
    _counted("cudaMemset", Op.MEMSET, count=3),
    _counted("cudaMemsetAsync", Op.MEMSET, _HOT, count=3, stream=4),
    _counted("cudaMemset2D", Op.MEMSET, count=4, rows=5),
    _counted("cudaMemset2DAsync", Op.MEMSET, _HOT, count=4, rows=5, stream=6),
    _counted("cudaMemset3D", Op.MEMSET),
    _counted("cudaMemset3DAsync", Op.MEMSET, _HOT),
    _counted("cudaStreamWaitEvent", Op.STREAM_WAIT, _HOT, stream=1, handle=2),
    _counted("cudaExecutionCtxWaitEvent", Op.STREAM_WAIT, _HOT, handle=2),
    _counted(
        "cudaWaitExternalSemaphoresAsync cudaWaitExternalSemaphoresAsync_v2", Op.STREAM_WAIT, _HOT, stream=4
    ),
    _counted("cudaEventRecord cudaEventRecordWithFlags", Op.EVENT_RECORD, _HOT, handle=1, stream=2),
    _counted("cudaExecutionCtxRecordEvent", Op.EVENT_RECORD, _HOT, handle=2),
    _counted("cudaEventCreate cudaEventCreateWithFlags", Op.EVENT, _HOT, out=1),
    _counted("cudaEventDestroy", Op.EVENT, _HOT, handle=1),
    _counted("cudaStreamCreate cudaStreamCreateWithFlags cudaStreamCreateWithPriority", Op.STREAM, out=1),
    _counted("cudaExecutionCtxStreamCreate", Op.STREAM, out=1),
    _counted("cudaStreamDestroy", Op.STREAM, handle=1),
    _counted(
        "cudaStreamBeginCapture cudaStreamBeginCaptureToGraph cudaStreamBeginRecaptureToGraph",
        Op.GRAPH,
        stream=1,
    ),
    _counted("cudaStreamEndCapture", Op.GRAPH, stream=1, out=2),
    _counted("cudaGraphCreate cudaGraphClone", Op.GRAPH, out=1),
    _counted(
        "cudaGraphInstantiate cudaGraphInstantiateWithFlags cudaGraphInstantiateWithParams", Op.GRAPH, out=1
    ),
    _counted("cudaGraphExecUpdate cudaGraphExecDestroy cudaGraphDestroy", Op.GRAPH, handle=1),
    _counted("cudaGraphUpload", Op.GRAPH, handle=1, stream=2),
    _counted(_node_changes("cuda"), Op.GRAPH, _HOT, handle=1),
    _counted("cudaLibraryLoadData cudaLibraryLoadFromFile", Op.MODULE, out=1),
    _counted("cudaLibraryUnload", Op.MODULE, handle=1),
    # The first query of a kernel loads its code (lazy loading, the default from 11.8 on).
    _counted("cudaFuncGetAttributes", Op.MODULE, _HOT, handle=2),
    _counted("cudaFuncSetAttribute", Op.MODULE, _HOT, handle=1),
    _counted("cudaGetKernel cudaLibraryGetKernel", Op.MODULE, _HOT, out=1),
    _counted("cudaInitDevice cudaDeviceReset cudaThreadExit", Op.CONTEXT),
    _counted("cudaDeviceEnablePeerAccess cudaDeviceDisablePeerAccess", Op.CONTEXT),
    _counted("cudaDeviceSetLimit cudaThreadSetLimit", Op.CONTEXT),
    _counted("cudaGreenCtxCreate cudaExecutionCtxDestroy", Op.CONTEXT),
)

DRIVER_COUNTED = (
    *(_counted(f"cuMemsetD{bits}", Op.MEMSET, scale=bits // 8, count=3) for bits in (8, 16, 32)),
    *(
        _counted(f"cuMemsetD{bits}Async", Op.MEMSET, _HOT, scale=bits // 8, count=3, stream=4)
        for bits in (8, 16, 32)
    ),
    *(_counted(f"cuMemsetD2D{bits}", Op.MEMSET, scale=bits // 8, count=4, rows=5) for bits in (8, 16, 32)),
    *(
        _counted(f"cuMemsetD2D{bits}Async", Op.MEMSET, _HOT, scale=bits // 8, count=4, rows=5, stream=6)
        for bits in (8, 16, 32)
    ),
    _counted("cuStreamWaitEvent", Op.STREAM_WAIT, _HOT, stream=1, handle=2),
    _counted("cuCtxWaitEvent cuGreenCtxWaitEvent", Op.STREAM_WAIT, _HOT, handle=2),
    _counted("cuStreamWaitValue32 cuStreamWaitValue64 cuStreamBatchMemOp", Op.STREAM_WAIT, _HOT, stream=1),
    _counted("cuWaitExternalSemaphoresAsync", Op.STREAM_WAIT, _HOT, stream=4),
    _counted("cuEventRecord cuEventRecordWithFlags", Op.EVENT_RECORD, _HOT, handle=1, stream=2),
    _counted("cuCtxRecordEvent cuGreenCtxRecordEvent", Op.EVENT_RECORD, _HOT, handle=2),
    _counted("cuEventCreate", Op.EVENT, _HOT, out=1),
    _counted("cuEventDestroy", Op.EVENT, _HOT, handle=1),
    _counted("cuStreamCreate cuStreamCreateWithPriority cuGreenCtxStreamCreate", Op.STREAM, out=1),
    _counted("cuStreamDestroy", Op.STREAM, handle=1),
    _counted(
        "cuStreamBeginCapture cuStreamBeginCaptureToGraph cuStreamBeginRecaptureToGraph", Op.GRAPH, stream=1
    ),
    _counted("cuStreamEndCapture", Op.GRAPH, stream=1, out=2),
    _counted("cuGraphCreate cuGraphClone", Op.GRAPH, out=1),
    _counted("cuGraphInstantiate cuGraphInstantiateWithFlags cuGraphInstantiateWithParams", Op.GRAPH, out=1),
    _counted("cuGraphExecUpdate cuGraphExecDestroy cuGraphDestroy", Op.GRAPH, handle=1),
    _counted("cuGraphUpload", Op.GRAPH, handle=1, stream=2),
    _counted(_node_changes("cu"), Op.GRAPH, _HOT, handle=1),
    _counted("cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary", Op.MODULE, out=1),
    _counted("cuLibraryLoadData cuLibraryLoadFromFile", Op.MODULE, out=1),
    _counted("cuModuleUnload cuLibraryUnload", Op.MODULE, handle=1),
    _counted("cuLinkCreate", Op.MODULE, out=4),
    _counted("cuLinkAddData cuLinkAddFile cuLinkComplete cuLinkDestroy", Op.MODULE, handle=1),
    _counted("cuModuleGetFunction cuLibraryGetKernel cuKernelGetFunction", Op.MODULE, _HOT, out=1),
    _counted("cuFuncLoad", Op.MODULE, _HOT, handle=1),
    _counted("cuInit cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease cuDevicePrimaryCtxReset", Op.CONTEXT),
    _counted("cuCtxCreate cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy cuCtxDetach cuCtxSetLimit", Op.CONTEXT),
    _counted("cuCtxEnablePeerAccess cuCtxDisablePeerAccess", Op.CONTEXT),
    _counted("cuGreenCtxCreate cuGreenCtxDestroy cuCtxFromGreenCtx", Op.CONTEXT),
    _counted(
        "cuCheckpointProcessLock cuCheckpointProcessCheckpoint cuCheckpointProcessRestore "
        "cuCheckpointProcessUnlock",
        Op.CONTEXT,
    ),
)

RUNTIME_LAUNCHES = (
    # nvcc 13 turns <<<>>> calls into the function with underscores, which takes a handle instead of the function.
    _launch(
        "cudaLaunchKernel __cudaLaunchKernel cudaLaunchCooperativeKernel", Shape.LAUNCH_RUNTIME, stream=8
    ),
    _launch("cudaLaunchKernelExC", Shape.LAUNCH_CONFIG),
    _launch("cudaLaunchHostFunc cudaLaunchHostFunc_v2 cudaStreamAddCallback", Shape.PLAIN, stream=1),
    _launch("cudaLaunchCooperativeKernelMultiDevice", Shape.PLAIN),
    Operation("cudaGraphLaunch", Op.GRAPH_LAUNCH, Category.LAUNCH, arguments={"handle": 1, "stream": 2}),
)

DRIVER_LAUNCHES = (
    _launch("cuLaunchKernel cuLaunchCooperativeKernel", Shape.LAUNCH_DRIVER, stream=9),
    _launch("cuLaunchKernelEx", Shape.LAUNCH_CONFIG),
    _launch("cuLaunchHostFunc cuStreamAddCallback", Shape.PLAIN, stream=1),
    _launch("cuLaunchCooperativeKernelMultiDevice cuLaunch cuLaunchGrid cuLaunchGridAsync", Shape.PLAIN),
    Operation("cuGraphLaunch", Op.GRAPH_LAUNCH, Category.LAUNCH, arguments={"handle": 1, "stream": 2}),
)


_ESSENTIAL = """
cudaDeviceSynchronize cudaEventSynchronize cudaStreamSynchronize
cudaMalloc cudaMallocAsync cudaMallocManaged cudaMallocHost cudaHostAlloc cudaHostRegister
cudaFree cudaFreeAsync cudaFreeHost cudaHostUnregister
cudaMemcpy cudaMemcpyAsync cudaMemcpy2DAsync cudaMemcpyPeerAsync cudaSetDevice
cudaStreamBeginCapture cudaStreamEndCapture cudaGraphInstantiate cudaGraphInstantiateWithFlags cudaGraphLaunch
cuCtxSynchronize cuCtxSynchronize_v2 cuEventSynchronize cuStreamSynchronize
cuMemAlloc_v2 cuMemAllocAsync cuMemAllocManaged cuMemAllocHost_v2 cuMemHostAlloc cuMemHostRegister_v2
cuMemCreate cuMemRetainAllocationHandle
cuMemFree_v2 cuMemFreeAsync cuMemFreeHost cuMemHostUnregister cuMemRelease
cuMemcpy cuMemcpyAsync cuMemcpyHtoD_v2 cuMemcpyHtoDAsync_v2 cuMemcpyDtoH_v2 cuMemcpyDtoHAsync_v2
cuMemcpyDtoDAsync_v2
cuStreamBeginCapture_v2 cuStreamEndCapture cuGraphInstantiateWithFlags cuGraphLaunch
"""

ESSENTIAL = frozenset(_ESSENTIAL.split())
"""The functions in which most jobs wait: the only probed functions where a probe takes 0.1 s to detach."""


def only_counted(launches: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """The same launches as hot functions, without time charged to them."""
    return tuple(launch._replace(inside=Category.NONE, group=HookGroup.HOT) for launch in launches)
