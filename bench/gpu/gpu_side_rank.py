"""One rank of the job of gpu_side.py: runs the phases that its standard input states, a line of JSON each.

A phase lasts a number of rounds: matrix products, and a collective. It answers with a line of JSON: begin and end.
"""

import gc
import json
import os
import sys
import time
from typing import Any

_CYCLES_PER_MS = 1.9e6  # torch.cuda._sleep
_PER_REPLAY = 4  # rounds in a CUDA graph
_AHEAD = 24  # rounds that a host runs ahead, at most


class Rank:
    """The buffers of a rank, and its graphs."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank = torch, dist, int(os.environ["RANK"])
        torch.cuda.set_device(self.rank % torch.cuda.device_count())
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
        self.square = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        self.buffers: dict[int, Any] = {}
        self.graph: Any = None

    def round(self, phase: dict[str, Any], number: int) -> None:
        """Enqueue one round."""
        is_odd = number % phase["every"] == 0
        for _ in range(phase["matmuls"]):
            self.torch.matmul(self.square, self.square)
        if phase["spin_us"]:
            self.torch.cuda._sleep(int(phase["spin_us"] * _CYCLES_PER_MS / 1e3))
        if phase["gpu"] == self.rank and is_odd:
            self.torch.cuda._sleep(int(phase["ms"] * _CYCLES_PER_MS))
        if phase["host"] == self.rank and is_odd:
            time.sleep(phase["ms"] / 1e3)
        self.dist.all_reduce(self.buffer(phase["bytes"]))

    def buffer(self, n_bytes: int) -> Any:
        """A buffer of this size."""
        if n_bytes not in self.buffers:
            self.buffers[n_bytes] = self.torch.ones(n_bytes // 4, device="cuda")
        return self.buffers[n_bytes]

    def replay(self, phase: dict[str, Any], number: int) -> None:
        """Enqueue one round by a graph that was captured once; the extra work is before the graph."""
        if self.graph is None:
            self.graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                for _ in range(_PER_REPLAY):
                    self.round({**phase, "gpu": -1, "host": -1}, 1)
        is_odd = number % phase["every"] == 0
        if phase["gpu"] == self.rank and is_odd:
            self.torch.cuda._sleep(int(phase["ms"] * _CYCLES_PER_MS))
        if phase["host"] == self.rank and is_odd:
            time.sleep(phase["ms"] / 1e3)
        self.graph.replay()

    def run(self, phase: dict[str, Any]) -> dict[str, Any]:
        """Run a phase."""
        enqueue = self.replay if phase["graph"] else self.round
        self.buffer(phase["bytes"])
        self.dist.barrier()
        self.torch.cuda.synchronize()
        begin_ns, events = time.monotonic_ns(), []
        for number in range(phase["rounds"]):
            enqueue(phase, number)
            if not phase["ahead"]:
                self.torch.cuda.synchronize()
            elif number % (_AHEAD // 3) == 0:
                events.append(self.torch.cuda.Event())
                events[-1].record()
                if len(events) > 2:
                    events.pop(0).synchronize()
        self.torch.cuda.synchronize()
        return {"begin_ns": begin_ns, "end_ns": time.monotonic_ns()}


def main() -> None:
    """Answer each line."""
    if cpus := os.environ.get("CPUS"):
        os.sched_setaffinity(0, map(int, cpus.split(",")))  # before NCCL and CUDA start their threads
    rank = Rank()
    gc.disable()  # a collection would be an unplanned delay
    for n_bytes in (1024, 4 << 20):
        rank.dist.all_reduce(rank.buffer(n_bytes))
    rank.torch.cuda.synchronize()
    nccl = ".".join(map(str, rank.torch.cuda.nccl.version()))
    print(
        json.dumps({"pid": os.getpid(), "nccl": nccl, "gpu": rank.torch.cuda.get_device_name()}), flush=True
    )
    for line in sys.stdin:
        print(json.dumps(rank.run(json.loads(line))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
