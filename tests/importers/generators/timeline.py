"""When each rank of a job with a late rank calls, enters and leaves its collectives, in microseconds."""

from dataclasses import dataclass
from random import Random

from .job import WORLD, Job

_LOAD_US, _WORK_US, _TRANSFER_US = 200.0, 5000.0, 300.0


@dataclass(frozen=True)
class Call:
    """One collective of one rank. load_us, work_us: the data loading and the operators before it."""

    group: str
    step: int
    rank: int
    begin_us: float
    load_us: float
    work_us: float
    arrive_us: float
    end_us: float


def calls(job: Job, chance: Random) -> list[Call]:
    """The calls of all ranks. A culprit loads its data late before its first call of every step."""
    now = [chance.uniform(0, 100) for _ in range(job.n_ranks)]
    out: list[Call] = []
    for step in range(job.n_steps):
        length_us = chance.uniform(0, 2000)  # steps of different length, as real batches
        for name in reversed(job.groups):
            members = job.groups[name]
            is_first = name != WORLD if job.n_groups else True
            parts = {rank: _parts(job, rank, chance, is_first=is_first) for rank in members}
            arrive = {rank: now[rank] + sum(parts[rank]) + length_us for rank in members}
            end = max(arrive.values()) + _TRANSFER_US
            for rank in members:
                load, work = parts[rank]
                work += length_us
                out.append(Call(name, step, rank, now[rank], load, work, arrive[rank], end))
                now[rank] = end + 5
    return out


def _parts(job: Job, rank: int, chance: Random, *, is_first: bool) -> tuple[float, float]:
    late_us = job.late_ms * 1000 if is_first and rank in job.culprits else 0.0
    return _LOAD_US + late_us + chance.uniform(0, 50), _WORK_US + chance.uniform(0, 150)
