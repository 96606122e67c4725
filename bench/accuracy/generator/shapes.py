"""The job shapes: each writes the programs of one job. Sizes are drawn from the seed.

`uneven` marks shapes whose ranks have uneven work: there a report of an imbalance is right as well. `may_name` holds
ranks with more work of their own (evaluation, logging), which may be named, but not for a slow GPU.
"""

from collections.abc import Callable, Sequence

import numpy as np

from generator.builder import MS, Builder
from stallscope.events.names import Category, Datatype, Op

Shape = Callable[[int], Builder]


def _load(b: Builder, i: int, ms: float = 0.4) -> None:
    """The next batch: the loader's process wakes the rank; then the copy to the GPU."""
    b.host(i, ms * MS * 0.6, Category.CHILD)
    b.host(i, ms * MS * 0.4)
    b.host(i, 45_000, Category.COPY, (0, 0, 1))


def _forward(b: Builder, i: int, layers: int, gpu_ms: float, scale: float = 1.0) -> None:
    for _ in range(layers):
        b.compute(i, gpu_ms * MS * scale)


def _backward(
    b: Builder, i: int, world: int, layers: int, gpu_ms: float, *, n_bytes: int, scale: float = 1.0
) -> None:
    """Gradients of each layer are reduced while the next layer's are computed (DDP)."""
    for _ in range(layers):
        b.compute(i, 2 * gpu_ms * MS * scale)
        b.meet(i, world, Op.ALL_REDUCE, n_bytes, is_backward=True)


def _optimizer(b: Builder, i: int, world: int, gpu_ms: float) -> None:
    b.join(i, world)
    b.compute(i, gpu_ms * MS, 6)


class Ddp:
    """Sizes of a data-parallel job, drawn from the seed, and its usual step."""

    def __init__(
        self,
        seed: int,
        *,
        ranks: Sequence[int] = (8, 16),
        per_node: int = 8,
        steps: Sequence[int] = (60, 120),
        **more: float,
    ) -> None:
        rng = np.random.default_rng([seed, 5])
        self.n = int(rng.choice(ranks))
        self.steps = int(rng.integers(*steps))
        self.layers = int(rng.integers(4, 9))
        self.gpu_ms = float(np.exp(rng.uniform(np.log(0.25), np.log(4.0))))
        self.n_bytes = int(rng.choice([1 << 23, 1 << 25, 1 << 26]))
        self.rng = rng
        self.b = Builder(seed, self.n, ranks_per_node=min(per_node, self.n), **more)  # type: ignore[arg-type]
        self.world = self.b.group(range(self.n))

    def step(self, scale: Sequence[float] | None = None, *, last: bool = True) -> None:
        """Load, forward, backward with reductions, optimizer; the loss is read at the end."""
        b = self.b
        b.begin(b.generations[-1])
        for i in b.generations[-1]:
            factor = scale[i] if scale is not None else 1.0
            _load(b, i)
            _forward(b, i, self.layers, self.gpu_ms, factor)
            _backward(b, i, self.world, self.layers, self.gpu_ms, n_bytes=self.n_bytes, scale=factor)
            _optimizer(b, i, self.world, self.gpu_ms)
            if last:
                b.sync(i)


def plain(seed: int) -> Builder:
    """Data-parallel, the loss is read in each step."""
    job = Ddp(seed)
    for _ in range(job.steps):
        job.step()
    return job.b


def host_end(seed: int) -> Builder:
    """Host work (metrics, logging) between the last collective and the synchronise call."""
    job = Ddp(seed)
    host_ms = float(job.rng.uniform(2, 30))
    for _ in range(job.steps):
        job.step(last=False)
        for i in range(job.n):
            job.b.host(i, host_ms * MS)
            job.b.sync(i)
    return job.b


def absorbed(seed: int) -> Builder:
    """One or two ranks' hosts need more time in every step, hidden by the kernels that are enqueued already."""
    job = Ddp(seed)
    job.gpu_ms = max(job.gpu_ms, 1.5)
    slow = job.rng.choice(job.n, int(job.rng.integers(1, 3)), replace=False).tolist()
    b, busy_ms = job.b, 2 * job.gpu_ms * job.layers
    extra_ms = busy_ms * float(job.rng.uniform(0.1, 0.45))
    category = int(job.rng.choice([Category.ON_CPU, Category.IO, Category.LOCK, Category.SLEEP]))
    for _ in range(job.steps):
        b.begin(range(job.n))
        for i in range(job.n):
            _load(b, i)
            _forward(b, i, job.layers, job.gpu_ms)
            half = job.layers // 2
            _backward(b, i, job.world, half, job.gpu_ms, n_bytes=job.n_bytes)
            if i in slow:
                b.host(i, extra_ms * MS, category)
            _backward(b, i, job.world, job.layers - half, job.gpu_ms, n_bytes=job.n_bytes)
            _optimizer(b, i, job.world, job.gpu_ms)
            b.sync(i)
    return b


def run_ahead(seed: int) -> Builder:
    """Hosts run ahead: the loss is read every 10 to 30 steps; the launch queue bounds the distance."""
    job = Ddp(seed, steps=(90, 180))
    every = int(job.rng.integers(10, 31))
    for k in range(job.steps):
        job.step(last=(k + 1) % every == 0 or k + 1 == job.steps)
    return job.b


def accumulation(seed: int) -> Builder:
    """Gradients of 2 to 8 microbatches are accumulated; the last microbatch reduces them."""
    job = Ddp(seed, steps=(50, 80))
    b, n_micro = job.b, int(job.rng.integers(2, 9))
    reads_each = bool(job.rng.random() < 0.5)
    job.gpu_ms = min(job.gpu_ms, 1.5)
    for _ in range(job.steps):
        b.begin(range(job.n))
        for i in range(job.n):
            for micro in range(n_micro):
                _load(b, i, 0.2)
                _forward(b, i, job.layers, job.gpu_ms)
                if micro + 1 < n_micro:
                    _forward(b, i, job.layers, 2 * job.gpu_ms)
                else:
                    _backward(b, i, job.world, job.layers, job.gpu_ms, n_bytes=job.n_bytes)
                if reads_each and micro + 1 < n_micro:
                    b.sync(i, is_compute_only=True)
            _optimizer(b, i, job.world, job.gpu_ms)
            b.sync(i)
    return b


def bucketed(seed: int) -> Builder:
    """Batches of equal length on all ranks; the length differs from step to step."""
    job = Ddp(seed)
    for _ in range(job.steps):
        length = float(job.rng.choice([0.5, 0.75, 1.0, 1.5, 2.0]))
        job.step((length * np.exp(0.015 * job.rng.standard_normal(job.n))).tolist())
    return job.b


def lengths(seed: int) -> Builder:
    """Every rank draws its own sequence lengths: another rank is last in each step."""
    job = Ddp(seed)
    spread = float(job.rng.uniform(0.1, 0.4))
    for _ in range(job.steps):
        job.step(np.exp(spread * job.rng.standard_normal(job.n)).tolist())
    job.b.uneven = "sequence lengths"
    return job.b


def experts(seed: int) -> Builder:
    """Mixture of experts: tokens go to experts on other ranks; the hot experts move every few steps."""
    job = Ddp(seed, steps=(50, 90))
    b, layers = job.b, 2 + job.layers // 3
    spread = float(job.rng.uniform(0.1, 0.45))
    load = spread * job.rng.standard_normal((layers, job.n))
    keep = float(job.rng.uniform(0.5, 0.97))
    for _ in range(job.steps):
        load = keep * load + np.sqrt(1 - keep**2) * spread * job.rng.standard_normal(load.shape)
        tokens = np.exp(load)
        tokens /= tokens.mean(axis=1, keepdims=True)
        b.begin(range(job.n))
        for i in range(job.n):
            _load(b, i)
            for layer in range(layers):
                _expert_layer(b, i, job.world, job.gpu_ms, float(tokens[layer, i]))
            for layer in reversed(range(layers)):
                _expert_layer(b, i, job.world, 2 * job.gpu_ms, float(tokens[layer, i]))
                b.meet(i, job.world, Op.ALL_REDUCE, job.n_bytes, is_backward=True)
            _optimizer(b, i, job.world, job.gpu_ms)
            b.sync(i)
    b.uneven = "experts"
    return b


def _expert_layer(b: Builder, i: int, world: int, gpu_ms: float, tokens: float) -> None:
    b.compute(i, gpu_ms * MS)
    b.meet(i, world, Op.ALL_TO_ALL, 1 << 24)
    b.join(i, world)
    b.compute(i, 1.5 * gpu_ms * MS * tokens)
    b.meet(i, world, Op.ALL_TO_ALL, 1 << 24)
    b.join(i, world)


def evaluation(seed: int) -> Builder:
    """Rank 0 logs in every step and evaluates every 10 to 20 steps, while the others wait."""
    job = Ddp(seed)
    every, launches = int(job.rng.integers(10, 21)), int(job.rng.integers(20, 80))
    b = job.b
    for k in range(job.steps):
        job.step()
        b.host(0, 0.25 * MS)
        if (k + 1) % every == 0:
            for _ in range(launches // 4):
                b.compute(0, job.gpu_ms * MS, 4)
            b.sync(0)
            b.host(0, 1.5 * MS, Category.IO)
    b.uneven, b.may_name = "evaluation", frozenset({0})
    return b


def rollouts(seed: int) -> Builder:
    """Reinforcement learning: each rank generates answers of its own length, then all train."""
    job = Ddp(seed, steps=(30, 60))
    b, spread = job.b, float(job.rng.uniform(0.1, 0.4))
    job.gpu_ms = min(job.gpu_ms, 1.0)
    tokens = int(job.rng.integers(12, 30))
    for _ in range(job.steps):
        b.begin(range(job.n))
        for i in range(job.n):
            for _ in range(max(2, int(tokens * np.exp(spread * job.rng.standard_normal())))):
                b.compute(i, 1.6 * MS, 30)
                b.sync(i)
            b.host(i, 2.0 * MS)
            b.meet(i, job.world, Op.ALL_GATHER, 1 << 16, datatype=Datatype.FLOAT32)
            b.join(i, job.world)
            b.compute(i, 50_000, 2)
            b.sync(i)
            for _ in range(2):
                _forward(b, i, job.layers, job.gpu_ms)
                _backward(b, i, job.world, job.layers, job.gpu_ms, n_bytes=job.n_bytes)
                _optimizer(b, i, job.world, job.gpu_ms)
            b.sync(i)
    b.uneven = "rollouts"
    return b


def gan(seed: int) -> Builder:
    """Two models: the discriminator trains 1 to 4 times for each step of the generator; both losses are read."""
    job = Ddp(seed)
    b, n_critic = job.b, int(job.rng.integers(1, 5))
    for k in range(job.steps):
        is_generator = k % (n_critic + 1) == n_critic
        gpu_ms, n_bytes = (job.gpu_ms, job.n_bytes) if is_generator else (0.4 * job.gpu_ms, job.n_bytes >> 2)
        layers = job.layers if is_generator else max(job.layers // 2, 2)
        b.begin(range(job.n))
        for i in range(job.n):
            if not is_generator:
                _load(b, i)
            _forward(b, i, layers, gpu_ms)
            _backward(b, i, job.world, layers, gpu_ms, n_bytes=n_bytes)
            _optimizer(b, i, job.world, gpu_ms)
            b.sync(i)
    return b


def elastic(seed: int) -> Builder:
    """The job is started again with fewer or more ranks in the middle."""
    job = Ddp(seed, ranks=(8,), steps=(60, 90))
    b = job.b
    for _ in range(job.steps // 2):
        job.step()
    n_ranks = int(job.rng.choice([4, 6, 7]))
    again = b.again(n_ranks)
    job.world = b.group(again)
    for k in range(job.steps - job.steps // 2):
        b.begin(again, warm=k)
        for i in again:
            _load(b, i)
            _forward(b, i, job.layers, job.gpu_ms)
            _backward(b, i, job.world, job.layers, job.gpu_ms, n_bytes=job.n_bytes)
            _optimizer(b, i, job.world, job.gpu_ms)
            b.sync(i)
    return b


def saves(seed: int) -> Builder:
    """Every 10 to 20 steps each rank writes its shard of a checkpoint, then all meet in a barrier."""
    job = Ddp(seed)
    every, save_ms = int(job.rng.integers(10, 21)), float(job.rng.uniform(80, 600))
    for k in range(job.steps):
        job.step()
        if (k + 1) % every == 0:
            for i in range(job.n):
                job.b.host(i, 0.15 * save_ms * MS, Category.COPY, (1, 0, 8))
                job.b.host(
                    i, 0.7 * save_ms * MS * float(np.exp(0.05 * job.rng.standard_normal())), Category.IO
                )
                job.b.host(i, 0.1 * save_ms * MS)
                job.b.meet(i, job.world, Op.ALL_REDUCE, 4, datatype=Datatype.FLOAT32)
                job.b.sync(i)
    return job.b


def saves_async(seed: int) -> Builder:
    """The checkpoint is staged by a copy; a thread writes it, and takes the interpreter lock for some steps."""
    job = Ddp(seed)
    job.gpu_ms = max(job.gpu_ms, 0.8)
    every, stage_ms = int(job.rng.integers(12, 25)), float(job.rng.uniform(10, 60))
    n_busy, lock_share = int(job.rng.integers(2, 6)), float(job.rng.uniform(0.02, 0.08))
    busy_ms = lock_share * 3 * job.gpu_ms * job.layers
    for k in range(job.steps):
        job.step()
        since = (k + 1) % every
        for i in range(job.n):
            if since == 0 and k:
                job.b.host(i, stage_ms * MS, Category.COPY, (1, 0, 8))
            elif k >= every and since <= n_busy:
                job.b.host(i, busy_ms * MS, Category.LOCK)
    return job.b


def node_kernels(seed: int) -> Builder:
    """Two or three nodes whose tuning chose other kernels: their launches and times differ by some per cent."""
    job = Ddp(seed, ranks=(16, 24), steps=(50, 90))
    b, n_nodes = job.b, job.n // 8
    more = job.rng.integers(0, 4, n_nodes)
    slower = np.exp(0.012 * job.rng.standard_normal(n_nodes))
    for i in range(job.n):
        b.noise.host_speed[i] *= float(np.exp(0.05 * job.rng.standard_normal()))
    for _ in range(job.steps):
        b.begin(range(job.n))
        for i in range(job.n):
            launches, factor = 6 + 2 * int(more[i // 8]), float(slower[i // 8])
            _load(b, i)
            for _ in range(job.layers):
                b.compute(i, job.gpu_ms * MS * factor, launches)
            for _ in range(job.layers):
                b.compute(i, 2 * job.gpu_ms * MS * factor, launches)
                b.meet(i, job.world, Op.ALL_REDUCE, job.n_bytes, is_backward=True)
            _optimizer(b, i, job.world, job.gpu_ms)
            b.sync(i)
    return b


def gpus_differ(seed: int) -> Builder:
    """The GPUs of a job differ by 2 to 3 % by manufacture."""
    job = Ddp(seed)
    speed = job.rng.uniform(0.985, 1.015, job.n)
    job.b.noise.gpu_speed = speed.tolist()
    for _ in range(job.steps):
        job.step()
    return job.b


def one_a_node(seed: int) -> Builder:
    """Four or eight nodes with one rank each."""
    job = Ddp(seed, ranks=(4, 8), per_node=1)
    for _ in range(job.steps):
        job.step()
    return job.b


def subgroups(seed: int) -> Builder:
    """Tensor, pipeline and data parallel: 2 x 2 x 2 or 2 x 2 x 4 ranks, each kind of group on its own stream."""
    rng = np.random.default_rng([seed, 5])
    tp, pp, dp = 2, 2, int(rng.choice([2, 4]))
    n, steps, n_micro = tp * pp * dp, int(rng.integers(40, 70)), int(rng.integers(4, 7))
    gpu_ms = float(np.exp(rng.uniform(np.log(0.3), np.log(2.0))))
    b = Builder(seed, n, ranks_per_node=8)
    reshape = np.arange(n).reshape(pp, dp, tp)
    b.group(range(n))
    tensor = {i: b.group(row.tolist(), parent=0) for s in reshape for row in s for i in [tuple(row.tolist())]}
    pipe = {tuple(c): b.group(c) for c in (reshape[:, d, t].tolist() for d in range(dp) for t in range(tp))}
    data = {tuple(c): b.group(c) for c in (reshape[s, :, t].tolist() for s in range(pp) for t in range(tp))}
    for _ in range(steps):
        b.begin(range(n))
        for i in range(n):
            own = [next(g for members, g in kind.items() if i in members) for kind in (tensor, pipe, data)]
            _stage(b, i, i // (dp * tp), own, n_micro=n_micro, gpu_ms=gpu_ms)
            b.sync(i)
    return b


def _stage(b: Builder, i: int, stage: int, own: Sequence[int], *, n_micro: int, gpu_ms: float) -> None:
    """One step of a rank of a two-stage pipeline (all forward, then all backward)."""
    tensor, pipe, data = own
    _load(b, i)
    for is_backward in (False, True):
        receives = stage == (0 if is_backward else 1)
        for _ in range(n_micro):
            if receives:
                b.meet(i, pipe, Op.RECV, 1 << 22, peer=1 - stage, is_backward=is_backward)
                b.join(i, pipe)
            for _ in range(2):
                b.compute(i, gpu_ms * MS * (2 if is_backward else 1))
                b.meet(i, tensor, Op.ALL_REDUCE, 1 << 22, is_backward=is_backward)
                b.join(i, tensor)
            if not receives:
                b.compute(i, 20_000, 1)
                b.meet(i, pipe, Op.SEND, 1 << 22, peer=1 - stage, is_backward=is_backward)
    b.meet(i, data, Op.ALL_REDUCE, 1 << 26, is_backward=True)
    b.join(i, data)
    b.compute(i, gpu_ms * MS, 6)


def sharded(seed: int) -> Builder:
    """FSDP: parameters are gathered a layer ahead, gradients are scattered."""
    job = Ddp(seed, steps=(50, 90))
    b = job.b
    reduce = b.group(range(job.n))
    for _ in range(job.steps):
        b.begin(range(job.n))
        for i in range(job.n):
            _load(b, i)
            for is_backward in (False, True):
                b.meet(i, job.world, Op.ALL_GATHER, job.n_bytes, is_backward=is_backward)
                for layer in range(job.layers):
                    b.join(i, job.world)
                    if layer + 1 < job.layers:
                        b.meet(i, job.world, Op.ALL_GATHER, job.n_bytes, is_backward=is_backward)
                    b.host(i, 0.35 * MS)
                    b.compute(i, job.gpu_ms * MS * (2 if is_backward else 1))
                    if is_backward:
                        b.meet(i, reduce, Op.REDUCE_SCATTER, job.n_bytes, is_backward=True)
            _optimizer(b, i, reduce, job.gpu_ms)
            b.meet(i, job.world, Op.ALL_REDUCE, 4, datatype=Datatype.FLOAT32)
            b.sync(i)
    return b


def nodes(seed: int) -> Builder:
    """Three or four nodes with four or eight ranks each."""
    rng = np.random.default_rng([seed, 7])
    per_node, n_nodes = int(rng.choice([4, 8])), int(rng.integers(3, 5))
    job = Ddp(seed, ranks=(per_node * n_nodes,), per_node=per_node, steps=(50, 80))
    for _ in range(job.steps):
        job.step()
    return job.b


def attached_late(seed: int) -> Builder:
    """The agent of one node, or of all nodes, attaches in the middle of the job."""
    b = plain(seed) if seed % 2 else nodes(seed)
    b.capture = "late" if seed % 3 else "late_on_one_node"
    return b


def agent_died(seed: int) -> Builder:
    """The agent of one node ends in the middle of the job."""
    b = nodes(seed)
    b.capture = "died"
    return b


SHAPES: dict[str, Shape] = {
    shape.__name__: shape
    for shape in (
        *(
            plain,
            host_end,
            absorbed,
            run_ahead,
            accumulation,
            bucketed,
            lengths,
            experts,
            evaluation,
            rollouts,
        ),
        *(gan, elastic, saves, saves_async, node_kernels, gpus_differ, one_a_node, subgroups, sharded, nodes),
        *(attached_late, agent_died),
    )
}
