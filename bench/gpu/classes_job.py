"""A process that makes every class of CUDA call, in numbers and sizes that it knows, so that a trace can be checked.

    python classes_job.py exact FOLDER --rank 0 --cudart /path/of/libcudart.so.12
    python classes_job.py torch FOLDER

`exact` calls the runtime through ctypes and nothing else; `torch` makes the calls of typical PyTorch programs, in
phases separated by silence. Each waits for a file "go" and writes its calls to FOLDER/KIND<rank>.json.
"""

import argparse
import ctypes
import json
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

MIB = 1 << 20
SILENCE_S = 2.6
HUGE = 1 << 50
H2D, D2H, D2D = "HOST_TO_DEVICE", "DEVICE_TO_HOST", "DEVICE_TO_DEVICE"


def main() -> None:
    """Load, wait for the gate, call, write the calls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kind", choices=("exact", "torch"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", "0")))
    parser.add_argument("--cudart", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    chosen = parser.parse_args()
    did = exact(chosen) if chosen.kind == "exact" else in_torch(chosen)
    (chosen.folder / f"{chosen.kind}{chosen.rank}.json").write_text(json.dumps(did | {"pid": os.getpid()}))


def at_gate(chosen: argparse.Namespace) -> None:
    """Says that it is loaded, and waits."""
    (chosen.folder / f"{chosen.kind}-loaded{chosen.rank}").touch()
    while not (chosen.folder / "go").exists():
        time.sleep(0.02)


# Through ctypes


class Calls:
    """The runtime; every call is counted, with its bytes, in the way that the trace should."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.made: dict[str, dict[str, int]] = {}

    def __call__(
        self, name: str, *arguments: Any, n_bytes: int = 0, direction: str = "", fails: int = 0
    ) -> None:
        """Raises RuntimeError if the result is not the expected result."""
        result = getattr(self._library, name)(*arguments)
        entry = self.made.setdefault(f"{name} {direction}".strip(), {"n": 0, "count_bytes": 0, "n_failed": 0})
        entry["n"] += 1
        entry["count_bytes"] += n_bytes
        entry["n_failed"] += result != 0
        if result != fails:
            raise RuntimeError(f"{name}{arguments} returned {result}, not {fails}")


def exact(chosen: argparse.Namespace) -> dict[str, Any]:
    """One device, all that can be called without a kernel."""
    call = Calls(chosen.cudart)
    at_gate(chosen)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t

    def made(name: str, *rest: Any, n_bytes: int = 0) -> ctypes.c_void_p:
        out = pointer()
        call(name, ctypes.byref(out), *rest, n_bytes=n_bytes)
        return pointer(out.value)

    def repeated(n: int, name: str, *arguments: Any, n_bytes: int = 0, direction: str = "") -> None:
        for _ in range(n):
            call(name, *arguments, n_bytes=n_bytes, direction=direction)

    call("cudaSetDevice", chosen.rank)
    call.made.clear()
    call("cudaFree", pointer(0))
    blocks = [made("cudaMalloc", size(8 * MIB), n_bytes=8 * MIB) for _ in range(10)]
    managed = [made("cudaMallocManaged", size(3 * MIB), 1, n_bytes=3 * MIB) for _ in range(2)]
    pinned = [made("cudaHostAlloc", size(8 * MIB), 0, n_bytes=8 * MIB) for _ in range(3)]
    stream = made("cudaStreamCreateWithFlags", 1)
    pooled = [made("cudaMallocAsync", size(5 * MIB), stream, n_bytes=5 * MIB) for _ in range(4)]
    own = mmap.mmap(-1, 8 * MIB)
    address = pointer(ctypes.addressof(ctypes.c_char.from_buffer(own)))
    call("cudaHostRegister", address, size(MIB), 0, n_bytes=MIB)
    pageable = pointer((address.value or 0) + 4 * MIB)
    repeated(100, "cudaMemcpy", blocks[0], pageable, size(MIB), 1, n_bytes=MIB, direction=H2D)
    repeated(100, "cudaMemcpy", pageable, blocks[0], size(2 * MIB), 2, n_bytes=2 * MIB, direction=D2H)
    repeated(100, "cudaMemcpy", blocks[1], blocks[0], size(4 * MIB), 3, n_bytes=4 * MIB, direction=D2D)
    repeated(
        *(100, "cudaMemcpyAsync", pinned[0], blocks[0], size(8 * MIB), 2, stream),
        n_bytes=8 * MIB,
        direction=D2H,
    )
    call("cudaStreamSynchronize", stream)
    repeated(
        *(50, "cudaMemcpy2D", blocks[2], size(512), pageable, size(512), size(100), size(30), 1),
        n_bytes=3000,
        direction=H2D,
    )
    if chosen.devices > 1:
        other = (chosen.rank + 1) % chosen.devices
        call("cudaSetDevice", other)
        far = made("cudaMalloc", size(MIB), n_bytes=MIB)
        call("cudaSetDevice", chosen.rank)
        repeated(
            *(10, "cudaMemcpyPeer", far, other, blocks[0], chosen.rank, size(MIB)),
            n_bytes=MIB,
            direction="PEER",
        )
        call("cudaFree", far, n_bytes=MIB)
        del call.made["cudaSetDevice"]
    repeated(7, "cudaMemset", blocks[3], 0, size(MIB), n_bytes=MIB)
    repeated(9, "cudaMemsetAsync", blocks[3], 0, size(2 * MIB), stream, n_bytes=2 * MIB)
    event = made("cudaEventCreate")
    repeated(50, "cudaEventRecord", event, stream)
    repeated(20, "cudaStreamWaitEvent", stream, event, 0)
    repeated(4, "cudaEventSynchronize", event)
    graph_calls(call, made, stream, blocks[4])
    call("cudaMalloc", ctypes.byref(pointer()), size(HUGE), n_bytes=HUGE, fails=2)
    repeated(3, "cudaDeviceSynchronize")
    call("cudaHostUnregister", address, n_bytes=MIB)
    for block in blocks[:6]:
        call("cudaFree", block, n_bytes=8 * MIB)
    call("cudaFreeHost", pinned[1], n_bytes=8 * MIB)
    call("cudaFreeAsync", pooled[3], stream, n_bytes=5 * MIB)
    call("cudaStreamSynchronize", stream)
    held = {
        "DEVICE": [4 * 8 * MIB, 4, chosen.rank],
        "MANAGED": [len(managed) * 3 * MIB, len(managed), -1],
        "HOST": [2 * 8 * MIB, 2, -1],
        "REGISTERED": [0, 0, -1],
        "POOL": [3 * 5 * MIB, 3, chosen.rank],
    }
    time.sleep(SILENCE_S)
    return {"made": call.made, "held": held, "ended_ns": time.monotonic_ns()}


def graph_calls(
    call: Calls, made: Callable[..., ctypes.c_void_p], stream: ctypes.c_void_p, block: ctypes.c_void_p
) -> None:
    """A graph from its capture to its end."""
    graph, info = ctypes.c_void_p(), (ctypes.c_char * 64)()
    call("cudaStreamBeginCapture", stream, 0)
    call("cudaMemsetAsync", block, 0, ctypes.c_size_t(MIB), stream, n_bytes=MIB)
    call("cudaStreamEndCapture", stream, ctypes.byref(graph))
    executable = made("cudaGraphInstantiate", graph, ctypes.c_ulonglong(0))
    for _ in range(25):
        call("cudaGraphLaunch", executable, stream)
    call("cudaGraphExecUpdate", executable, graph, info)
    call("cudaStreamSynchronize", stream)
    call("cudaGraphExecDestroy", executable)
    call("cudaGraphDestroy", graph)


# Through PyTorch


def in_torch(chosen: argparse.Namespace) -> dict[str, Any]:
    """Phases separated by silence, so that rows of the trace belong to one phase."""
    import torch
    import torch.distributed as dist

    at_gate(chosen)
    device = torch.device("cuda", chosen.rank)
    torch.cuda.set_device(device)
    if chosen.devices > 1:
        dist.init_process_group("nccl", device_id=device)
    here, there = (
        torch.empty(8 * MIB, dtype=torch.uint8),
        torch.empty(8 * MIB, dtype=torch.uint8, device=device),
    )
    other, pinned = torch.empty_like(there), torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=True)
    many = torch.ones(1_000_000, device=device)
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    kept: list[Any] = []

    def copied(target: Any, source: Any, n_mib: int) -> None:
        for _ in range(100):
            target[: n_mib * MIB].copy_(source[: n_mib * MIB], non_blocking=True)

    def captured() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            many.add_(1)
        for _ in range(50):
            graph.replay()
        kept.append(graph)

    def allocated() -> None:
        torch.cuda.empty_cache()
        kept.extend(torch.empty(64 * MIB, dtype=torch.uint8, device=device) for _ in range(5))

    def freed() -> None:
        kept.clear()
        torch.cuda.empty_cache()

    def refused() -> None:
        with suppress(torch.cuda.OutOfMemoryError):
            torch.empty(1 << 45, dtype=torch.uint8, device=device)

    def many_times(n: int, what: Callable[[], Any]) -> Callable[[], None]:
        return lambda: [what() for _ in range(n)] and None

    phases: dict[str, Callable[[], None]] = {
        "pageable_to_device": lambda: copied(there, here, 1),
        "pinned_to_device": lambda: copied(there, pinned, 2),
        "device_to_pinned": lambda: copied(pinned, there, 4),
        "device_to_device": lambda: copied(there, other, 8),
        "launches": many_times(1000, lambda: many.add_(1)),
        "events": many_times(200, lambda: event.record()),
        "waits": many_times(100, lambda: side.wait_event(event)),
        "synchronises": many_times(30, torch.cuda.synchronize),
        "graph": captured,
        "allocations": allocated,
        "frees": freed,
        "refused": refused,
    }
    if chosen.devices > 1:
        phases["all_reduce"] = many_times(20, lambda: dist.all_reduce(many))
    many.add_(1)
    event.record()
    side.wait_event(event)
    output: dict[str, list[int]] = {}
    for name, phase in phases.items():
        torch.cuda.synchronize()
        time.sleep(SILENCE_S)
        begin_ns = time.monotonic_ns()
        phase()
        output[name] = [begin_ns, time.monotonic_ns()]
    torch.cuda.synchronize()
    time.sleep(SILENCE_S)
    ended_ns = time.monotonic_ns()
    if chosen.devices > 1:
        dist.destroy_process_group()
    return {"phases": output, "ended_ns": ended_ns}


if __name__ == "__main__":
    main()
