"""Hand-made hanging jobs, as the flight-recorder dumps of their ranks.

Every rank runs a program of calls on its process groups. Its host runs ahead of its GPU by a few calls. A call
completes when all its members have made it and their earlier calls are complete. The caller gives the stop of a rank;
the progress of the other ranks follows.
"""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGAN_NS = 1_700_000_000_000_000_000
CALL_NS = 1_000_000
AHEAD = 5


@dataclass(frozen=True)
class Step:
    """One call of one rank: the group, the operation, and the peer's rank in the group for send and recv."""

    group: str
    op: str
    peer: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.op in ("send", "recv")


@dataclass
class Job:
    """tensor x data x pipeline ranks, numbered like that from the inside out.

    host_stops: rank -> number of calls after which its host makes no more. reports_until: rank -> number of calls
    whose completion it still sees. gpu_stops: rank -> number of calls after which its GPU gets stuck. left_none:
    ranks without a dump. keeps_complete: the dumps hold all calls, not only those under way.
    """

    tensor: int = 2
    data: int = 2
    pipeline: int = 2
    n_steps: int = 6
    host_stops: dict[int, int] = field(default_factory=dict)
    reports_until: dict[int, int] = field(default_factory=dict)
    gpu_stops: dict[int, int] = field(default_factory=dict)
    left_none: set[int] = field(default_factory=set)
    tells_starts: bool = False
    keeps_complete: bool = False

    @property
    def n_ranks(self) -> int:
        return self.tensor * self.data * self.pipeline

    def place(self, rank: int) -> tuple[int, int, int]:
        """Tensor, data and pipeline place of a rank."""
        return rank % self.tensor, rank // self.tensor % self.data, rank // (self.tensor * self.data)

    def groups(self) -> dict[str, list[int]]:
        """Members of every process group by name: first all ranks, then tensor, expert, data and pipeline groups."""
        result = {"0": list(range(self.n_ranks))}
        keys = (
            lambda r: ("t", *self.place(r)[1:]),
            lambda r: ("e", self.place(r)[2]),
            lambda r: ("d", self.place(r)[0], self.place(r)[2]),
            lambda r: ("p", *self.place(r)[:2]),
        )
        for key in keys:
            by_key: dict[Any, list[int]] = {}
            for rank in range(self.n_ranks):
                by_key.setdefault(key(rank), []).append(rank)
            for members in by_key.values():
                result[str(len(result))] = members
        return result

    def kinds(self) -> dict[str, str]:
        """The purpose of each group, by name."""
        sizes = (
            1,
            self.data * self.pipeline,
            self.pipeline,
            self.tensor * self.pipeline,
            self.tensor * self.data,
        )
        words = ("default_pg", "TENSOR", "EXPERT", "DATA", "PIPELINE")
        names = iter(self.groups())
        return {next(names): word for word, n in zip(words, sizes, strict=True) for _ in range(n)}

    def program(self, rank: int) -> list[Step]:
        """All calls of a rank, in order."""
        of = {self.kinds()[name]: name for name, members in self.groups().items() if rank in members}
        stage = self.place(rank)[2]
        entry = [Step(of["PIPELINE"], "recv", stage - 1)] if stage else []
        entry += [Step(of["TENSOR"], "_all_gather_base"), Step(of["EXPERT"], "all_to_all")]
        entry += [Step(of["TENSOR"], "_reduce_scatter_base"), Step(of["EXPERT"], "all_to_all")]
        entry += [Step(of["PIPELINE"], "send", stage + 1)] if stage < self.pipeline - 1 else []
        entry += [Step(of["DATA"], "all_reduce")]
        return entry * self.n_steps


@dataclass(frozen=True)
class Reached:
    """The progress of every rank: calls made, and calls completed."""

    made: list[int]
    complete: list[int]


def reached(job: Job) -> Reached:
    """How far the ranks get until nothing moves."""
    programs = [job.program(rank) for rank in range(job.n_ranks)]
    keys = [_keys(job, rank, program) for rank, program in enumerate(programs)]
    where: dict[Any, list[tuple[int, int]]] = {}
    for rank, own in enumerate(keys):
        for i, key in enumerate(own):
            where.setdefault(key, []).append((rank, i))
    made, complete = [0] * job.n_ranks, [0] * job.n_ranks
    moves = True
    while moves:
        moves = False
        for rank in range(job.n_ranks):
            limit = min(complete[rank] + AHEAD, job.host_stops.get(rank, 1 << 30), len(programs[rank]))
            moves |= made[rank] < limit
            made[rank] = max(made[rank], limit)
        for rank in range(job.n_ranks):
            while complete[rank] < made[rank] and complete[rank] < job.gpu_stops.get(rank, 1 << 30):
                here = where[keys[rank][complete[rank]]]
                if not all(
                    made[other] > i and complete[other] >= i and i < job.gpu_stops.get(other, 1 << 30)
                    for other, i in here
                ):
                    break
                for other, i in here:
                    complete[other] = max(complete[other], i + 1)
                moves = True
    return Reached(made, complete)


def _keys(job: Job, rank: int, program: list[Step]) -> list[Any]:
    """The properties that make two ranks' calls equal."""
    counts: dict[Any, int] = {}
    stage, out = job.place(rank)[2], []
    for step in program:
        pair = (stage, step.peer) if step.op == "send" else (step.peer, stage)
        key = (step.group, pair) if step.is_p2p else (step.group,)
        counts[key] = counts.get(key, 0) + 1
        out.append((*key, counts[key]))
    return out


def dumps(job: Job) -> dict[int, dict[str, Any]]:
    """The content of each rank's dump; ranks without a dump are left out."""
    got = reached(job)
    return {
        rank: _dump(job, rank, got.made[rank], min(got.complete[rank], job.reports_until.get(rank, 1 << 30)))
        for rank in range(job.n_ranks)
        if rank not in job.left_none
    }


def _dump(job: Job, rank: int, made: int, complete: int) -> dict[str, Any]:
    groups = {name: members for name, members in job.groups().items() if rank in members}
    kinds = job.kinds()
    numbers = {name: str(i) for i, name in enumerate(groups)}
    status = {
        numbers[name]: {"last_enqueued_collective": 0, "last_completed_collective": 0} for name in groups
    }
    entries = []
    seqs: dict[tuple[str, bool], int] = {}
    for i, step in enumerate(job.program(rank)[:made]):
        seq = seqs[step.group, step.is_p2p] = seqs.get((step.group, step.is_p2p), 0) + 1
        status[numbers[step.group]]["last_enqueued_collective"] = seq
        if i < complete:
            status[numbers[step.group]]["last_completed_collective"] = seq
            if not job.keeps_complete:
                continue
        is_started = job.tells_starts and i == complete and rank not in job.gpu_stops
        state = "completed" if i < complete else "started" if is_started else "scheduled"
        entries.append(_entry(job, rank, step, seq=seq, state=state, i=i, kind=kinds[step.group]))
    for entry in status.values():
        entry["last_started_collective"] = entry["last_completed_collective"] if job.tells_starts else -1
    return {
        "version": "2.9",
        "nccl_version": "2.27.3",
        "pg_config": {
            name: {"name": name, "desc": kinds[name], "ranks": str(members)}
            for name, members in groups.items()
        },
        "pg_status": status,
        "entries": entries,
    }


def _entry(job: Job, rank: int, step: Step, *, seq: int, state: str, i: int, kind: str) -> dict[str, Any]:
    stage = job.place(rank)[2]
    arrow = {"send": "->", "recv": "<-"}.get(step.op, "")
    name = f"nccl:{step.op}" + (f" {stage}{arrow}{step.peer}" if arrow else "")
    return {
        "record_id": i,
        "pg_id": [n for n, members in job.groups().items() if rank in members].index(step.group),
        "process_group": (step.group, kind),
        "collective_seq_id": 0 if step.is_p2p else seq,
        "p2p_seq_id": seq if step.is_p2p else 0,
        "op_id": i,
        "profiling_name": name,
        "time_created_ns": BEGAN_NS + i * CALL_NS + rank,
        "input_sizes": [[1024 + rank if step.op == "all_to_all" else 1024, 8]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[1024, 8]],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": step.is_p2p,
    }


def write(folder: Path, expected: dict[int, Any], *, protocol: int = 2) -> Path:
    """One file per rank, as PyTorch names them."""
    folder.mkdir(exist_ok=True)
    for rank, dump in expected.items():
        (folder / f"_dump_{rank}").write_bytes(pickle.dumps(dump, protocol))
    return folder


def same_stage(job: Job, rank: int, others: Iterable[int]) -> list[int]:
    """The other ranks that are in a rank's pipeline stage."""
    return [other for other in others if job.place(other)[2] == job.place(rank)[2]]
