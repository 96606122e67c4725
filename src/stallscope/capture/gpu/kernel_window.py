"""All kernels of a running process during some seconds, by CUPTI, which is loaded into the process for this time.

The process needs no preparation. The library of gpu_look/ is written into anonymous memory of the process and loaded by
one of its threads (see remote_calls); CUPTI must be installed in the process's file system, as it is with PyTorch.
"""

import hashlib
import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

import numpy as np

from stallscope.capture.gpu.remote_calls import RemoteThread, remote_thread
from stallscope.capture.gpu.shipped_libraries import shipped_library
from stallscope.capture.probes import elf
from stallscope.capture.process.process_identity import environment, launcher_ranks, small_file
from stallscope.capture.stacks.interpreter import Region, regions
from stallscope.errors import CannotTrace, NotFound
from stallscope.events.layout import UNKNOWN, Array

_MAGIC = 0x316B6F6F6C707467
_NAMES_AT, _N_NAMES, _NAME_BYTES, _N_KERNELS = 216, 1 << 12, 256, 1 << 20
_KERNELS_AT = _NAMES_AT + _N_NAMES * _NAME_BYTES
_HEADER = np.dtype(
    [
        *(("magic", "u8"), ("version", "u4"), ("pid", "u4"), ("state", "u4"), ("is_cancelled", "u4")),
        *(("failed_at", "u4"), ("error", "i4"), ("begin_ns", "u8"), ("end_ns", "u8")),
        ("begin_wall_ns", "u8"),
        *(("n_kernels", "u8"), ("n_lost", "u8"), ("n_names", "u4"), ("is_detached", "u4")),
        *(("cupti_version", "u4"), ("pad", "u4"), ("error_text", "S128")),
    ]
)
KERNEL = np.dtype(
    [
        *(
            ("start_ns", "u8"),
            ("end_ns", "u8"),
            ("name", "u4"),
            ("stream", "u4"),
            ("device", "u4"),
            ("pad", "u4"),
        )
    ]
)
"""A kernel. Times on CUPTI's clock; name: index in KernelWindow.names."""

_LIBRARY = "libstallscope-look.so"
_MARGIN_S = 20.0  # loading CUPTI, and detaching it from a job that rests
_RTLD_NOW = 2
_MFD_CLOEXEC = 1
_CUPTI = re.compile(r"/libcupti\.so\.(\d+)")
_CUDA_RUNTIME = re.compile(r"/libcudart\.so\.(\d+)")
_PROFILERS = re.compile(
    r"/(libToolsInjection|libcuinj|libnsys|libInterceptorInjection|libsanitizer-collection)"
)
_LIBC = re.compile(r"/(libc|libdl)(\.so\.\d|-2\.\d+\.so)$")
_CUPTI_FOLDERS = (
    "nvidia/cuda_cupti/lib",
    "nvidia/cu{major}/lib",
    "/usr/local/cuda/extras/CUPTI/lib64",
    "/usr/local/cuda/lib64",
    "/usr/lib/x86_64-linux-gnu",
)


class _State(IntEnum):
    STARTING = 0
    RECORDING = 1
    DONE = 2
    FAILED = 3


_MULTIPLE_SUBSCRIBERS = 39  # cupti_result.h


@dataclass(frozen=True)
class KernelWindow:
    """The kernels that ended in a window of begin_ns to end_ns. kernels: of the type KERNEL. n_lost: without room.

    begin_wall_ns: the wall time at begin_ns. process: name of the program. rank: UNKNOWN without a launcher that states
    it. held_ms: how long a thread of the process was stopped. is_detached: CUPTI has left the process.
    """

    kernels: Array
    names: tuple[str, ...]
    begin_ns: int
    end_ns: int
    begin_wall_ns: int
    n_lost: int
    held_ms: float
    is_detached: bool
    process: str = ""
    rank: int = UNKNOWN


def kernel_window(pid: int, *, seconds: float, proc: Path = Path("/proc")) -> KernelWindow:
    """Record the kernels of a process. An interrupt by the user ends the window early.

    Raises NotFound, NotAllowed, and CannotTrace, also if another profiler is active.
    """
    library = shipped_library(_LIBRARY, "library of `stallscope look`")
    cupti = _cupti_of(pid, proc)
    begin_s = time.monotonic()
    with _loaded(pid, library, cupti, int(seconds * 1000)) as memory:
        held_ms = 1e3 * (time.monotonic() - begin_s)
        header = np.frombuffer(memory, _HEADER, 1)
        _await_end(pid, header, seconds)
        window = _window(memory, header[0].copy(), held_ms)
    rank, _, _ = launcher_ranks(environment(proc / str(pid)))
    process = small_file(f"{proc}/{pid}/comm").decode("utf-8", "replace").strip()
    return replace(window, rank=rank, process=process)


def _window(memory: mmap.mmap, header: np.void, held_ms: float) -> KernelWindow:
    if header["state"] == _State.FAILED:
        reason = bytes(header["error_text"]).decode("utf-8", "replace") or f"error {header['error']}"
        if header["error"] == _MULTIPLE_SUBSCRIBERS:
            raise CannotTrace(
                f"another profiler has subscribed to CUPTI in process {header['pid']}: {reason}; end it first"
            )
        raise CannotTrace(f"CUPTI cannot record process {header['pid']}: {reason}")
    n_kernels = min(int(header["n_kernels"]), _N_KERNELS)
    names = np.frombuffer(memory, f"S{_NAME_BYTES}", int(header["n_names"]), _NAMES_AT)
    return KernelWindow(
        kernels=np.frombuffer(memory, KERNEL, n_kernels, _KERNELS_AT).copy(),
        names=tuple(name.decode("utf-8", "replace") for name in names.tolist()),
        begin_ns=int(header["begin_ns"]),
        end_ns=int(header["end_ns"]),
        begin_wall_ns=int(header["begin_wall_ns"]),
        n_lost=int(header["n_lost"]) + int(header["n_kernels"]) - n_kernels,
        held_ms=held_ms,
        is_detached=bool(header["is_detached"]),
    )


def _await_end(pid: int, header: Array, seconds: float) -> None:
    end_s = time.monotonic() + seconds + _MARGIN_S
    while header["state"][0] < _State.DONE:
        try:
            time.sleep(0.02)
        except KeyboardInterrupt:
            header["is_cancelled"] = 1
        if not Path(f"/proc/{pid}").exists():
            raise NotFound(f"process {pid} has ended")
        if time.monotonic() > end_s:
            header["is_cancelled"] = 1
            raise CannotTrace(f"CUPTI did not answer in process {pid}")


def _cupti_of(pid: int, proc: Path) -> str:
    """The path of CUPTI, as the process sees it. Raises NotFound, CannotTrace."""
    mapped = list(dict.fromkeys(region.name for region in regions(pid, proc)))
    if not any("/libcuda.so" in name for name in mapped):
        raise NotFound(
            f"process {pid} does not exist, has not loaded CUDA, or this user may not read it: run as root"
        )
    profiler = next((name for name in mapped if _PROFILERS.search(name)), "")
    if profiler:
        raise CannotTrace(f"another profiler is active in process {pid}: {profiler}; end it first")
    if loaded := next((name for name in mapped if _CUPTI.search(name)), ""):
        return loaded
    majors = {match[1] for name in mapped if (match := _CUDA_RUNTIME.search(name))}
    root = proc / str(pid) / "root"
    for folder in _folders(mapped, sorted(majors)):
        for path in sorted((root / folder.lstrip("/")).glob("libcupti.so.*")):
            match = _CUPTI.search(str(path))
            if match and (not majors or match[1] in majors):
                return f"{folder}/{path.name}"
    raise NotFound(
        f"CUPTI is not installed where process {pid} runs: pip install nvidia-cuda-cupti-cu12 (or its version for the"
        " job's CUDA), or install CUDA's extras"
    )


def _folders(mapped: list[str], majors: list[str]) -> Iterator[str]:
    """Folders of the process that may hold CUPTI: next to its other CUDA libraries first."""
    packages = dict.fromkeys(name.partition("/nvidia/")[0] for name in mapped if "/nvidia/" in name)
    for pattern in _CUPTI_FOLDERS:
        for major in majors or [""]:
            folder = pattern.format(major=major)
            yield from [folder] if folder.startswith("/") else (f"{package}/{folder}" for package in packages)
    yield from dict.fromkeys(str(Path(name).parent) for name in mapped if _CUDA_RUNTIME.search(name))


@contextmanager
def _loaded(pid: int, library: Path, cupti: str, milliseconds: int) -> Iterator[mmap.mmap]:
    """The memory of a window that has begun in the process."""
    with remote_thread(pid) as thread:
        functions = _libc_functions(pid)
        address = _function_address(pid, library) or _load(thread, library, functions)
        fd = thread.call(address, cupti.encode(), milliseconds)
        if fd < 0:
            raise CannotTrace(
                f"`stallscope look` already runs in process {pid}, or the process is out of memory: {os.strerror(-fd)}"
            )
        memory = _mapped(pid, fd)
        thread.call(functions["close"], fd)
    yield memory


def _load(thread: RemoteThread, library: Path, functions: dict[str, int]) -> int:
    """Load the library. Returns the address of its function."""
    data = library.read_bytes()
    fd = thread.call(functions["memfd_create"], _memory_name(data).encode(), _MFD_CLOEXEC)
    if fd < 0:
        raise CannotTrace(
            f"process {thread.pid} may not create memory (memfd_create), by a seccomp filter for example"
        )
    Path(f"/proc/{thread.pid}/fd/{fd}").write_bytes(data)
    thread.call(functions["dlopen"], f"/proc/self/fd/{fd}".encode(), _RTLD_NOW)
    thread.call(functions["close"], fd)
    address = _function_address(thread.pid, library)
    if not address:
        raise CannotTrace(
            f"process {thread.pid} could not load the library: it needs glibc 2.34 or newer, and no"
            " other version of it"
        )
    return address


def _memory_name(data: bytes) -> str:
    return f"stallscope-look-{hashlib.blake2b(data, digest_size=6).hexdigest()}"


def _function_address(pid: int, library: Path) -> int:
    """The address of the library's function in the process; 0 if it is not loaded, or in another version."""
    name = f"/memfd:{_memory_name(library.read_bytes())} (deleted)"
    return _addresses(
        [region for region in regions(pid) if region.name == name], library, ("stallscope_look",)
    ).get("stallscope_look", 0)


def _libc_functions(pid: int) -> dict[str, int]:
    """The addresses of the functions that load the library. Raises CannotTrace."""
    needed = ("memfd_create", "dlopen", "close")
    mapped = regions(pid)
    out: dict[str, int] = {}
    for name in dict.fromkeys(region.name for region in mapped if _LIBC.search(region.name)):
        own = [region for region in mapped if region.name == name]
        out = _addresses(own, Path(f"/proc/{pid}/root{name}"), needed) | out
    if set(needed) - out.keys():
        raise CannotTrace(
            f"process {pid} does not run glibc 2.27 or newer: {', '.join(set(needed) - out.keys())} missing"
        )
    return out


def _addresses(mapped: list[Region], file: Path, names: tuple[str, ...]) -> dict[str, int]:
    """Addresses of functions of a mapped file."""
    try:
        with elf.open_image(file) as image:
            symbols = elf.exported_functions(image, names)
    except (OSError, elf.NotElf):
        return {}
    return {
        name: region.start + symbol.offset - region.offset
        for name, symbol in symbols.items()
        for region in mapped
        if region.is_code and region.offset <= symbol.offset < region.offset + region.end - region.start
    }


def _mapped(pid: int, fd: int) -> mmap.mmap:
    """The memory of the window. Raises CannotTrace if it has another layout."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(own, 0)
    finally:
        os.close(own)
    header = np.frombuffer(memory, _HEADER, 1)[0]
    if (header["magic"], header["version"]) != (_MAGIC, 1) or len(
        memory
    ) < _KERNELS_AT + _N_KERNELS * KERNEL.itemsize:
        raise CannotTrace(f"the memory of process {pid} has an unexpected layout")
    return memory
