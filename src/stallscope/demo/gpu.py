"""The CUDA and NCCL calls of the loop, by ctypes: the interpreter lock is free during each.

The loop launches a single kernel. The emulated libraries provide it; for real libraries real_gpu does.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int, c_int64, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from stallscope.demo.real_gpu import TimedKernel
from stallscope.errors import StallscopeError

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
INT64, FLOAT32, FLOAT64 = 4, 7, 8
SUM, MAX = 0, 2
ID_BYTES = 128


class UniqueId(ctypes.Structure):
    """ncclUniqueId: passed by value."""

    _fields_ = (("internal", ctypes.c_ubyte * ID_BYTES),)


class Dim3(ctypes.Structure):
    """dim3: passed by value."""

    _fields_ = (("x", c_uint), ("y", c_uint), ("z", c_uint))


_ONE = Dim3(1, 1, 1)

_COLLECTIVE_ARGUMENTS = {
    "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclAllGather": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p],
    "ncclReduceScatter": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclBroadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclBcast": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_void_p, c_void_p],
    "ncclAlltoAll": [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p],
    "ncclGather": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclScatter": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclSend": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclRecv": [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
    "ncclCommInitRank": [c_void_p, c_int, UniqueId, c_int],
    "ncclCommInitRankConfig": [c_void_p, c_int, UniqueId, c_int, c_void_p],
    "ncclCommInitRankScalable": [c_void_p, c_int, c_int, c_int, c_void_p, c_void_p],
    "ncclCommInitAll": [c_void_p, c_int, c_void_p],
    "ncclCommSplit": [c_void_p, c_int, c_int, c_void_p, c_void_p],
    "ncclCommShrink": [c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int],
    "ncclCommGrow": [c_void_p, c_int, c_void_p, c_int, c_void_p, c_void_p],
    "ncclCommGetUniqueId": [c_void_p, c_void_p],
    "ncclCommCount": [c_void_p, c_void_p],
    "ncclCommUserRank": [c_void_p, c_void_p],
    "ncclCommCuDevice": [c_void_p, c_void_p],
    "ncclCommFinalize": [c_void_p],
    "ncclCommDestroy": [c_void_p],
    "ncclCommAbort": [c_void_p],
}
_RUNTIME_ARGUMENTS = {
    "cudaMalloc": [c_void_p, c_size_t],
    "cudaMallocAsync": [c_void_p, c_size_t, c_void_p],
    "cudaFree": [c_void_p],
    "cudaFreeAsync": [c_void_p, c_void_p],
    "cudaHostAlloc": [c_void_p, c_size_t, c_uint],
    "cudaFreeHost": [c_void_p],
    "cudaMemcpy": [c_void_p, c_void_p, c_size_t, c_int],
    "cudaMemcpyAsync": [c_void_p, c_void_p, c_size_t, c_int, c_void_p],
    "cudaMemsetAsync": [c_void_p, c_int, c_size_t, c_void_p],
    "cudaLaunchKernel": [c_void_p, Dim3, Dim3, c_void_p, c_size_t, c_void_p],
    "cudaStreamCreateWithFlags": [c_void_p, c_uint],
    "cudaStreamDestroy": [c_void_p],
    "cudaStreamSynchronize": [c_void_p],
    "cudaStreamQuery": [c_void_p],
    "cudaStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cudaStreamBeginCapture": [c_void_p, c_int],
    "cudaStreamEndCapture": [c_void_p, c_void_p],
    "cudaGraphInstantiate": [c_void_p, c_void_p, ctypes.c_ulonglong],
    "cudaGraphLaunch": [c_void_p, c_void_p],
    "cudaGraphExecDestroy": [c_void_p],
    "cudaGraphDestroy": [c_void_p],
    "cudaEventCreateWithFlags": [c_void_p, c_uint],
    "cudaEventDestroy": [c_void_p],
    "cudaEventRecord": [c_void_p, c_void_p],
    "cudaEventSynchronize": [c_void_p],
    "cudaEventQuery": [c_void_p],
    "cudaEventElapsedTime": [c_void_p, c_void_p, c_void_p],
}


class Gpu:
    """The two libraries, loaded; handles are plain integers, a stream of None is the default stream.

    `cuda` and `nccl` are the raw functions; `call` raises an error that names the failed function.
    """

    def __init__(self, folder: Path) -> None:
        self.cuda = ctypes.CDLL(str(folder / "libcudart.so.12"))
        self.nccl = ctypes.CDLL(str(folder / "libnccl.so.2"))
        for library, table in ((self.cuda, _RUNTIME_ARGUMENTS), (self.nccl, _COLLECTIVE_ARGUMENTS)):
            for name, arguments in table.items():
                if function := getattr(
                    library, name, None
                ):  # older libraries lack some functions that the loop does not need
                    function.argtypes = arguments
        is_emulated = hasattr(self.cuda, "emulated_timed_kernel")
        self._kernel = ctypes.cast(self.cuda.emulated_timed_kernel, c_void_p) if is_emulated else None
        self._real = None if is_emulated else TimedKernel(self.cuda)
        self._pinned = threading.local()

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function by name. Raises StallscopeError with the function's name and result code."""
        result = getattr(self.nccl if name.startswith("nccl") else self.cuda, name)(*arguments)
        if result:
            raise StallscopeError(f"{name} failed with code {result}")

    def new(self, name: str, *arguments: Any) -> int:
        """Calls a function whose first argument receives a handle or pointer, and returns that."""
        handle = c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def launch(self, duration_ns: int, stream: int | None = None) -> None:
        """Enqueues a kernel that keeps the device busy for duration_ns."""
        if self._real:
            self._real.launch(duration_ns, stream)
            return
        duration = c_int64(duration_ns)
        arguments = (c_void_p * 1)(ctypes.addressof(duration))
        self.call("cudaLaunchKernel", self._kernel, _ONE, _ONE, arguments, 0, stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Blocks until all work enqueued on the stream is done."""
        self.call("cudaStreamSynchronize", stream)

    def stream(self) -> int:
        """A new stream."""
        return self.new("cudaStreamCreateWithFlags", 1)

    def event(self) -> int:
        """A new event."""
        return self.new("cudaEventCreateWithFlags", 2)

    def wait_in(self, stream: int | None, event: int, *, recorded_in: int | None) -> None:
        """Makes later work on `stream` wait for all work enqueued on `recorded_in` so far."""
        self.call("cudaEventRecord", event, recorded_in)
        self.call("cudaStreamWaitEvent", stream, event, 0)

    def all_reduce(
        self, buffer: int, count: int, *, datatype: int, comm: int, stream: int | None, op: int = SUM
    ) -> None:
        """Enqueues an all-reduce in place."""
        self.call("ncclAllReduce", buffer, buffer, count, datatype, op, comm, stream)

    def write(self, address: int, value: float) -> None:
        """Sets one float64 in device memory; returns when it is staged, like a small pageable copy."""
        self.call("cudaMemcpyAsync", address, ctypes.byref(ctypes.c_double(value)), 8, HOST_TO_DEVICE, None)

    def item(self, address: int, stream: int | None = None) -> float:
        """Reads one float64 from device memory: a copy into pinned memory and a wait, as tensor.item()."""
        if not hasattr(self._pinned, "address"):
            self._pinned.address = self.new("cudaHostAlloc", 8, 0)
        self.call("cudaMemcpyAsync", self._pinned.address, address, 8, DEVICE_TO_HOST, stream)
        self.synchronize(stream)
        return ctypes.c_double.from_address(self._pinned.address).value

    @contextmanager
    def group(self) -> Iterator[None]:
        """ncclGroupStart .. ncclGroupEnd."""
        self.call("ncclGroupStart")
        yield
        self.call("ncclGroupEnd")

    def unique_id(self) -> UniqueId:
        """A new 128-byte id."""
        unique = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique))
        return unique

    def join(self, unique: UniqueId, rank: int, *, nranks: int) -> int:
        """Joins a communicator; blocks until all ranks have."""
        return self.new("ncclCommInitRankConfig", nranks, unique, rank, None)

    def split(self, comm: int, color: int, *, key: int) -> int:
        """A communicator of the ranks that pass the same color, in the order of their keys."""
        handle = c_void_p()
        self.call("ncclCommSplit", comm, color, key, ctypes.byref(handle), None)
        return handle.value or 0
