"""The GPUs of this machine for the demo: the available libraries, and a kernel of a given duration.

The only requirements are the driver and the CUDA and NCCL libraries: from a PyTorch wheel, a toolkit, or the
system. The kernel is PTX, which the driver compiles; it reads the GPU's clock until its time is over.
"""

import ctypes
import glob
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from stallscope.errors import NotFound, StallscopeError

CUDART, NCCL, DRIVER = "libcudart.so.12", "libnccl.so.2", "libcuda.so.1"
"""The names under which Gpu opens the two libraries in its folder, for every version."""

_INSTALL = "install PyTorch with CUDA, or `pip install nvidia-cuda-runtime-cu12 nvidia-nccl-cu12`"
_WITHOUT_GPU = "; without --gpu the demo runs on emulated GPUs"

_PYTHONS = (
    "/usr/lib/python3*/dist-packages",
    "/usr/local/lib/python3*/*-packages",
    "/opt/*/lib/python3*/site-packages",
)
_IN_PYTHON = ("nvidia/*/lib", "torch/lib")
_FOLDERS = (
    "/usr/local/cuda*/lib64",
    "/usr/local/cuda*/targets/*/lib",
    "/usr/local/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/opt/conda/lib",
)

_PTX = b"""
.version 6.0
.target sm_70
.address_size 64
.visible .entry timed(.param .u64 duration_ns)
{
    .reg .pred %over;
    .reg .b64 %d, %begin, %now, %past;
    ld.param.u64 %d, [duration_ns];
    mov.u64 %begin, %globaltimer;
AGAIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %past, %now, %begin;
    setp.lt.u64 %over, %past, %d;
    @%over bra AGAIN;
    ret;
}
"""


@dataclass(frozen=True)
class GpuLibraries:
    """The libraries and GPUs of this machine: the two libraries, and the number of GPUs."""

    cudart: Path
    nccl: Path
    n_gpus: int

    def linked_in(self, folder: Path) -> Path:
        """The folder, with both libraries under the names that Gpu opens."""
        (folder / CUDART).symlink_to(self.cudart)
        (folder / NCCL).symlink_to(self.nccl)
        return folder


def libraries(driver: str = DRIVER, folders: Sequence[str] | None = None) -> GpuLibraries:
    """The GPUs and the newest libraries that fit the driver. Raises NotFound, which names the missing part.

    folders: patterns of folders to search; None: the system's library folders.
    """
    version, n_gpus = _driver(driver)
    folders = _library_folders() if folders is None else folders
    runtimes = {_version(path): path for path in _libraries("libcudart*.so*", folders)}
    fitting = [each for each in runtimes if each[:1] <= (version,)]
    if not fitting:
        have = f", only {', '.join(map(str, runtimes.values()))}" if runtimes else ""
        raise NotFound(
            f"no CUDA runtime for this driver (CUDA {version}) was found{have}: {_INSTALL}{_WITHOUT_GPU}"
        )
    collectives = sorted(_libraries("libnccl.so.2*", folders), key=_version)
    if not collectives:
        raise NotFound(f"NCCL ({NCCL}) was not found on this machine: {_INSTALL}{_WITHOUT_GPU}")
    return GpuLibraries(runtimes[max(fitting)], collectives[-1], n_gpus)


def _driver(name: str) -> tuple[int, int]:
    """The CUDA version of the driver (12, 13), and the number of GPUs that it shows. Raises NotFound."""
    try:
        cuda = ctypes.CDLL(name)
    except OSError:
        raise NotFound(
            f"no NVIDIA driver ({DRIVER}) was found on this machine: --gpu needs a GPU{_WITHOUT_GPU}"
        ) from None
    version, n_gpus = c_int(), c_int()
    code = cuda.cuInit(0) or cuda.cuDriverGetVersion(byref(version)) or cuda.cuDeviceGetCount(byref(n_gpus))
    if code or not n_gpus.value:
        why = f"the driver returns code {code}" if code else "none is visible (see CUDA_VISIBLE_DEVICES)"
        raise NotFound(f"an NVIDIA driver is installed, but no GPU can be used: {why}{_WITHOUT_GPU}")
    return version.value // 1000, n_gpus.value


def _library_folders() -> list[str]:
    """The folders in which programs find libraries, and the library folders of Python packages."""
    packages = [*filter(None, sys.path), *_PYTHONS]
    return [
        *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")),
        *_FOLDERS,
        *(f"{each}/{inside}" for each in packages for inside in _IN_PYTHON),
    ]


def _libraries(pattern: str, folders: Sequence[str]) -> Iterator[Path]:
    """Files of that name in the folders."""
    for folder in folders:
        for path in sorted(glob.glob(f"{folder}/{pattern}")):  # noqa: PTH207 (Path.glob takes no absolute pattern)
            if Path(path).is_file():
                yield Path(path).resolve()


def _version(path: Path) -> tuple[int, ...]:
    """The version numbers in the name of the linked file: libcudart.so.12.4.127 -> (12, 4, 127)."""
    return tuple(int(number) for number in re.findall(r"\d+", path.name.partition(".so")[2]))


class TimedKernel:
    """A kernel of a given duration on the calling thread's device. For any number of threads, one device."""

    def __init__(self, cudart: ctypes.CDLL, driver: str = DRIVER) -> None:
        self._cudart = cudart
        self._driver = ctypes.CDLL(driver)
        self._driver.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
        self._lock = threading.Lock()
        self._function = c_void_p()
        self._thread = threading.local()

    def launch(self, duration_ns: int, stream: int | None) -> None:
        """Enqueues the kernel. Raises StallscopeError."""
        if not hasattr(self._thread, "is_ready"):
            self._cudart.cudaFree(
                None
            )  # an older runtime gives a thread its context only with the first call
            self._load()
            self._thread.is_ready = True
        duration = c_uint64(duration_ns)
        arguments = (c_void_p * 1)(ctypes.addressof(duration))
        shape = (1, 1, 1, 1, 1, 1, 0)
        self._call("cuLaunchKernel", self._function, *shape, stream, arguments, None)

    def _load(self) -> None:
        with self._lock:
            if self._function:
                return
            module, function = c_void_p(), c_void_p()
            self._call("cuModuleLoadData", byref(module), c_char_p(_PTX))
            self._call("cuModuleGetFunction", byref(function), module, c_char_p(b"timed"))
            self._function = function

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise StallscopeError(
                f"{name} failed with code {code}: the demo needs a GPU of 2017 or later (sm_70)"
            )
