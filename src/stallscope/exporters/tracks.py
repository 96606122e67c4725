"""A trace as tracks of slices and counters, the input of the Perfetto and Chrome writers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Value = str | int | float | bool


@dataclass(frozen=True)
class Slice:
    """An interval; duration_ns 0 is a moment. starts, ends: numbers of the arrows from and to it."""

    ts_ns: int
    duration_ns: int
    name: str
    arguments: Mapping[str, Value] = field(default_factory=dict)
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Track:
    """One row of the timeline. number: from 1; parent: the number of the enclosing track, 0 for none.

    slices: sorted by start, longer slices first; two slices follow or contain each other. samples: (ns, value) of a
    counter in `unit`. process: the group for viewers that know only processes and threads.
    """

    number: int
    parent: int
    name: str
    process: str
    slices: Sequence[Slice] = ()
    samples: Sequence[tuple[int, float]] = ()
    unit: str = ""


@dataclass(frozen=True)
class TrackSet:
    """tracks: each parent precedes its children. Times are ns on the clock of the first node; wall_ns is the wall time
    at clock_ns, None without a wall-clock reading.
    """

    tracks: Sequence[Track]
    clock_ns: int = 0
    wall_ns: int | None = None
