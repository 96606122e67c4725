"""Slices that overlap in any way, on as few lines as show them: on one they lie inside or beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stallscope.exporters.tracks import Slice


def laned(slices: Sequence[Slice]) -> list[list[Slice]]:
    """The slices on lines, each sorted by begin, the longer first. Nothing is cut and nothing left out."""
    lines: list[_Line] = []
    for one in sorted(slices, key=_order):
        line = next((line for line in lines if line.has_room(one)), None)
        if line is None:
            line = _Line()
            lines.append(line)
        line.slices.append(one)
        line.ends_ns.append(one.ts_ns + one.duration_ns)
    return [line.slices for line in lines]


@dataclass
class _Line:
    """A line as far as it is drawn. ends_ns: of the slices that are still open, the innermost last."""

    slices: list[Slice] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)

    def has_room(self, one: Slice) -> bool:
        """Whether the slice, which begins after all that are here, lies beside or inside them."""
        while self.ends_ns and self.ends_ns[-1] <= one.ts_ns:
            self.ends_ns.pop()
        return not self.ends_ns or one.ts_ns + one.duration_ns <= self.ends_ns[-1]


def _order(one: Slice) -> tuple[int, int, str]:
    return one.ts_ns, -one.duration_ns, one.name
