"""The rows that a machine's ranks would send: rounds of one communicator, optionally with a late rank.

Round number and time follow from the wall clock alone, so that several machines with the same job, world and pace
send matching rounds. The time ledger shows the cause: the straggler sleeps, the other ranks wait for it.
"""

import zlib
from dataclasses import dataclass

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.names import Category, Datatype, Op
from stallscope.exporters.hub_batches import TABLES

_JITTER_NS = 200_000
_RELEASE_NS = 100_000
_FIRST_PID = 1000
_COUNT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Job:
    """ranks: on this machine; first_rank: the first of them; world: ranks of the job, on all machines.

    interval_ns: between rounds. straggler: rank that is late by late_ns in each round; None for no straggler.
    """

    name: str
    ranks: int
    first_rank: int
    world: int
    interval_ns: int
    straggler: int | None
    late_ns: int

    @property
    def comm_hash(self) -> int:
        """The communicator: the same on all machines of a job."""
        return zlib.crc32(self.name.encode()) << 32 | self.world


def rounds_until(job: Job, wall_ns: int) -> int:
    """The number of the first round that has not begun at this time."""
    return wall_ns // job.interval_ns


def collectives(job: Job, first_round: int, n_rounds: int, *, origin_round: int) -> Array:
    """Rows (n_rounds x ranks) to send, in order of rounds. origin_round: round at which the ledger starts from 0."""
    rounds = np.arange(first_round, first_round + n_rounds)
    ranks = np.arange(job.first_rank, job.first_rank + job.ranks)
    is_late = ranks == job.straggler if job.straggler is not None else np.zeros(job.ranks, bool)
    rows = np.zeros((n_rounds, job.ranks), layout.dtype(TABLES["collectives"]))
    for field in TABLES["collectives"].fields:
        if field.may_be_unknown:
            rows[field.name] = layout.UNKNOWN
    late_ns = job.late_ns if job.straggler is not None else 0
    begin_ns, previous_ns = _begin_ns(job, rounds), _begin_ns(job, rounds - 1)
    rows["ts_ns"] = begin_ns[:, None] + np.where(is_late, late_ns, 0) + _jitter_ns(rounds, ranks)
    rows["wait_enter_ns"] = previous_ns[:, None] + _jitter_ns(rounds - 1, ranks)
    rows["wait_enter_ns"] += np.where(is_late, late_ns, 0) + 10_000
    rows["wait_leave_ns"] = (begin_ns - job.interval_ns + late_ns + _JITTER_NS + _RELEASE_NS)[:, None]
    rows["pid"] = rows["tid"] = _FIRST_PID + ranks
    rows["comm_hash"], rows["nranks"], rows["comm_rank"] = job.comm_hash, job.world, ranks
    rows["seq"] = rounds[:, None]
    rows["op"], rows["datatype"], rows["reduce_op"] = Op.ALL_REDUCE, Datatype.FLOAT32, 1
    rows["count"], rows["count_bytes"] = _COUNT, 4 * _COUNT
    rows["rank"] = ranks
    rows["local_rank"] = rows["device"] = ranks - job.first_rank
    n_done = (rounds - origin_round)[:, None] + 1
    rows["n_syncs"] = n_done
    waited_ns = np.where(is_late, 0, late_ns)
    for category, a_round_ns in (
        (Category.WAIT_GPU, waited_ns),
        (Category.SLEEP, late_ns - waited_ns),
        (Category.ON_CPU, np.full(job.ranks, job.interval_ns - late_ns)),
    ):
        rows["ledger_ns"][:, :, category - 1] = n_done * a_round_ns
    return rows.reshape(-1)


def processes(job: Job, wall_ns: int) -> Array:
    """One row for each rank."""
    rows = np.zeros(job.ranks, layout.dtype(TABLES["processes"]))
    ranks = np.arange(job.first_rank, job.first_rank + job.ranks)
    rows["ts_ns"], rows["ended_ns"], rows["pid"] = wall_ns, layout.UNKNOWN, _FIRST_PID + ranks
    rows["rank"], rows["nranks"], rows["comm"] = ranks, job.world, b"stress"
    rows["local_rank"] = rows["device"] = ranks - job.first_rank
    return rows


def _begin_ns(job: Job, rounds: Array) -> Array:
    """The start of each round: int64. A round starts later by the jitter of the straggler in the round before."""
    begin_ns = rounds * job.interval_ns
    if job.straggler is not None:
        begin_ns += _jitter_ns(rounds - 1, np.array([job.straggler]))[:, 0]
    return np.asarray(begin_ns)


def _jitter_ns(rounds: Array, ranks: Array) -> Array:
    """A small jitter, deterministic in round and rank."""
    mixed = rounds[:, None].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + ranks.astype(np.uint64)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(33)) % np.uint64(_JITTER_NS)).astype(np.int64)
