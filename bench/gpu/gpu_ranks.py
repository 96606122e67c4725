"""The running ranks of the job of gpu_side.py: each runs the phases that it is given, one after the other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PLAIN: dict[str, Any] = {"rounds": 600, "matmuls": 60, "gpu": -1, "host": -1, "every": 12, "ms": 20.0}
PLAIN |= {"bytes": 1 << 20, "ahead": True, "graph": False, "spin_us": 0}
"""A phase without faults: see gpu_side_rank.py."""

_CPUS_A_RANK = 2  # of its main thread, and of NCCL's threads


class Ranks:
    """The processes of a job, which load after the start: see await_loaded(). is_pinned: each rank keeps to CPUs of its
    own, the same in all jobs.
    """

    def __init__(self, n_ranks: int, environment: dict[str, str], port: int, *, is_pinned: bool = False):
        import torch

        self.n_gpus = torch.cuda.device_count()
        self.processes = []
        for rank in range(n_ranks):
            own = {"RANK": str(rank), "WORLD_SIZE": str(n_ranks), "LOCAL_RANK": str(rank)}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if self.n_gpus < n_ranks:
                own |= {"NCCL_HOSTID": f"h{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_NCHANNELS": "4"}
            if is_pinned:
                own["CPUS"] = ",".join(map(str, _cpus(rank, n_ranks)))
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name("gpu_side_rank.py"))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | own | environment,
                )
            )
        self.facts: list[dict[str, Any]] = []

    def await_loaded(self) -> list[dict[str, Any]]:
        """Wait until all ranks have run a collective. Returns their process ids and versions."""
        self.facts = [self._answer(process) for process in self.processes]
        return self.facts

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [int(fact["pid"]) for fact in self.facts]

    def _answer(self, process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"a rank ended with code {process.wait()}")

    def begin(self, phase: dict[str, Any]) -> None:
        """Start a phase on all ranks."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(PLAIN | phase) + "\n")
            process.stdin.flush()

    def end(self) -> float:
        """Wait for its end. Returns the seconds of the phase."""
        times = [self._answer(process) for process in self.processes]
        return float(max(t["end_ns"] for t in times) - min(t["begin_ns"] for t in times)) / 1e9

    def kill(self) -> None:
        """End its processes, without waiting for them."""
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """End its processes, and wait for them."""
        self.kill()
        for process in self.processes:
            process.wait()


def _cpus(rank: int, n_ranks: int) -> list[int]:
    """CPUs of a rank, far from other ranks' CPUs; the first CPU, which handles interrupts, is not used."""
    cpus = sorted(os.sched_getaffinity(0))
    first = (2 * rank + 1) * len(cpus) // (2 * n_ranks)
    return [cpus[(first + i) % len(cpus)] for i in range(_CPUS_A_RANK)]
