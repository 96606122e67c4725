"""The groups of a job as axes of reshaped rank arrays, and their communicators."""

from dataclasses import dataclass

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.synth.simulated_job import Family, Job


@dataclass(frozen=True)
class Groups:
    """One family of communicators: comm_hash and comm_rank by rank of the job, and the size of a group.

    shape, axis: the layout of a stage's ranks and the axis along which a group lies.
    """

    family: Family
    size: int
    shape: tuple[int, ...]
    axis: int
    group_of: Array
    comm_hash: Array
    comm_rank: Array
    spans_nodes: bool

    def over_members(self, values: Array, reduce: np.ufunc) -> Array:
        """Reduce over each group and give every member the result; values: (ranks,) of whole stages."""
        laid = values.reshape(-1, *self.shape)
        filled = np.empty_like(laid)
        filled[...] = reduce.reduce(laid, axis=self.axis, keepdims=True)
        return filled.reshape(-1)


def groups(job: Job, rng: np.random.Generator) -> dict[Family, Groups]:
    """Every family of the job that has more than one member in a group; the world always."""
    rank = np.arange(job.nranks)
    t, d, stage = rank % job.tp, rank // job.tp % job.dp, rank // (job.tp * job.dp)
    block = d // job.ep
    made = [
        (Family.WORLD, job.nranks, (job.nranks,), 1, np.zeros_like(rank), rank),
        (Family.DATA, job.dp, (job.dp, job.tp), 1, stage * job.tp + t, d),
        (Family.TENSOR, job.tp, (job.dp, job.tp), 2, stage * job.dp + d, t),
        (
            Family.EXPERT,
            job.ep,
            (job.dp // job.ep, job.ep, job.tp),
            2,
            (stage * (job.dp // job.ep) + block) * job.tp + t,
            d % job.ep,
        ),
        (Family.PIPELINE, job.pp, (job.dp, job.tp), 0, d * job.tp + t, stage),
    ]
    result = {}
    for family, size, shape, axis, group_of, comm_rank in made:
        hashes = rng.integers(1, 2**63, job.nranks // size, dtype=np.uint64)
        if size > 1 or family is Family.WORLD:
            result[family] = Groups(
                family=family,
                size=size,
                shape=shape,
                axis=axis,
                group_of=group_of,
                comm_hash=hashes[group_of],
                comm_rank=comm_rank,
                spans_nodes=_spans_nodes(group_of, job.node_of),
            )
    return result


def _spans_nodes(group_of: Array, node_of: Array) -> bool:
    """Whether any group has members on two nodes."""
    order = np.argsort(group_of, kind="stable")
    same_group = np.diff(group_of[order]) == 0
    return bool(np.any(same_group & (np.diff(node_of[order]) != 0)))


def communicators(result: dict[Family, Groups], node_of: Array, pid: Array) -> Array:
    """The `communicators` rows (times are filled in later), family after family, ranks in order."""
    rows = layout.empty(layout.COMMUNICATORS, len(result) * len(pid))
    for i, part in enumerate(result.values()):
        family_rows = rows[i * len(pid) : (i + 1) * len(pid)]
        family_rows["node"], family_rows["pid"] = node_of, pid
        family_rows["comm_hash"], family_rows["comm_rank"], family_rows["nranks"] = (
            part.comm_hash,
            part.comm_rank,
            part.size,
        )
        if part.family is not Family.WORLD:
            family_rows["parent_hash"] = result[Family.WORLD].comm_hash
    return rows
