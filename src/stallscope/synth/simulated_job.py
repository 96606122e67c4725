"""The simulated job: its shape, its program, and the durations of its parts.

Ranks are laid out tensor-parallel first, then data, then pipeline: rank = (stage * dp + d) * tp + t, so
that a stage is a contiguous slice of ranks and a group is one axis of a reshaped array.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from stallscope.errors import BadInput
from stallscope.events.layout import Array


class Family(StrEnum):
    """The kinds of groups that communicate; each has its own communicators."""

    WORLD = "world"
    DATA = "data"
    TENSOR = "tensor"
    EXPERT = "expert"
    PIPELINE = "pipeline"


@dataclass(frozen=True, kw_only=True)
class Job:
    """The shape of a job and what its training loop does.

    layers, buckets: per stage; sharded: parameters are gathered and gradients scattered (FSDP) instead of
    reduced in buckets. sync_every: steps between two synchronise calls of the loop; above 1 the host runs
    ahead until its launch queue is full. checkpoint_every: 0 never. grad_norm: each step ends with a tiny
    all-reduce over the world and its result is read.
    """

    dp: int = 8
    tp: int = 1
    pp: int = 1
    ep: int = 1
    ranks_per_node: int = 8
    steps: int = 200
    layers: int = 4
    buckets: int = 4
    microbatches: int = 4
    sharded: bool = False
    sync_every: int = 1
    grad_norm: bool = False
    checkpoint_every: int = 0
    checkpoint_ns: int = 400_000_000

    def __post_init__(self) -> None:
        """Raises BadInput for an impossible shape."""
        counts = (self.dp, self.tp, self.pp, self.ep, self.ranks_per_node, self.steps, self.layers)
        if min(counts) < 1 or self.buckets < 1 or self.microbatches < 1 or self.sync_every < 1:
            raise BadInput(f"simulated job {self}: every size is at least 1")
        if self.dp % self.ep:
            raise BadInput(f"simulated job: ep {self.ep} does not divide dp {self.dp}; choose one that does")

    @property
    def nranks(self) -> int:
        """Ranks in the job."""
        return self.dp * self.tp * self.pp

    @property
    def n_nodes(self) -> int:
        """Machines, the last one perhaps not full."""
        return -(-self.nranks // self.ranks_per_node)

    @property
    def node_of(self) -> Array:
        """Node number, by rank."""
        return np.arange(self.nranks) // self.ranks_per_node

    def stage(self, number: int) -> slice:
        """The ranks of one pipeline stage."""
        width = self.dp * self.tp
        return slice(number * width, (number + 1) * width)

    def ranks_of_stage(self, number: int) -> tuple[int, ...]:
        """The ranks of one pipeline stage, as numbers."""
        part = self.stage(number)
        return tuple(range(part.start, part.stop))

    def ranks_of_node(self, number: int) -> tuple[int, ...]:
        """The ranks on one machine."""
        first = number * self.ranks_per_node
        return tuple(range(first, min(first + self.ranks_per_node, self.nranks)))


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Base durations, and their scatter. docs/decisions/simulator.md has the fit.

    A host cost is base x speed of the rank x its wander in this step x lognormal(jitter), plus an occasional
    spike; a device cost has only speed and jitter, with far less scatter. Wander: a rank's host is slower for some
    steps, then faster (correlation from step to step: wander_memory). Spikes: lognormal around spike_ns with
    spike_sigma, per instruction. sharded_ns: the host cost of a sharded layer in addition to the call.
    Bandwidths are bus bandwidths, in bytes per ns.
    """

    launch_ns: int = 25_000
    enqueue_ns: int = 55_000
    sync_ns: int = 12_000
    load_ns: int = 90_000
    copy_ns: int = 20_000
    layer_launches: int = 6
    queue_launches: int = 1024
    forward_ns: int = 180_000
    backward_ns: int = 360_000
    sharded_ns: int = 1_100_000
    optimizer_ns: int = 300_000
    layer_bytes: int = 1 << 25
    activation_bytes: int = 1 << 24
    collective_ns: int = 5_000
    node_bandwidth: float = 280.0
    fabric_bandwidth: float = 45.0
    host_speed_sigma: float = 0.07
    host_wander_sigma: float = 0.18
    host_wander_memory: float = 0.6
    host_jitter_sigma: float = 0.12
    device_speed_sigma: float = 0.004
    device_jitter_sigma: float = 0.02
    spike_probability: float = 0.008
    spike_ns: int = 250_000
    spike_sigma: float = 0.9
    first_use_ns: int = 250_000_000
    warmup_factors: tuple[float, ...] = (40.0, 8.0, 1.5)

    def scaled(self, jitter: float) -> "Timing":
        """The same job with all scatter multiplied: 0 is deterministic, 1 is the fit."""
        return Timing(
            **{
                **self.__dict__,
                "host_speed_sigma": self.host_speed_sigma * jitter,
                "host_wander_sigma": self.host_wander_sigma * jitter,
                "host_jitter_sigma": self.host_jitter_sigma * jitter,
                "device_speed_sigma": self.device_speed_sigma * jitter,
                "device_jitter_sigma": self.device_jitter_sigma * jitter,
                "spike_probability": self.spike_probability * min(jitter, 1.0),
                "spike_ns": int(self.spike_ns * jitter),
            }
        )
