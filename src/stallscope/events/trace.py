"""A whole trace as arrays: the output of importers and the store, and the input of the diagnosis."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

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
    """The kernel's state of the wall clock: whether NTP or PTP synchronises it, and its maximum error."""

    is_synchronised: bool
    max_error_us: int
    estimated_error_us: int
    frequency_ppm: float
    offset_ns: int


@dataclass(frozen=True)
class Gap:
    """Why the data of a source cannot decide the answer (`reason`), and the next step that would (`action`)."""

    reason: str
    action: str


@dataclass(frozen=True)
class Coverage:
    """What a source can show, stated by its reader.

    blind_spots: kinds of fault that the source never shows, e.g. "slowness" for dumps.
    omitted: records that the reader left out, counted by reason.
    gaps: defects of the data that leave the answer inconclusive where no fault is reported.
    """

    blind_spots: tuple[str, ...] = ()
    omitted: Mapping[str, int] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()

    @staticmethod
    def joined(coverages: Iterable["Coverage"]) -> "Coverage":
        """The coverage of several traces read together."""
        blind_spots: dict[str, None] = {}
        omitted: dict[str, int] = {}
        gaps: dict[Gap, None] = {}
        for coverage in coverages:
            blind_spots |= dict.fromkeys(coverage.blind_spots)
            gaps |= dict.fromkeys(coverage.gaps)
            for reason, n in coverage.omitted.items():
                omitted[reason] = omitted.get(reason, 0) + n
        return Coverage(tuple(blind_spots), omitted, tuple(gaps))

    def to_text(self) -> str:
        """The coverage as JSON, for the store and the wire; empty where there is nothing to state."""
        return json.dumps(asdict(self), sort_keys=True) if self != Coverage() else ""

    @staticmethod
    def from_text(text: str) -> "Coverage":
        """The coverage that to_text() wrote. Raises ValueError, KeyError, TypeError for other text."""
        if not text:
            return Coverage()
        fields = json.loads(text)
        return Coverage(
            blind_spots=tuple(map(str, fields["blind_spots"])),
            omitted={str(reason): int(n) for reason, n in fields["omitted"].items()},
            gaps=tuple(Gap(**gap) for gap in fields["gaps"]),
        )


@dataclass(frozen=True)
class Trace:
    """Arrays by table (see layout) and facts about their source.

    nodes: names, by the number in the `node` column. source: one sentence about the source of the events.
    probed: readings of several nodes' clocks against a single wall clock, taken over the network: the
    error is half the round trip, so that they align the nodes' clocks; `clocks` are each node's own readings.
    stacks: frames by the number in `stack` columns, innermost first, for the stacks that the tables name.
    lost: records lost by kind. ends_ns: last moment the capture was running, per node; -1 unknown.
    facts: free text about the source (hardware, software). coverage: what the source can show.
    The diagnosis also accepts the collectives column by column (columns.Columns), for very large traces.
    """

    collectives: Array = field(default_factory=lambda: layout.empty(layout.COLLECTIVES))
    calls: Array = field(default_factory=lambda: layout.empty(layout.CALLS))
    offcpu: Array = field(default_factory=lambda: layout.empty(layout.OFFCPU))
    snapshots: Array = field(default_factory=lambda: layout.empty(layout.SNAPSHOTS))
    communicators: Array = field(default_factory=lambda: layout.empty(layout.COMMUNICATORS))
    processes: Array = field(default_factory=lambda: layout.empty(layout.PROCESSES))
    spans: Array = field(default_factory=lambda: layout.empty(layout.SPANS))
    annotations: Array = field(default_factory=lambda: layout.empty(layout.ANNOTATIONS))
    owners: Array = field(default_factory=lambda: layout.empty(layout.OWNERS))
    gpu_kernels: Array = field(default_factory=lambda: layout.empty(layout.GPU_KERNELS))
    idle_gpus: Array = field(default_factory=lambda: layout.empty(layout.IDLE_GPUS))
    host_events: Array = field(default_factory=lambda: layout.empty(layout.HOST_EVENTS))
    positions: Array = field(default_factory=lambda: layout.empty(layout.POSITIONS))
    stacks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    gpus: Array = field(default_factory=lambda: layout.empty(layout.GPUS))
    gpu_processes: Array = field(default_factory=lambda: layout.empty(layout.GPU_PROCESSES))
    operations: Array = field(default_factory=lambda: layout.empty(layout.CALL_COUNTS))
    samples: Array = field(default_factory=lambda: layout.empty(layout.SAMPLES))
    gpu_use: Array = field(default_factory=lambda: layout.empty(layout.GPU_USE))
    gpu_counters: Array = field(default_factory=lambda: layout.empty(layout.GPU_COUNTERS))
    requests: Array = field(default_factory=lambda: layout.empty(layout.REQUESTS))
    tokens: Array = field(default_factory=lambda: layout.empty(layout.TOKENS))
    servers: Array = field(default_factory=lambda: layout.empty(layout.SERVERS))
    engine_metrics: Array = field(default_factory=lambda: layout.empty(layout.ENGINE_METRICS))
    engine_spans: Array = field(default_factory=lambda: layout.empty(layout.ENGINE_SPANS))
    nodes: tuple[str, ...] = ("",)
    symbols: tuple[str, ...] = ("",)
    clocks: tuple[Clock, ...] = ()
    probed: tuple[Clock, ...] = ()
    lost: dict[str, int] = field(default_factory=dict)
    ends_ns: tuple[int, ...] = ()
    source: str = ""
    facts: dict[str, str] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)

    def launcher_ranks(self) -> dict[tuple[int, int], int]:
        """The rank of each process, by node and pid, if its launcher reported it."""
        return {
            (node, pid): rank
            for node, pid, rank in self.processes[["node", "pid", "rank"]].tolist()
            if rank != UNKNOWN
        }
