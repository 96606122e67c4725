"""Writes the programs of a job, step after step, with their scatter."""

from collections.abc import Iterable

from generator.machine import Group
from generator.noise import Noise
from generator.program import Collective, Host, Join, Kernel, Mark, Program, Step, Sync
from stallscope.events.names import Category, Datatype, Op

LAUNCH_NS = 22_000
ENQUEUE_NS = 55_000
FIRST_USE_NS = 240_000_000
NODE_BYTES_PER_NS, FABRIC_BYTES_PER_NS = 280.0, 45.0
WARM_UP = (25.0, 5.0, 1.4)
MS = 1_000_000


class Builder:
    """One job: processes on nodes, their groups, and their programs.

    rank_of: the rank of each process in the job; generations: which processes run at the same time.
    """

    def __init__(
        self,
        seed: int,
        n_ranks: int,
        *,
        ranks_per_node: int = 8,
        gpu_spread: float = 0.003,
        is_marked: bool | None = None,
    ) -> None:
        self.ranks_per_node = ranks_per_node
        self.node_of = [i // ranks_per_node for i in range(n_ranks)]
        self.rank_of = list(range(n_ranks))
        self.local_of = [i % ranks_per_node for i in range(n_ranks)]
        self.generations: list[list[int]] = [list(range(n_ranks))]
        self.noise = Noise(seed, n_ranks, node_of=self.node_of, gpu_spread=gpu_spread)
        self.rng = self.noise.rng
        self.is_marked = bool(self.rng.random() < 0.3) if is_marked is None else is_marked
        self.groups: list[Group] = []
        self.spans: list[bool] = []
        self.used: set[tuple[int, int]] = set()
        self.programs: list[Program] = [[] for _ in range(n_ranks)]
        self._steps: list[Step] = []
        self.n_steps = 0
        self.uneven = self.capture = ""
        self.may_name: frozenset[int] = frozenset()

    @property
    def processes(self) -> range:
        return range(len(self.programs))

    def group(self, members: Iterable[int], *, parent: int = 0) -> int:
        """A communicator of some processes; returns its index."""
        made = tuple(members)
        self.groups.append(Group(made, int(self.rng.integers(1, 1 << 62)), parent))
        self.spans.append(len({self.node_of[i] for i in made}) > 1)
        return len(self.groups) - 1

    def again(self, n_ranks: int) -> list[int]:
        """Another generation of processes, after the job was started again with n_ranks ranks."""
        first = len(self.programs)
        made = list(range(first, first + n_ranks))
        for i in range(n_ranks):
            self.node_of.append(i // self.ranks_per_node)
            self.rank_of.append(i)
            self.local_of.append(i % self.ranks_per_node)
            self.programs.append([])
            self._steps.append([])
        self.generations.append(made)
        seed = int(self.rng.integers(1 << 31))
        self.noise = Noise(seed, len(self.programs), node_of=self.node_of)
        return made

    def begin(self, processes: Iterable[int], *, warm: int | None = None) -> None:
        """Begin a step. warm: steps since the processes began, for the warm-up."""
        number = self.n_steps if warm is None else warm
        self.noise.next_step(WARM_UP[number] if number < len(WARM_UP) else 1.0)
        self._steps = [[] for _ in self.programs]
        for i in processes:
            self.programs[i].append(self._steps[i])
            if self.is_marked:
                self._steps[i].append(Mark(self.n_steps))
        self.n_steps += 1

    def add(self, i: int, made: Host) -> None:
        self._steps[i].append(made)

    def host(
        self, i: int, ns: float, category: int = Category.ON_CPU, calls: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """Host work in one category, now and then interrupted."""
        step, noise = self._steps[i], self.noise
        step.append(Host(category, noise.host_ns(i, ns), calls))
        if interruption := noise.interruption():
            step.append(Host(*interruption))

    def compute(self, i: int, gpu_ns: float, launches: int = 8, stream: int = 0) -> None:
        """Kernels."""
        noise = self.noise
        if interruption := noise.interruption():
            self._steps[i].append(Host(*interruption))
        self._steps[i].append(
            Kernel(noise.gpu_ns(i, gpu_ns), launches, noise.host_ns(i, launches * LAUNCH_NS), stream)
        )

    def meet(
        self,
        i: int,
        group: int,
        op: Op,
        n_bytes: int,
        *,
        is_backward: bool = False,
        peer: int = -1,
        datatype: Datatype = Datatype.BFLOAT16,
    ) -> None:
        """A collective, or a send or receive with `peer`."""
        size = len(self.groups[group].members)
        traffic = {Op.ALL_REDUCE: 2.0, Op.SEND: 1.0, Op.RECV: 1.0, Op.BROADCAST: 1.0}.get(op, 1.0) * n_bytes
        share = 1.0 if op in (Op.SEND, Op.RECV) else (size - 1) / size
        gpu_ns = 12_000 + traffic * share / (FABRIC_BYTES_PER_NS if self.spans[group] else NODE_BYTES_PER_NS)
        if (i, group) not in self.used:
            self.used.add((i, group))
            first_ns = int(FIRST_USE_NS * (1 + 0.1 * self.noise.normal()))
            self._steps[i].append(Host(Category.OTHER_OFF, max(first_ns, MS)))
        self._steps[i].append(
            Collective(
                group, op, n_bytes // 2 if datatype == Datatype.BFLOAT16 else n_bytes // 4,
                self.noise.fabric_ns(gpu_ns), self.noise.host_ns(i, ENQUEUE_NS), datatype, is_backward, peer,
            )
        )  # fmt: skip

    def join(self, i: int, group: int) -> None:
        self._steps[i].append(Join(group))

    def sync(self, i: int, *, copies: int = 1, is_compute_only: bool = False) -> None:
        self._steps[i].append(Sync(self.noise.wake_ns(), copies, is_compute_only))
