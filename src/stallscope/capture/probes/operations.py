"""The traced functions in one table: their names, the operation of each, and the meaning of its arguments.

The symbols to look up, the cookie of each probe (bits: bpf/events.h) and the names in `calls.symbol` are derived from
this table. Signatures: nccl.h 2.18 to 2.32, cuda_runtime_api.h and cuda.h 11 to 13.

libnccl exports each function twice (ncclX, pncclX) at one address: one probe. CUDA has separate code for each default
stream flavour and for the driver versions of a function (_v2): all of them are probed; a driver call inside a runtime
call is part of it. A probe costs 0.5 to 2 us per call: probes on hot functions are in separate groups, which can be
switched on and off (governor.py). The functions of CUDA are in cuda_table.py, and of AMD's HIP in hip_table.py.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from stallscope.capture.gpu import drivers
from stallscope.capture.probes import cuda_table, hip_table
from stallscope.capture.probes.operation import Operation
from stallscope.events.kernel import FUNCTION, Action, HookGroup, Shape
from stallscope.events.layout import Array
from stallscope.events.names import Category, Op

_RUNTIME_FLAVOURS = ("", "_ptsz", "_ptds")
_DRIVER_FLAVOURS = ("", "_v2", "_ptsz", "_ptds", "_v2_ptsz", "_v2_ptds")
_ARGUMENT_BITS = {"count": 40, "datatype": 44, "reduce_op": 48, "peer": 52, "comm": 56, "stream": 60}


class Hook(NamedTuple):
    """One probe to attach, as Program.attach() expects it."""

    offset: int  # of the function in the file
    cookie: int
    part: str  # of the kernel side: nccl, cuda, counted or graph (bpf/*.bpf.c)
    symbol: str


def _collective(names: str, op: Op, **arguments: int) -> Operation:
    return Operation(names, op, action=Action.COLLECTIVE, arguments=arguments)


def _comm(names: str, op: Op, action: Action = Action.CALL) -> Operation:
    return Operation(names, op, action=action)


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
"""Left out: functions that only answer from memory, and ncclMemAlloc, whose driver calls are traced. A test lists
all of them.
"""

_DEVICES = (Operation("cudaSetDevice", Op.NONE, action=Action.SET_DEVICE),)


def _graph(names: str, action: Action) -> Operation:
    group = HookGroup.GRAPH_LAUNCHES if action is Action.GRAPH_LAUNCH else HookGroup.ALWAYS
    return Operation(names, Op.GRAPH_LAUNCH, action=action, group=group)


RUNTIME_GRAPHS = (
    _graph(
        "cudaStreamBeginCapture cudaStreamBeginCaptureToGraph cudaStreamBeginRecaptureToGraph",
        Action.CAPTURE_BEGIN,
    ),
    _graph("cudaStreamEndCapture", Action.CAPTURE_END),
    _graph(
        "cudaGraphInstantiate cudaGraphInstantiateWithFlags cudaGraphInstantiateWithParams",
        Action.INSTANTIATE,
    ),
    _graph("cudaGraphLaunch", Action.GRAPH_LAUNCH),
)

DRIVER_GRAPHS = (
    _graph(
        "cuStreamBeginCapture cuStreamBeginCaptureToGraph cuStreamBeginRecaptureToGraph", Action.CAPTURE_BEGIN
    ),
    _graph("cuStreamEndCapture", Action.CAPTURE_END),
    _graph("cuGraphInstantiate cuGraphInstantiateWithFlags cuGraphInstantiateWithParams", Action.INSTANTIATE),
    _graph("cuGraphLaunch", Action.GRAPH_LAUNCH),
)


class Entry(NamedTuple):
    """An exported name, its operation, and the part of the kernel side for its probe. A name may have two."""

    symbol: str
    part: str
    operation: Operation


_RUNTIME = cuda_table.RUNTIME_LEDGER + cuda_table.RUNTIME_LAUNCHES + _DEVICES
_RUNTIME_COUNTED = cuda_table.RUNTIME_COUNTED + cuda_table.only_counted(cuda_table.RUNTIME_LAUNCHES)
_DRIVER_COUNTED = cuda_table.DRIVER_COUNTED + cuda_table.only_counted(cuda_table.DRIVER_LAUNCHES)

_TABLES = (
    ("nccl", NCCL, ("",)),
    ("cuda", _RUNTIME, _RUNTIME_FLAVOURS),
    ("cuda", cuda_table.DRIVER_LEDGER + cuda_table.DRIVER_LAUNCHES, _DRIVER_FLAVOURS),
    ("counted", _RUNTIME_COUNTED, _RUNTIME_FLAVOURS),
    ("counted", _DRIVER_COUNTED, _DRIVER_FLAVOURS),
    ("cuda", hip_table.LEDGER + hip_table.LAUNCHES, ("",)),
    ("counted", hip_table.COUNTED + cuda_table.only_counted(hip_table.LAUNCHES), ("",)),
    ("graph", RUNTIME_GRAPHS, _RUNTIME_FLAVOURS),
    ("graph", DRIVER_GRAPHS, _DRIVER_FLAVOURS),
)

BUDGETED = (HookGroup.WAITS, HookGroup.COPIES, HookGroup.HOT)
"""The groups that a governor keeps within a budget."""

REDUNDANT = (HookGroup.RUNTIME_WAITS, HookGroup.GRAPH_LAUNCHES)
"""The groups that a governor switches off while they report nothing of their own (redundant.py)."""

GOVERNED = (*BUDGETED, *REDUNDANT)
"""The groups that a governor switches on and off, where there is one."""

ALWAYS = (HookGroup.ALWAYS, HookGroup.WAITS, HookGroup.COPIES, *REDUNDANT)
"""The groups that are on from the beginning."""

ENTRIES = tuple(
    Entry(name + flavour, part, operation)
    for part, table, flavours in _TABLES
    for operation in table
    for name in operation.names.split()
    for flavour in flavours
)
"""Every exported name with its flavours."""

_FUNCTIONS: tuple[str, ...] = ("", *dict.fromkeys(entry.symbol for entry in ENTRIES))

FIRST_IOCTL = len(_FUNCTIONS)
"""The number of the first entry of drivers.SYMBOLS."""

SYMBOLS: tuple[str, ...] = (*_FUNCTIONS, *drivers.SYMBOLS)
"""Names by the number in `calls.symbol`; 0 is none. Functions, then the GPU driver's ioctls."""

_NUMBER = {name: number for number, name in enumerate(_FUNCTIONS)}


OPS = np.full(len(SYMBOLS), Op.IOCTL, np.uint16)
OPS[:FIRST_IOCTL] = [0, *({entry.symbol: entry.operation.op for entry in ENTRIES}.values())]
"""The operation of each symbol, by its number."""

GROUPS = np.zeros(len(SYMBOLS), np.uint8)
"""The group of each symbol, by its number; launches count as hot, also where they are timed."""
for _entry in ENTRIES:
    if _entry.part != "graph":
        GROUPS[_NUMBER[_entry.symbol]] |= _entry.operation.group


def cookie(entry: Entry) -> int:
    """The task of the probe on the kernel side: see enum action in bpf/events.h."""
    operation = entry.operation
    value = operation.op | operation.inside << 8 | _NUMBER[entry.symbol] << 16 | operation.action << 32
    for argument, number in operation.arguments.items():
        if entry.part in ("nccl", "graph"):
            value |= number << _ARGUMENT_BITS[argument]
    return value


def functions() -> Array:
    """How the arguments of each CUDA function are read: kernel.FUNCTION (FIRST_IOCTL,), by number of the symbol."""
    rows = np.zeros(FIRST_IOCTL, FUNCTION)
    for entry in ENTRIES:
        operation, row = entry.operation, rows[_NUMBER[entry.symbol]]
        if entry.part not in ("cuda", "counted"):
            continue
        row["shape"], row["group"] = operation.shape, operation.group
        row["direction"], row["memory"], row["scale"] = operation.direction, operation.memory, operation.scale
        for argument, number in operation.arguments.items():
            row[argument] = number
        row["n_stack"] = _n_stack_arguments(operation)
    return rows


def _n_stack_arguments(operation: Operation) -> int:
    """Relevant arguments beyond the six that x86-64 passes in registers."""
    by_value = 9 if operation.shape is Shape.ALLOC_3D else 7 if operation.shape is Shape.LAUNCH_DRIVER else 0
    return max(0, by_value - 6, *(number - 6 for number in operation.arguments.values()))


def hooks(
    offsets: Mapping[str, int], *, launches: bool = False, groups: Collection[HookGroup] = ALWAYS
) -> list[Hook]:
    """The probes for a file that has these functions.

    offsets: file offset of each function by its name; names that are not in the table are left out. launches: charge
    the time in launches to them. Two names at one offset share one probe of each part; the name that comes first in the
    table counts.
    """
    entries = [entry for entry in _selected_entries(launches, groups) if entry.symbol in offsets]
    first = {(offsets[entry.symbol], entry.part): entry for entry in reversed(entries)}
    return [
        Hook(offset, cookie(entry), part, entry.symbol) for (offset, part), entry in sorted(first.items())
    ]


def essential_hooks(hooks: Iterable[Hook]) -> list[Hook]:
    """The probes that a diagnosis needs, for kernels on which hundreds of probes would take minutes to detach."""
    return [
        hook
        for hook in hooks
        if (hook.symbol in cuda_table.ESSENTIAL and hook.part != "counted")
        or (hook.part == "nccl" and OPS[_NUMBER[hook.symbol]] not in _RARE_OPS)
    ]


def names(*, launches: bool = False, groups: Collection[HookGroup] = ALWAYS) -> Iterable[str]:
    """The names of the functions to look up in a file."""
    return list(dict.fromkeys(entry.symbol for entry in _selected_entries(launches, groups)))


def _selected_entries(launches: bool, groups: Collection[HookGroup]) -> list[Entry]:
    """Launches are either timed or, if hot functions are wanted, counted."""
    return [
        entry
        for entry in ENTRIES
        if entry.operation.group in groups
        and (launches or entry.operation.inside is not Category.LAUNCH)
        and not (launches and entry.part == "counted" and entry.operation.op in _LAUNCH_OPS)
    ]


_LAUNCH_OPS = (Op.LAUNCH, Op.GRAPH_LAUNCH)
_RARE_OPS = (Op.COMM_SETUP, Op.ONE_SIDED)
