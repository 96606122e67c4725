"""The profiler plugin of NCCL on a real GPU: four ranks share it under MPS, with and without late GPU work.

Run as root on a machine with one GPU, PyTorch and MPS, after `make plugin`: python bench/gpu/gpu_arrival.py FOLDER.
FOLDER receives records.npz, the records of each phase and rank, and times.json, the time per round of each phase and of
alternating windows with and without records. nccl_trace() turns the records of a phase into a trace for the diagnosis.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

N_RANKS, N_ROUNDS, N_COST_ROUNDS, COST_S = 4, 480, 250, 75.0
SIZES = (1024, 262_144, 1_048_576)
PHASES: dict[str, dict[str, Any]] = {
    "healthy, hosts run ahead": {"runs_ahead": True},
    "GPU of rank 2 late by 20 ms in every 12th round, hosts run ahead": {"gpu": 2, "runs_ahead": True},
    "GPU of rank 2 late by 3 ms in every round, hosts run ahead": {
        "gpu": 2,
        "every": 1,
        "ms": 3.0,
        "runs_ahead": True,
    },
    "healthy": {},
    "GPU of rank 1 late by 20 ms in every 12th round": {"gpu": 1},
    "host of rank 3 late by 20 ms in every 12th round": {"host": 3},
}
PLAIN = {"n_rounds": N_ROUNDS, "n_matmuls": 3, "gpu": -1, "host": -1, "every": 12, "ms": 20.0}
PLAIN |= {"runs_ahead": False, "n": 262_144}
_CYCLES_PER_MS = 1.9e6


def rank_main(rank: int, pipe: Any, plugin: str) -> None:
    """One rank: runs the phases that the pipe states, until None."""
    os.environ.update(
        NCCL_HOSTID=f"h{rank}", NCCL_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(N_RANKS)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", NCCL_PROFILER_PLUGIN=plugin)
    os.environ.update(NCCL_MAX_NCHANNELS="4")
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=N_RANKS)
    square = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    buffers = {n: torch.ones(n, device="cuda") for n in SIZES}
    for buffer in buffers.values():
        dist.all_reduce(buffer)
    torch.cuda.synchronize()
    pipe.send(os.getpid())
    while (phase := pipe.recv()) is not None:
        dist.barrier()
        torch.cuda.synchronize()
        begin_ns, events = time.monotonic_ns(), []
        for number in range(phase["n_rounds"]):
            is_odd = number % phase["every"] == 0
            for _ in range(phase["n_matmuls"]):
                torch.matmul(square, square)
            if phase["gpu"] == rank and is_odd:
                torch.cuda._sleep(int(phase["ms"] * _CYCLES_PER_MS))
            if phase["host"] == rank and is_odd:
                time.sleep(phase["ms"] / 1e3)
            dist.all_reduce(buffers[phase["n"]])
            if not phase["runs_ahead"]:
                torch.cuda.synchronize()
            elif number % 8 == 0:  # at most 24 rounds ahead
                events.append(torch.cuda.Event())
                events[-1].record()
                if len(events) > 2:
                    events.pop(0).synchronize()
        torch.cuda.synchronize()
        pipe.send((begin_ns, time.monotonic_ns()))
    os._exit(0)


class Recorder(threading.Thread):
    """Reads the records of all ranks, and switches the plugin."""

    def __init__(self, rings: list[Any], events: Any):
        super().__init__(daemon=True)
        self.rings, self.events = rings, events
        self.phase, self.is_on, self.is_done = "", False, False
        self.parts: dict[tuple[str, int], list[Any]] = defaultdict(list)

    def run(self) -> None:
        while not self.is_done:
            for rank, ring in enumerate(self.rings):
                ring.switch(self.events if self.is_on else 0, seconds=2 if self.is_on else 0)
                if len(rows := ring.drain()) and self.phase:
                    self.parts[self.phase, rank].append(rows)
            time.sleep(0.02)


def main() -> None:
    """Run all phases and the windows of the cost."""
    from stallscope.capture.gpu.nccl_recorder import plugin_library
    from stallscope.capture.gpu.nccl_ring import KERNELS, ring_of

    out = Path(sys.argv[1])
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(N_RANKS)]
    for rank, (_, theirs) in enumerate(pipes):
        context.Process(target=rank_main, args=(rank, theirs, str(plugin_library())), daemon=True).start()
    rings = [ring_of(ours.recv()) for ours, _ in pipes]
    recorder = Recorder(rings, KERNELS)
    recorder.start()

    def round_us(phase: dict[str, Any], *, name: str = "", is_on: bool = True) -> float:
        recorder.phase, recorder.is_on = name, is_on
        time.sleep(0.15)
        for ours, _ in pipes:
            ours.send(PLAIN | phase)
        times = [ours.recv() for ours, _ in pipes]
        time.sleep(0.1)
        span_ns = max(end for _, end in times) - max(begin for begin, _ in times)
        return span_ns / (PLAIN | phase)["n_rounds"] / 1e3

    round_us({}, is_on=False)
    result: dict[str, Any] = {
        "round_us": {name: round_us(phase, name=name) for name, phase in PHASES.items()}
    }
    result["cost_us"] = cost_us(round_us)
    result |= {"n_lost": [ring.n_lost for ring in rings], "n_dropped": [ring.n_dropped for ring in rings]}
    recorder.is_done = True
    recorder.join()
    np.savez_compressed(
        out / "records.npz",
        **{f"{name}__{rank}": np.concatenate(p) for (name, rank), p in recorder.parts.items()},
    )
    (out / "times.json").write_text(json.dumps(result, indent=2))
    for ours, _ in pipes:
        ours.send(None)


def cost_us(round_us: Any) -> dict[str, list[float]]:
    """The time per round in alternating windows, by size, work and whether the plugin records."""
    out: dict[str, list[float]] = defaultdict(list)
    end_s, number = time.monotonic() + COST_S, 0
    while time.monotonic() < end_s:
        number += 1
        for n in SIZES:
            for n_matmuls in (0, 3):
                phase = {"n_rounds": N_COST_ROUNDS, "n_matmuls": n_matmuls, "n": n, "runs_ahead": True}
                for is_on in (False, True) if number % 2 else (True, False):
                    name = f"{4 * n} B, {n_matmuls} matmuls, {'on' if is_on else 'off'}"
                    out[name].append(round(round_us(phase, is_on=is_on), 2))
    return dict(out)


if __name__ == "__main__":
    main()
