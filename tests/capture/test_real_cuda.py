"""The real runtime libraries, where they are installed (pip install nvidia-cuda-runtime-cu12, nvidia-cuda-runtime).

Every call is recorded: without a GPU the calls fail, but the probes fire and record the arguments. The headers show
whether the arguments in the table are right, and whether a function is missing.
"""

import importlib.util
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stallscope.capture.probes import elf, operations
from stallscope.capture.probes.operations import ENTRIES, SYMBOLS, Entry, Hook
from stallscope.capture.probes.program import Program
from stallscope.capture.rows import records
from stallscope.capture.rows.call_statistics import CallSums
from stallscope.events.kernel import HookGroup, Kind
from stallscope.events.names import Direction, Op

from .always_on import AlwaysOn
from .conftest import Puppet

N_CALLS = 3
FLAVOUR = re.compile(r"(_v[2-9])?(_ptsz|_ptds)?$")
CUDA = [entry for entry in ENTRIES if entry.part in ("cuda", "counted")]


def installed() -> dict[str, Path]:
    """The folders of the wheels, with lib and include, by version."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(index) for index in (spec.submodule_search_locations or ())] if spec else []
    return {
        library.name.rpartition(".")[2]: library.parents[1]
        for root in roots
        for library in sorted(root.glob("*/lib/libcudart.so.*"))
    }


WHERE = installed()

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.live,
    pytest.mark.compiler,
    pytest.mark.skipif(
        not WHERE,
        reason="libcudart is not installed: pip install nvidia-cuda-runtime-cu12 nvidia-cuda-runtime",
    ),
]


@pytest.fixture(scope="module", params=WHERE or ["none"])
def where(request: pytest.FixtureRequest) -> Path:
    """The folder of one version."""
    return WHERE[request.param]


@pytest.fixture(scope="module")
def library(where: Path) -> Path:
    return next(where.glob("lib/libcudart.so.*"))


@pytest.fixture(scope="module")
def places(library: Path) -> dict[str, int]:
    with elf.open_image(library) as image:
        exported = elf.exported_functions(image, operations.names(groups=HookGroup))
    return {name: symbol.offset for name, symbol in exported.items()}


@pytest.fixture(scope="module")
def hooks(places: dict[str, int]) -> list[Hook]:
    return operations.hooks(places, groups=HookGroup)


@pytest.fixture(scope="module")
def prototypes(where: Path) -> dict[str, list[str]]:
    """The parameters of every function that the headers declare, unchanged."""
    text = "".join((where / "include" / name).read_text() for name in ("cuda_runtime_api.h", "cuda.h"))
    matches = re.findall(r"(?:CUDARTAPI(?:_CDECL)?|CUDAAPI)\s+(\w+)\s*\(([^;]*?)\);", text, re.DOTALL)
    return {
        name: [" ".join(part.split()) for part in output.split(",")] for name, output in reversed(matches)
    }


def parameter(prototypes: dict[str, list[str]], entry: Entry, argument: str) -> str:
    name = entry.symbol if entry.symbol in prototypes else FLAVOUR.sub("", entry.symbol)
    return prototypes[name][entry.operation.arguments[argument] - 1]


def matching(*patterns: str) -> "re.Pattern[str]":
    return re.compile("|".join(patterns))


LEFT_OUT = {
    "answers from memory": matching(
        r"cu(da)?\w*(Get|Occupancy)\w*",
        r"cu(da)?\w*(Query|IsCapturing|ElapsedTime|CanAccessPeer|IsLoaded|FindInClone)",
        r"cu(da)?\w*Enumerate\w+|cudaChooseDevice|cudaPeekAtLastError|cuDevice(TotalMem|ComputeCapability)",
    ),
    "sets what only the process itself looks at": matching(
        r"cudaSet\w+|cuCtx(SetCurrent|PushCurrent|PopCurrent|Attach)|cuParam\w+|cu(da)?Profiler\w+",
        r"cu(da)?\w*(Set|Copy)(Attribute\w*|CacheConfig|SharedMemConfig|Flags|MemPool|Access|GraphMemAttribute)",
        r"cuFuncSet(BlockShape|SharedSize)|cu(da)?Logs\w+|cuCoredump\w+|cu(da)?CtxResetPersistingL2Cache",
        r"cu(da)?Device\w*AsyncNotification|cu(da)?ThreadExchangeStreamCaptureMode|cuCheckpointOperationComplete",
    ),
    "builds a graph in memory": matching(
        r"cu(da)?Graph(Add|Remove|Retain|Release|Conditional|Debug|Destroy)\w+|cu(da)?UserObject\w+",
        r"cu(da)?Graph\w*Node(Set|Copy)\w+|cu(da)?Stream\w+CaptureDependencies",
    ),
    "makes a descriptor of what is there": matching(
        r"cu(da)?(Tex|Surf|TensorMap|DevResource|DevSmResource|Subgrid)\w+|cuda(Create|Destroy)(Texture|Surface)\w+",
        r"cuda(Bind|Unbind)\w+|cudaCreateChannelDesc|cu(da)?Mem\w*Export\w+",
    ),
    "of graphics, video and other devices": matching(
        r"cu(da)?(EGL|GL|Graphics|VDPAU)\w+|cudaEventCreateFromEGLSync|cu\w+ToCig|cuFabric\w+|cuLogicalEndpoint\w+",
        r"cu(da)?(Import|Destroy|Signal)ExternalSemaphores?(Async)?",
    ),
    "an advice, or a word for a stream to write": matching(
        r"cu(da)?Mem(Advise|Discard\w+)|cu(da)?StreamAttachMemAsync|cuStreamWriteValue(32|64)|cu(da)?IpcOpenEventHandle",
        r"cuMem(BatchDecompress|MapArray)Async",
    ),
}


def test_every_function_is_hooked_or_left_out_for_a_reason(library: Path, prototypes: dict[str, list[str]]):
    """The functions that the runtime exports, and the driver functions that the headers declare."""
    known = {entry.symbol for entry in ENTRIES}
    words = subprocess.check_output(["nm", "-D", "--defined-only", library], text=True).split()
    exported = {name for word in words if re.match("cuda[A-Z]", name := word.partition("@")[0])}
    declared = {name for name in prototypes if re.match("cu[A-Z]", name)}
    assert len(exported) > 300 and len(declared) > 300
    for name in sorted((exported | declared) - known):
        reasons = [why for why, pattern in LEFT_OUT.items() if pattern.fullmatch(FLAVOUR.sub("", name))]
        assert reasons, f"{name} is neither hooked nor left out for a reason"


SAYS = {
    "kind": r"cudaMemcpyKind",
    "stream": r"(cudaStream_t|CUstream)\b",
    "rows": r"\b[hH]eight\b",
    "count": r"size_t|cudaExtent|unsigned int (ByteCount|bytesize|WidthInBytes|Bytesize)",
    "target": r"(dst|\bptr\b)",
    "source": r"src",
    "out": r"\*",
}


@pytest.mark.parametrize("argument", SAYS)
def test_argument_positions_match_the_cuda_headers(prototypes: dict[str, list[str]], argument: str):
    known = [
        entry
        for entry in CUDA
        if argument in entry.operation.arguments
        and (entry.symbol in prototypes or FLAVOUR.sub("", entry.symbol) in prototypes)
        and not entry.symbol.startswith("cudaLaunch")  # dim3 by value takes two registers
    ]
    assert len(known) > 10
    wrong = {
        entry.symbol: output
        for entry in known
        if not re.search(SAYS[argument], output := parameter(prototypes, entry, argument))
    }
    assert not wrong


OFFSETS = """
#include <stddef.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#define AT(type, field, offset) _Static_assert(offsetof(type, field) == offset, #type "." #field);
AT(struct cudaMemcpy3DParms, srcPtr, 32) AT(struct cudaMemcpy3DParms, dstArray, 64)
AT(struct cudaMemcpy3DParms, dstPtr, 64 + 32) AT(struct cudaMemcpy3DParms, extent, 2 * 64)
AT(struct cudaMemcpy3DParms, kind, 152)
AT(struct cudaMemcpy3DPeerParms, srcPtr, 32) AT(struct cudaMemcpy3DPeerParms, dstArray, 72)
AT(struct cudaMemcpy3DPeerParms, dstPtr, 72 + 32) AT(struct cudaMemcpy3DPeerParms, extent, 2 * 72)
AT(CUDA_MEMCPY2D, srcMemoryType, 16) AT(CUDA_MEMCPY2D, srcHost, 16 + 8) AT(CUDA_MEMCPY2D, srcDevice, 16 + 16)
AT(CUDA_MEMCPY2D, dstMemoryType, 72) AT(CUDA_MEMCPY2D, dstDevice, 72 + 16) AT(CUDA_MEMCPY2D, WidthInBytes, 112)
AT(CUDA_MEMCPY3D, srcMemoryType, 32) AT(CUDA_MEMCPY3D, srcHost, 32 + 8) AT(CUDA_MEMCPY3D, srcDevice, 32 + 16)
AT(CUDA_MEMCPY3D, dstMemoryType, 120) AT(CUDA_MEMCPY3D, dstHost, 120 + 8) AT(CUDA_MEMCPY3D, WidthInBytes, 176)
AT(CUDA_MEMCPY3D_PEER, srcMemoryType, 32) AT(CUDA_MEMCPY3D_PEER, dstMemoryType, 120)
AT(CUDA_MEMCPY3D_PEER, WidthInBytes, 176) AT(CUmemAllocationProp, location.id, 12)
AT(cudaLaunchConfig_t, blockDim, 12) AT(cudaLaunchConfig_t, stream, 32)
AT(CUlaunchConfig, blockDimX, 12) AT(CUlaunchConfig, hStream, 32) AT(struct cudaPitchedPtr, pitch, 8)
"""
"""The arguments that bpf/calls.h reads, compared with the headers."""


COMPILER_WORDS = "".join(
    f"#define {name}\n"
    for name in (
        *(
            "__host__",
            "__device__",
            "__device_builtin__",
            "__cudart_builtin__",
            "__CUDA_DEPRECATED",
            "CUDARTAPI",
        ),
        *("CUDARTAPI_CDECL", "__builtin_align__(n)", "__align__(n)", "__device_builtin_texture_type__"),
        *(
            "__device_builtin_surface_type__",
            "__location__(a)",
            "__specialization_static",
            "__CUDA_ARCH_HAS_FEATURE__(_)",
        ),
    )
)
"""In place of a header of the compiler, which another wheel has."""


def test_field_offsets_match_the_cuda_headers(where: Path, tmp_path: Path):
    source, words = tmp_path / "offsets.c", tmp_path / "crt/host_defines.h"
    source.write_text(OFFSETS)
    words.parent.mkdir()
    words.write_text(COMPILER_WORDS)
    include = ["-I", str(tmp_path), "-I", str(where / "include")]
    done = subprocess.run(["gcc", "-fsyntax-only", *include, str(source)], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_every_call_of_the_table_is_counted(
    tracing: Callable[..., Program], puppet: Puppet, places: dict[str, int]
):
    program = tracing()
    names = [name for name in places if name != "cudaSetDevice"]
    puppet.does("nothing = [(ctypes.c_ulonglong * 64)() for _ in range(9)]")
    for name in names:
        puppet.does(f"[lib.{name}(*nothing) for _ in range({N_CALLS})]")
    (_, rows), _ = CallSums(0, program.operations, program.balances, AlwaysOn(0)).rows(time.monotonic_ns())
    result: dict[str, int] = {}
    for row in rows:
        result[SYMBOLS[row["symbol"]]] = result.get(SYMBOLS[row["symbol"]], 0) + int(row["n"])
    assert result == dict.fromkeys(names, N_CALLS)
    losses = program.losses()
    assert {kind: n for kind, n in losses.items() if kind.startswith("lost_") and n} == {}


def test_the_arguments_of_real_calls_are_recorded(tracing: Callable[..., Program], puppet: Puppet):
    program = tracing(slow_call_ns=0)
    puppet.does(
        "class Dim(ctypes.Structure): _fields_ = [(c, ctypes.c_uint) for c in 'xyz']",
        "[lib.cudaMemcpy(P(1), P(2), Z(1 << 20), 1) for _ in range(100)]",
        "[lib.cudaMemcpy(P(1), P(2), Z(2 << 20), 2) for _ in range(100)]",
        "[lib.cudaMemcpyAsync(P(1), P(2), Z(4 << 20), 3, P(7)) for _ in range(100)]",
        "[lib.cudaMemcpy2D(P(1), Z(512), P(2), Z(512), Z(100), Z(30), 1) for _ in range(10)]",
        "lib.cudaLaunchKernel(P(3), Dim(7, 8, 9), Dim(128, 2, 1), P(0), Z(0), P(55))",
        "lib.cudaMalloc(ctypes.byref(P()), Z(12345))",
    )
    events = program.events.drain()
    kind = records.of_kind(events[events["pid"] == puppet.pid], Kind.CALL)
    copies = kind[kind["op"] == Op.COPY]
    by_direction = {
        direction: copies["count_bytes"][copies["direction"] == direction].sum()
        for direction in (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST, Direction.DEVICE_TO_DEVICE)
    }
    assert by_direction == {
        Direction.HOST_TO_DEVICE: (100 << 20) + 10 * 3000,
        Direction.DEVICE_TO_HOST: 200 << 20,
        Direction.DEVICE_TO_DEVICE: 400 << 20,
    }
    (launch,) = kind[kind["op"] == Op.LAUNCH]
    assert (launch["grid"].tolist(), launch["block"].tolist()) == ([7, 8, 9], [128, 2, 1])
    assert (launch["handle"], launch["stream"]) == (3, 55)
    (allocation,) = kind[kind["op"] == Op.ALLOC]
    assert allocation["count_bytes"] == 12345 and allocation["result"] != 0
    assert not len(program.balances().keys)


def hooks_of(path: Path) -> list[Hook]:
    with elf.open_image(path) as image:
        exported = elf.exported_functions(image, operations.names())
    return operations.hooks({name: symbol.offset for name, symbol in exported.items()})


@pytest.mark.skipif(len(WHERE) < 2, reason="other: only one version of libcudart is installed")
def test_calls_into_two_runtime_versions_in_one_process_are_counted(bpf_object: Path, puppet: Puppet):
    libraries = [path for where in WHERE.values() for path in where.glob("lib/libcudart.so.*")]
    with Program.load() as program:
        for path in libraries:
            program.attach(str(path), hooks_of(path))
        for n, path in enumerate(libraries, 3):
            puppet.does(
                f"each = ctypes.CDLL({str(path)!r})", f"[each.cudaDeviceSynchronize() for _ in range({n})]"
            )
        counted = program.operations()
    own_rows = counted.keys["tgid"] == puppet.pid
    assert [SYMBOLS[number] for number in counted.keys["symbol"][own_rows]] == ["cudaDeviceSynchronize"]
    assert counted.values["n"][own_rows].tolist() == [3 + 4]
