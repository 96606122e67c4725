"""The training step as a list of instructions, in an order in which all ranks can be advanced together.

Every instruction is for a slice of ranks (one pipeline stage, or all). The order respects each rank's own
program and puts a receive after the send that feeds it, so one pass over the list simulates the step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

from stallscope.events.names import DATATYPE_BYTES, Category, Datatype, Op
from stallscope.synth.simulated_job import Family, Job, Timing


class Kind(IntEnum):
    """The action of an instruction."""

    WORK = 1  # host only
    COMPUTE = 2  # kernels on the compute stream
    COLLECTIVE = 3  # enqueued on the communication stream
    SEND = 4
    RECV = 5
    SYNC = 6  # the host waits until its device has done all enqueued work


class Phase(IntEnum):
    """The position of an instruction in the step, by which faults select instructions."""

    BEGIN = 1
    FORWARD = 2
    BACKWARD = 3
    END = 4


@dataclass(frozen=True)
class Instruction:
    """One instruction; host_ns and device_ns are base costs.

    after_comm: the compute stream waits for the communication stream first. holds: the compute stream waits
    for this collective. before: share of its host time that precedes the call (hooks, views of tensors).
    towards: +1 or -1, the neighbouring stage of a send or receive.
    """

    kind: Kind
    ranks: slice
    phase: Phase
    host_ns: int
    device_ns: int = 0
    category: Category = Category.ON_CPU
    launches: int = 0
    after_comm: bool = False
    family: Family | None = None
    op: Op = Op.NONE
    count: int = 0
    datatype: Datatype = Datatype.BFLOAT16
    holds: bool = False
    before: float = 0.0
    towards: int = 0

    @property
    def count_bytes(self) -> int:
        """Bytes of the collective."""
        return self.count * DATATYPE_BYTES[self.datatype]


class Writer:
    """Makes instructions of a job with the durations of a timing."""

    def __init__(self, job: Job, timing: Timing, crossing: frozenset[Family]) -> None:
        """crossing: families with groups across nodes, whose bandwidth is the fabric's."""
        self.job, self.timing, self.crossing = job, timing, crossing

    def work(self, ranks: slice, phase: Phase, ns: int, category: Category) -> Instruction:
        """Host time in one category."""
        return Instruction(Kind.WORK, ranks, phase, ns, category=category)

    def compute(self, ranks: slice, phase: Phase, device_ns: int, *, after_comm: bool = False) -> Instruction:
        """The kernels of a layer."""
        launches = self.timing.layer_launches
        host_ns = launches * self.timing.launch_ns
        return Instruction(
            Kind.COMPUTE, ranks, phase, host_ns, device_ns, launches=launches, after_comm=after_comm
        )

    def collective(
        self, ranks: slice, phase: Phase, family: Family, op: Op, n_bytes: int, *, holds: bool = False
    ) -> Instruction:
        """A collective of n_bytes per rank over every group of the family in the slice."""
        device_ns = self._transfer_ns(family, op, n_bytes)
        is_sharding = op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) and self.job.sharded
        before_ns = self.timing.sharded_ns if is_sharding else 0
        host_ns = self.timing.enqueue_ns + before_ns
        made = Instruction(Kind.COLLECTIVE, ranks, phase, host_ns, device_ns, launches=1, holds=holds)
        made = replace(made, before=before_ns / host_ns if before_ns else 0.0)
        return replace(made, family=family, op=op, count=max(n_bytes // 2, 1))

    def hop(self, kind: Kind, stage: int, phase: Phase, towards: int) -> Instruction:
        """A send to, or a receive from, the neighbouring stage."""
        device_ns = self._transfer_ns(Family.PIPELINE, Op.SEND, self.timing.activation_bytes)
        made = Instruction(
            kind, self.job.stage(stage), phase, self.timing.enqueue_ns, device_ns, launches=1, holds=True
        )
        op = Op.SEND if kind is Kind.SEND else Op.RECV
        count = self.timing.activation_bytes // 2
        return replace(made, family=Family.PIPELINE, op=op, count=count, towards=towards)

    def _transfer_ns(self, family: Family, op: Op, n_bytes: int) -> int:
        passes = 2 if op is Op.ALL_REDUCE else 1
        bandwidth = self.timing.fabric_bandwidth if family in self.crossing else self.timing.node_bandwidth
        return self.timing.collective_ns + int(passes * n_bytes / bandwidth)


def start(write: Writer) -> tuple[Instruction, ...]:
    """The job's work before its first step: set up, and one collective over the world."""
    everyone = slice(0, write.job.nranks)
    return (
        write.work(everyone, Phase.BEGIN, 1_000_000_000, Category.ON_CPU),
        write.collective(everyone, Phase.BEGIN, Family.WORLD, Op.ALL_GATHER, 8),
        Instruction(Kind.SYNC, everyone, Phase.BEGIN, write.timing.sync_ns),
    )


def step(write: Writer, *, is_synchronised: bool, has_checkpoint: bool) -> tuple[Instruction, ...]:
    """The instructions of one step, for all ranks."""
    job, timing, everyone = write.job, write.timing, slice(0, write.job.nranks)
    made = [
        write.work(everyone, Phase.BEGIN, timing.load_ns, Category.ON_CPU),
        write.work(everyone, Phase.BEGIN, timing.load_ns // 4, Category.CHILD),
        write.work(everyone, Phase.BEGIN, timing.copy_ns, Category.COPY),
    ]
    if job.tp > 1:
        made.append(write.collective(everyone, Phase.BEGIN, Family.TENSOR, Op.BROADCAST, 1 << 16, holds=True))
    made.extend(_pipeline(write) if job.pp > 1 else _passes(write))
    for stage in range(job.pp):
        made.extend(_gradients(write, stage))
    made.append(write.compute(everyone, Phase.END, timing.optimizer_ns, after_comm=True))
    if job.grad_norm:
        made.append(write.collective(everyone, Phase.END, Family.WORLD, Op.ALL_REDUCE, 8, holds=True))
    if is_synchronised:
        made.append(write.work(everyone, Phase.END, timing.copy_ns, Category.COPY))
        made.append(Instruction(Kind.SYNC, everyone, Phase.END, timing.sync_ns))
    if has_checkpoint:
        made.append(write.work(everyone, Phase.END, job.checkpoint_ns, Category.IO))
        made.append(write.collective(everyone, Phase.END, Family.WORLD, Op.ALL_REDUCE, 4))
        made.append(Instruction(Kind.SYNC, everyone, Phase.END, timing.sync_ns))
    return tuple(made)


def _passes(write: Writer) -> Iterator[Instruction]:
    """Forward and backward of a job without pipeline; gradients that overlap come with the layers."""
    yield from _forward(write, 0)
    yield from _backward(write, 0, overlaps=True)


def _forward(write: Writer, stage: int) -> Iterator[Instruction]:
    job, ranks = write.job, write.job.stage(stage)
    for _ in range(job.layers):
        if job.sharded and job.pp == 1:
            yield write.collective(
                ranks, Phase.FORWARD, Family.DATA, Op.ALL_GATHER, write.timing.layer_bytes, holds=True
            )
        yield write.compute(ranks, Phase.FORWARD, write.timing.forward_ns)
        yield from _exchanges(write, ranks, Phase.FORWARD)


def _backward(write: Writer, stage: int, *, overlaps: bool) -> Iterator[Instruction]:
    job, ranks, n_bytes = write.job, write.job.stage(stage), write.timing.layer_bytes
    for layer in range(job.layers):
        if job.sharded and job.pp == 1:
            yield write.collective(ranks, Phase.BACKWARD, Family.DATA, Op.ALL_GATHER, n_bytes, holds=True)
        yield write.compute(ranks, Phase.BACKWARD, write.timing.backward_ns)
        yield from _exchanges(write, ranks, Phase.BACKWARD)
        if not overlaps or job.dp == 1:
            continue
        if job.sharded:
            yield write.collective(ranks, Phase.BACKWARD, Family.DATA, Op.REDUCE_SCATTER, n_bytes)
        else:
            yield from _buckets(write, ranks, layer)


def _buckets(write: Writer, ranks: slice, layer: int) -> Iterator[Instruction]:
    """The gradient all-reduces that become ready with this layer."""
    job = write.job
    done, before = (layer + 1) * job.buckets // job.layers, layer * job.buckets // job.layers
    n_bytes = write.timing.layer_bytes * job.layers // job.buckets
    for _ in range(done - before):
        yield write.collective(ranks, Phase.BACKWARD, Family.DATA, Op.ALL_REDUCE, n_bytes)


def _exchanges(write: Writer, ranks: slice, phase: Phase) -> Iterator[Instruction]:
    """The exchanges of a layer before the next layer: tensor-parallel sums, tokens for the experts."""
    n_bytes = write.timing.activation_bytes
    if write.job.ep > 1:
        for _ in ("out", "back"):
            yield write.collective(ranks, phase, Family.EXPERT, Op.ALL_TO_ALL, n_bytes, holds=True)
    if write.job.tp > 1:
        yield write.collective(ranks, phase, Family.TENSOR, Op.ALL_REDUCE, n_bytes, holds=True)


def _gradients(write: Writer, stage: int) -> Iterator[Instruction]:
    """With a pipeline the gradients are reduced after the last microbatch."""
    job, ranks = write.job, write.job.stage(stage)
    if job.pp > 1 and job.dp > 1:
        n_bytes = write.timing.layer_bytes * job.layers // job.buckets
        for _ in range(job.buckets):
            yield write.collective(ranks, Phase.BACKWARD, Family.DATA, Op.ALL_REDUCE, n_bytes)


def _pipeline(write: Writer) -> Iterator[Instruction]:
    """One forward, one backward in turn (1F1B), interleaved so that receives follow their sends."""
    job = write.job
    todo = [_turns(stage, job.pp, job.microbatches) for stage in range(job.pp)]
    done: set[tuple[str, int, int]] = set()
    while any(todo):
        for stage in range(job.pp):
            while todo[stage] and _is_fed(todo[stage][0], stage, job.pp, done):
                turn, k = todo[stage].pop(0)
                done.add((turn, stage, k))
                yield from _turn(write, stage, turn)


def _turns(stage: int, n_stages: int, n_batches: int) -> list[tuple[str, int]]:
    """The turns of a stage, in order: (forward or backward, microbatch)."""
    ahead = min(n_stages - stage - 1, n_batches)
    made = [("forward", k) for k in range(ahead)]
    for k in range(n_batches):
        if k + ahead < n_batches:
            made.append(("forward", k + ahead))
        made.append(("backward", k))
    return made


def _is_fed(turn: tuple[str, int], stage: int, n_stages: int, done: set[tuple[str, int, int]]) -> bool:
    """Whether the neighbour has sent the input of the turn."""
    what, k = turn
    if what == "forward":
        return stage == 0 or ("forward", stage - 1, k) in done
    return stage == n_stages - 1 or ("backward", stage + 1, k) in done


def _turn(write: Writer, stage: int, turn: str) -> Iterator[Instruction]:
    """One microbatch through one stage: receive, compute, send."""
    towards, last = (1, write.job.pp - 1) if turn == "forward" else (-1, 0)
    first = write.job.pp - 1 - last
    phase = Phase.FORWARD if turn == "forward" else Phase.BACKWARD
    if stage != first:
        yield write.hop(Kind.RECV, stage, phase, -towards)
    if turn == "forward":
        yield from _forward(write, stage)
    else:
        yield from _backward(write, stage, overlaps=False)
    if stage != last:
        yield write.hop(Kind.SEND, stage, phase, towards)
