"""The clocks of the simulated machines: from true time to the readings of a node or a GPU."""

from dataclasses import dataclass

import numpy as np

from stallscope.events.layout import Array
from stallscope.events.trace import Clock

EPOCH_NS = 1_760_000_000_000_000_000
"""Wall time at true time 0 of a simulated job."""

_BRACKET_NS = 300


@dataclass(frozen=True, kw_only=True)
class ClockSpread:
    """The spread of the clocks. Monotonic clocks count from boot: uptime_ns is the largest uptime.

    drift_ppm: standard deviation, of nodes and of GPUs. wall_error_ns: standard deviation of the error
    of a node's wall clock under NTP.
    """

    uptime_ns: int = 40 * 86_400 * 1_000_000_000
    drift_ppm: float = 8.0
    wall_error_ns: int = 1_000_000
    gpu_offset_ns: int = 200_000


@dataclass(frozen=True)
class NodeClocks:
    """Each node's monotonic clock: offset_ns at true time 0, then drift (1e-6 = 1 ppm)."""

    offset_ns: Array
    drift: Array
    wall_error_ns: Array

    def reading(self, node: Array, true_ns: Array) -> Array:
        """The readings of each node's monotonic clock at true_ns (same shape)."""
        read: Array = self.offset_ns[node] + self.length(node, true_ns)
        return read

    def length(self, node: Array, true_ns: Array) -> Array:
        """A true duration as the node's clock measures it, rounded down."""
        measured: Array = true_ns + np.floor(true_ns * self.drift[node]).astype(np.int64)
        return measured

    def rows(self, node: int, true_ns: Array) -> tuple[Clock, ...]:
        """Readings of a node's monotonic clock against its wall clock, at some true times."""
        monotonic = self.reading(np.full(len(true_ns), node), true_ns)
        wall = EPOCH_NS + true_ns + self.wall_error_ns[node]
        return tuple(Clock(node, int(a), int(b), _BRACKET_NS) for a, b in zip(monotonic, wall, strict=True))


def node_clocks(n_nodes: int, spread: ClockSpread, rng: np.random.Generator) -> NodeClocks:
    """Draw the clocks of all nodes."""
    return NodeClocks(
        offset_ns=rng.integers(spread.uptime_ns // 100, spread.uptime_ns + 1, n_nodes),
        drift=rng.normal(0.0, spread.drift_ppm * 1e-6, n_nodes),
        wall_error_ns=rng.normal(0.0, spread.wall_error_ns, n_nodes).astype(np.int64),
    )


@dataclass(frozen=True)
class GpuClocks:
    """Each GPU's clock: wall-like, with its own offset and drift."""

    offset_ns: Array
    drift: Array

    def reading(self, rank: Array, true_ns: Array) -> Array:
        """The readings of the GPU's clock at true_ns."""
        drifted = np.floor(true_ns * self.drift[rank]).astype(np.int64)
        read: Array = EPOCH_NS + self.offset_ns[rank] + true_ns + drifted
        return read


def gpu_clocks(n_ranks: int, spread: ClockSpread, rng: np.random.Generator) -> GpuClocks:
    """Draw the clocks of all GPUs."""
    return GpuClocks(
        offset_ns=rng.normal(0.0, spread.gpu_offset_ns, n_ranks).astype(np.int64),
        drift=rng.normal(0.0, spread.drift_ppm * 1e-6, n_ranks),
    )
