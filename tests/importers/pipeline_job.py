"""Operation traces of pipeline-parallel jobs, made by hand.

In each step every stage computes all micro-batches forwards, then backwards, each after its neighbour; then the
replicas of a stage meet in a reduce-scatter, and all ranks begin the next step together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FORWARD_S, BACKWARD_S, TRANSFER_S = 0.02, 0.04, 0.001

Factor = Callable[[int, int, int], float]
"""How many times the usual a worker's work takes: by step, stage and replica."""


@dataclass
class Job:
    """scatter: standard deviation of each piece of work, as a share of it. rank_of: rank by stage and replica."""

    n_stages: int = 4
    n_replicas: int = 4
    n_steps: int = 20
    n_batches: int = 6
    factor: Factor = lambda step, stage, replica: 1.0
    scatter: float = 0.005
    seed: int = 1
    first_step: int = 50
    rank_of: Callable[[int, int], int] | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def rank(self, stage: int, replica: int) -> int:
        """The rank of a worker."""
        return self.rank_of(stage, replica) if self.rank_of is not None else stage * self.n_replicas + replica


def rows(job: Job) -> list[dict[str, Any]]:
    """All operations of a job."""
    random = np.random.default_rng(job.seed)
    job.rows = []
    for step in range(job.n_steps):
        _step(job, step, random)
    return job.rows


def _step(job: Job, step: int, random: np.random.Generator) -> None:
    shape = (job.n_stages, job.n_replicas, job.n_batches)
    factor = np.array([[job.factor(step, s, d) for d in range(job.n_replicas)] for s in range(job.n_stages)])[
        :, :, None
    ]
    forward = FORWARD_S * factor * (1 + job.scatter * random.standard_normal(shape))
    backward = BACKWARD_S * factor * (1 + job.scatter * random.standard_normal(shape))
    done = np.zeros((job.n_stages, job.n_replicas))
    for replica in range(job.n_replicas):
        arrives = np.zeros(job.n_batches)
        for stage in range(job.n_stages):
            free = 0.0
            for batch in range(job.n_batches):
                begin = max(free, arrives[batch])
                free = begin + forward[stage, replica, batch]
                _add(job, step, stage, replica, "forward-compute", begin, free, batch)
                arrives[batch] = free + TRANSFER_S
                if stage < job.n_stages - 1:
                    _add(job, step, stage, replica, "forward-send", free, arrives[batch], batch)
                    _add(job, step, stage + 1, replica, "forward-recv", free, arrives[batch], batch)
            done[stage, replica] = free
        arrives = np.zeros(job.n_batches)
        for stage in reversed(range(job.n_stages)):
            free = done[stage, replica]
            for batch in range(job.n_batches):
                begin = max(free, arrives[batch])
                free = begin + backward[stage, replica, batch]
                _add(job, step, stage, replica, "backward-compute", begin, free, batch)
                arrives[batch] = free + TRANSFER_S
            done[stage, replica] = free
    together = done.max(axis=1) + 0.005
    for stage in range(job.n_stages):
        for replica in range(job.n_replicas):
            begin = done[stage, replica]
            _add(job, step, stage, replica, "grads-reduce-scatter", begin, together[stage], 0)
            _add(job, step, stage, replica, "optimizer", together.max(), together.max() + 0.002, 0)


def _add(
    job: Job, step: int, stage: int, replica: int, kind: str, begin_s: float, end_s: float, seq: int
) -> None:
    job.rows.append(
        {
            "step": job.first_step + step,
            "rank": job.rank(stage, replica),
            "stage": stage,
            "dp_rank": replica,
            "optype": kind,
            "start_ts": begin_s,
            "duration": end_s - begin_s,
            "seq_id": seq,
        }
    )


def table(expected_rows: list[dict[str, Any]]) -> pa.Table:
    """The operations as the table of a trace file, with its narrow types."""
    types = {"stage": pa.int8(), "dp_rank": pa.int8(), "rank": pa.int16(), "seq_id": pa.int32()}
    types |= {"start_ts": pa.float32(), "duration": pa.float32(), "step": pa.int64(), "optype": pa.string()}
    return pa.table(
        {name: pa.array([row[name] for row in expected_rows], kind) for name, kind in types.items()}
    )


def write(path: Path, job: Job) -> Path:
    """The trace of a job as a file."""
    pq.write_table(table(rows(job)), path)
    return path
