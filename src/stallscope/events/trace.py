"""A whole trace as arrays: what importers and the store give, and the diagnosis takes."""

from dataclasses import dataclass, field

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array


@dataclass(frozen=True)
class Clock:
    """One reading of a node's monotonic clock against wall time; error is half the width of the bracket."""

    node: int
    monotonic_ns: int
    wall_ns: int
    error_ns: int = 0


@dataclass(frozen=True)
class WallClock:
    """The kernel's account of the wall clock: is it kept by NTP or PTP, and how wrong can it be?"""

    is_synchronised: bool
    max_error_us: int
    estimated_error_us: int
    frequency_ppm: float
    offset_ns: int


@dataclass(frozen=True)
class Trace:
    """Arrays by table (see layout) and what is known about where they come from.

    nodes: names, by the number in the `node` column. source: one sentence, what the events are.
    probed: readings of several nodes' clocks against one and the same wall clock, taken over the network: the
    error is half the round trip, so that they tie the nodes' clocks together; `clocks` are each node's own.
    stacks: frames by the number in `stack` columns, innermost first, of those that the tables name.
    lost: records lost by kind. ends_ns: last moment the capture was running, per node; -1 unknown.
    facts: free text about the source (hardware, software).
    The diagnosis takes the collectives column by column too (columns.Columns): where they are very many.
    """

    collectives: Array = field(default_factory=lambda: layout.empty(layout.COLLECTIVES))
    calls: Array = field(default_factory=lambda: layout.empty(layout.CALLS))
    offcpu: Array = field(default_factory=lambda: layout.empty(layout.OFFCPU))
    snapshots: Array = field(default_factory=lambda: layout.empty(layout.SNAPSHOTS))
    communicators: Array = field(default_factory=lambda: layout.empty(layout.COMMUNICATORS))
    processes: Array = field(default_factory=lambda: layout.empty(layout.PROCESSES))
    spans: Array = field(default_factory=lambda: layout.empty(layout.SPANS))
    annotations: Array = field(default_factory=lambda: layout.empty(layout.ANNOTATIONS))
    host_events: Array = field(default_factory=lambda: layout.empty(layout.HOST_EVENTS))
    positions: Array = field(default_factory=lambda: layout.empty(layout.POSITIONS))
    stacks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    gpus: Array = field(default_factory=lambda: layout.empty(layout.GPUS))
    gpu_processes: Array = field(default_factory=lambda: layout.empty(layout.GPU_PROCESSES))
    nodes: tuple[str, ...] = ("",)
    symbols: tuple[str, ...] = ("",)
    clocks: tuple[Clock, ...] = ()
    probed: tuple[Clock, ...] = ()
    lost: dict[str, int] = field(default_factory=dict)
    ends_ns: tuple[int, ...] = ()
    source: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    def told_ranks(self) -> dict[tuple[int, int], int]:
        """The rank of each process, by node and pid, whose launcher has told it."""
        return {
            (node, pid): rank
            for node, pid, rank in self.processes[["node", "pid", "rank"]].tolist()
            if rank != UNKNOWN
        }
