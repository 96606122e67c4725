"""Arranges overlapping slices on as few rows as possible: slices of a row follow or contain each other."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stallscope.exporters.tracks import Slice


def track_rows(slices: Sequence[Slice]) -> list[list[Slice]]:
    """The slices by row, each sorted by start, longer slices first. Slices are neither cut nor left out."""
    lines: list[_Line] = []
    for piece in sorted(slices, key=_order):
        line = next((line for line in lines if line.has_room(piece)), None)
        if line is None:
            line = _Line()
            lines.append(line)
        line.slices.append(piece)
        line.ends_ns.append(piece.ts_ns + piece.duration_ns)
    return [line.slices for line in lines]


@dataclass
class _Line:
    """A row under construction. ends_ns: ends of the slices that are still open, the innermost last."""

    slices: list[Slice] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)

    def has_room(self, piece: Slice) -> bool:
        """Whether the slice follows all open slices or fits inside them. It must start after the slices of the row."""
        while self.ends_ns and self.ends_ns[-1] <= piece.ts_ns:
            self.ends_ns.pop()
        return not self.ends_ns or piece.ts_ns + piece.duration_ns <= self.ends_ns[-1]


def _order(piece: Slice) -> tuple[int, int, str]:
    return piece.ts_ns, -piece.duration_ns, piece.name
