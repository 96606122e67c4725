"""Estimates how long waiting rows wait for their commit.

A commit takes a fixed time and a time for each row. Commits of few rows show only the fixed time: the time per row of
such commits would overestimate the wait of a longer queue by an order of magnitude.
"""

from dataclasses import dataclass, field

_DECAY = 0.9
_ASSUMED = ((0, 0.01), (50_000, 0.25))
"""Rows and seconds of two commits that are always part of the fit: until commits of several sizes have been timed."""

_ASSUMED_WEIGHT = 0.1


@dataclass
class _Sums:
    """Weighted sums of the rows x and times y of commits."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, n_rows: int, took_s: float, *, weight: float, decay: float) -> None:
        self.n = decay * self.n + weight
        self.x = decay * self.x + weight * n_rows
        self.y = decay * self.y + weight * took_s
        self.xx = decay * self.xx + weight * n_rows * n_rows
        self.xy = decay * self.xy + weight * n_rows * took_s


@dataclass
class CommitTimes:
    """The line of least squares through the last commits: their times by their rows."""

    _last: _Sums = field(default_factory=_Sums)

    def add(self, n_rows: int, took_s: float) -> None:
        """Note a commit."""
        self._last.add(n_rows, took_s, weight=1.0, decay=_DECAY)

    def wait_s(self, n_rows: int, group_rows: int) -> float:
        """Time until the last of n_rows waiting rows is committed, at most group_rows at a time."""
        fixed_s, row_s = self._line()
        return -(-n_rows // group_rows) * fixed_s + n_rows * row_s

    def _line(self) -> tuple[float, float]:
        """Fixed time of a commit, and its time per row."""
        sums = _Sums(**vars(self._last))
        for n_rows, took_s in _ASSUMED:
            sums.add(n_rows, took_s, weight=_ASSUMED_WEIGHT, decay=1.0)
        row_s = max(0.0, (sums.n * sums.xy - sums.x * sums.y) / (sums.n * sums.xx - sums.x**2))
        return max(0.0, (sums.y - row_s * sums.x) / sums.n), row_s
