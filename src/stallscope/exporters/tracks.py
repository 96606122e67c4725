"""A trace as tracks of slices and counters, which is what timelines are drawn from: Perfetto's and Chrome's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Value = str | int | float | bool


@dataclass(frozen=True)
class Slice:
    """Something that lasted; duration_ns 0 is a moment. starts, ends: numbers of the arrows from and to it."""

    ts_ns: int
    duration_ns: int
    name: str
    told: Mapping[str, Value] = field(default_factory=dict)
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Track:
    """One line of the picture. number: from 1; parent: the number of the track it lies in, 0 for none.

    slices: sorted by begin, the longer first; two of them lie beside or inside each other. samples: (ns, value) of a
    counter, whose unit is told. process: what a viewer that knows only processes and threads puts it under.
    """

    number: int
    parent: int
    name: str
    process: str
    slices: Sequence[Slice] = ()
    samples: Sequence[tuple[int, float]] = ()
    unit: str = ""


@dataclass(frozen=True)
class Story:
    """tracks: a parent before what lies in it. Times are ns on the clock of the first node; wall_ns is the wall time
    of its moment clock_ns, None where nobody took it.
    """

    tracks: Sequence[Track]
    clock_ns: int = 0
    wall_ns: int | None = None
