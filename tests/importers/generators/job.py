"""A job with a known fault, from which the generators write the files of other tools.

Each step, every rank makes a collective in its own group, if the job has groups, and then a collective of all ranks.
A culprit makes its last call in step `last_step` and stops before the next collective. The calls and the progress of
all ranks follow from this. A job with `late_ms` does not stop: the culprit arrives late in every step.
"""

from dataclasses import dataclass, replace
from random import Random

WORLD = "world"


@dataclass(frozen=True)
class Progress:
    """Calls of one rank in one group, counted from 1. completed: the last call that all members have made."""

    entered: int
    completed: int


@dataclass(frozen=True)
class Job:
    """n_groups: groups of neighbouring ranks, 0 for the world only. stops_in_group: culprits stop before that call."""

    n_ranks: int = 8
    culprits: tuple[int, ...] = (3,)
    op: str = "all_reduce"
    group_op: str = "all_gather"
    n_groups: int = 0
    stops_in_group: bool = False
    last_step: int = 59
    n_elements: int = 4096
    number: int = 0
    late_ms: float = 30.0
    n_steps: int = 20

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Members by name, the world first."""
        size = self.n_ranks // max(self.n_groups, 1)
        parts = {f"tp{i}": tuple(range(i * size, (i + 1) * size)) for i in range(self.n_groups)}
        return {WORLD: tuple(range(self.n_ranks))} | parts

    def own_groups(self, rank: int) -> list[str]:
        """The groups of a rank in the order of its calls in a step."""
        return [name for name, members in reversed(self.groups.items()) if rank in members]

    def op_of(self, group: str) -> str:
        return self.op if group == WORLD else self.group_op

    @property
    def stuck_group(self) -> str:
        """The group whose next call the culprits do not make."""
        if not (self.stops_in_group and self.n_groups and self.culprits):
            return WORLD
        return self.own_groups(self.culprits[0])[0]

    def progress(self, rank: int) -> dict[str, Progress]:
        """The progress of a rank by group, when the job hangs."""
        n = self.last_step
        if not self.culprits:
            return {name: Progress(n, n) for name in self.own_groups(rank)}
        stuck, out = self.stuck_group, {}
        for name in self.own_groups(rank):
            is_behind = rank in self.culprits or (name == WORLD != stuck and self._misses_world(rank))
            enters = 0 if is_behind and name in (stuck, WORLD) else 1
            completes = 0 if name in (stuck, WORLD) else 1
            out[name] = Progress(n + enters, n + completes)
        return out

    def _misses_world(self, rank: int) -> bool:
        """Whether a rank waits in its own group and therefore does not reach the call of all ranks."""
        return self.stuck_group in self.own_groups(rank)

    def waits_in(self, rank: int) -> str | None:
        """The group in which a rank waits; None for a culprit and for a job without a fault."""
        return next((name for name, p in self.progress(rank).items() if p.entered > p.completed), None)

    def host(self, rank: int) -> str:
        return f"node{rank // max(self.n_ranks // 2, 1)}"

    def pid(self, rank: int) -> int:
        return 4000 + 1000 * self.number + rank

    def comm_id(self, group: str) -> int:
        """A number that identifies a group of this job."""
        return 0x5EED_0000_0000 + (self.number << 16) + list(self.groups).index(group) + 1


OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def random_job(chance: Random, **fixed: object) -> Job:
    """A job with a random fault. fixed: fields that are not random."""
    n_ranks = chance.choice((4, 8, 16))
    job = Job(
        n_ranks=n_ranks,
        culprits=(chance.randrange(n_ranks),),
        op=chance.choice(OPS),
        group_op=chance.choice(OPS),
        last_step=chance.randrange(20, 90),
        n_elements=chance.choice((1, 4096, 1 << 20)),
        late_ms=chance.choice((20.0, 30.0, 60.0)),
    )
    job = replace(job, **fixed)  # type: ignore[arg-type]
    return replace(job, culprits=tuple(rank % job.n_ranks for rank in job.culprits))
