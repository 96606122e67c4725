"""The real library, where it is installed (pip install nvidia-nccl-cu13): every call of the table is recorded.

Without a GPU the calls fail, because their communicator is invalid, but the probes fire and record the arguments.
"""

import importlib.util
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stallscope.capture.probes import elf, operations
from stallscope.capture.probes.operations import ENTRIES, SYMBOLS, Entry, Hook
from stallscope.capture.probes.program import Program
from stallscope.capture.rows import records
from stallscope.events.kernel import Action, Kind
from stallscope.events.names import DATATYPE_BYTES, Op

LEFT_OUT = {
    "what answers from memory": """ncclGetVersion ncclGetErrorString ncclGetLastError ncclCommCount
        ncclCommCuDevice ncclCommUserRank ncclCommMemStats ncclCommQueryProperties ncclWinGetUserPtr
        ncclCommGetAsyncError ncclResetDebugInit ncclResetDebugInitInternal ncclSetEncryption""",
    "operators, made from a number": "ncclRedOpCreatePreMulSum ncclRedOpDestroy",
    "allocation, whose driver calls are seen": "ncclMemAlloc ncclMemFree",
    "parameters": """ncclParamBind ncclParamDumpAll ncclParamGet ncclParamGetAllParameterKeys ncclParamGetI16
        ncclParamGetI32 ncclParamGetI64 ncclParamGetI8 ncclParamGetParameter ncclParamGetStr ncclParamGetU16
        ncclParamGetU32 ncclParamGetU64 ncclParamGetU8""",
    "what kernels on the device need to know": """ncclGetCftDeviceLeInfo ncclGetLsaDevicePointer
        ncclGetLsaMultimemDevicePointer ncclGetMultimemDeviceLeInfo ncclGetMultimemDevicePointer
        ncclGetPeerDeviceLeInfo ncclGetPeerDevicePointer ncclGinBarrierCreateRequirement
        ncclGinInboxA2ACreateRequirement ncclGinOutboxCreateRequirement ncclLLA2ACalcSlots
        ncclLLA2ACreateRequirement ncclLsaBarrierCreateRequirement ncclTeamCft ncclTeamCftMultimem ncclTeamLsa
        ncclTeamRail ncclTeamRankToLsa ncclTeamRankToWorld ncclTeamWorld""",
}


def installed() -> Path | None:
    """libnccl.so.2 of the wheel."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    paths = [path for folder in folders for path in Path(folder).glob("lib/libnccl.so*")]
    return paths[0] if paths else None


pytestmark = [
    pytest.mark.bpf,
    pytest.mark.live,
    pytest.mark.compiler,
    pytest.mark.skipif(installed() is None, reason="libnccl is not installed: pip install nvidia-nccl-cu13"),
]
COLLECTIVES = [entry for entry in ENTRIES if entry.operation.action is Action.COLLECTIVE]
OTHERS = [
    entry
    for entry in ENTRIES
    if entry.operation.action in (Action.ENQUEUE, Action.CALL)
    and entry.operation.op in (Op.COMM_SETUP, Op.ONE_SIDED)
]


@pytest.fixture(scope="module")
def library() -> Path:
    path = installed()
    assert path is not None
    return path


@pytest.fixture(scope="module")
def hooks(library: Path) -> list[Hook]:
    with elf.open_image(library) as image:
        result = elf.exported_functions(image, operations.names())
    return operations.hooks({name: symbol.offset for name, symbol in result.items()})


@pytest.fixture
def exported(library: Path) -> Iterator[set[str]]:
    """Its functions that are in the table."""
    with elf.open_image(library) as image:
        yield set(elf.exported_functions(image, operations.names()))


def exported_names(path: Path) -> set[str]:
    """All functions that it exports, by nm."""
    words = subprocess.check_output(["nm", "-D", "--defined-only", path], text=True).split()
    return {word.partition("@")[0] for word in words if word.startswith("nccl")}


@pytest.mark.pure
def test_every_exported_function_is_hooked_or_left_out_for_a_reason(library: Path):
    left_out = {name for names in LEFT_OUT.values() for name in names.split()}
    unknown = exported_names(library) - set(operations.names()) - left_out
    assert not unknown, f"new in this version: {sorted(unknown)}"
    assert not left_out & set(operations.names())


def arguments(entry: Entry) -> str:
    """A call without a communicator and configuration, whose other arguments are numbers."""
    values = ["P(1)"] * max(entry.operation.arguments.values()) + ["P(0)"]
    by_number = {number: name for name, number in entry.operation.arguments.items()}
    for number, name in by_number.items():
        values[number - 1] = {
            "count": "Z(1000)",
            "datatype": "7",
            "reduce_op": "2",
            "peer": "3",
            "comm": "P(0)",
            "stream": "P(77)",
        }[name]
    return ", ".join(values)


def test_every_collective_is_recorded_with_its_arguments(
    tracing: Callable[..., Program], puppet, exported: set[str]
):
    program = tracing()
    called = [entry for entry in COLLECTIVES if entry.symbol in exported]
    puppet.does(*(f"lib.{entry.symbol}({arguments(entry)})" for entry in called))
    arrivals = program.arrivals.drain()
    rows = records.collectives(arrivals[arrivals["pid"] == puppet.pid], node=0)
    assert rows["op"].tolist() == [entry.operation.op for entry in called]
    assert (rows["count_bytes"] == 1000 * DATATYPE_BYTES[8]).all()
    assert (rows["stream"] == 77).all()
    for row, entry in zip(rows, called, strict=True):
        given = entry.operation.arguments
        assert row["peer_rank"] == (3 if "peer" in given else -1), entry.symbol
        assert row["reduce_op"] == (3 if "reduce_op" in given else 0), entry.symbol
    assert (rows["comm_handle"] == 0).all()
    assert not any(program.losses()[name] for name in ("lost_arrival", "lost_call"))


def test_every_other_call_is_recorded_as_failed(tracing: Callable[..., Program], puppet, exported: set[str]):
    program = tracing()
    called = [entry for entry in OTHERS if entry.symbol in exported]
    puppet.does(*(f"lib.{entry.symbol}({', '.join(['P(0)'] * 11)})" for entry in called))
    events = program.events.drain()
    calls = records.of_kind(events[events["pid"] == puppet.pid], Kind.CALL)
    assert [SYMBOLS[number] for number in calls["symbol"]] == [entry.symbol for entry in called]
    assert (calls["result"] == 4).all()  # ncclInvalidArgument


CRASHES = "ncclCommShrink"  # without a parent
MADE_OR_ENDED = [
    entry
    for entry in ENTRIES
    if entry.operation.op in (Op.COMM_INIT, Op.COMM_SPLIT, Op.COMM_DESTROY, Op.GROUP)
    and entry.symbol != CRASHES
]


def test_every_communicator_create_and_destroy_call_is_recorded(
    tracing: Callable[..., Program], puppet, exported: set[str]
):
    """Without valid arguments the calls fail or do nothing; a failed call creates no communicator."""
    program = tracing(slow_call_ns=0)
    called = [entry for entry in MADE_OR_ENDED if entry.symbol in exported]
    assert {"ncclCommInitRankConfig", "ncclCommSplit", "ncclCommAbort"} <= {entry.symbol for entry in called}
    puppet.does(*(f"lib.{entry.symbol}({', '.join(['P(0)'] * 11)})" for entry in called))
    events = program.events.drain()
    own_rows = events[events["pid"] == puppet.pid]
    assert [SYMBOLS[number] for number in records.of_kind(own_rows, Kind.CALL)["symbol"]] == [
        entry.symbol for entry in called
    ]
    assert not len(records.of_kind(own_rows, Kind.COMM_BORN))


def test_a_real_comm_init_call_is_recorded(tracing: Callable[..., Program], puppet):
    """The unique id is passed by value: on the stack, or by its address, as the machine has it."""
    program = tracing(slow_call_ns=0)
    puppet.does(
        "made, one = P(), Id()",
        "lib.ncclCommInitRank.argtypes = [P, ctypes.c_int, Id, ctypes.c_int]",
        "result = lib.ncclCommInitRank(ctypes.byref(made), 4, one, 2)",
    )
    (call,) = records.of_kind(program.events.drain(), Kind.CALL)
    assert (SYMBOLS[call["symbol"]], call["op"]) == ("ncclCommInitRank", Op.COMM_INIT)
    assert call["result"] != 0
