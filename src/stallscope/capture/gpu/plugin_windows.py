"""When NCCL's profiler plugin records: short windows at an interval that keeps its measured cost within a budget.

Windows begin at multiples of the interval on the wall clock, so that the ranks of all machines record the same rounds.
The cost is the drop of the rate of collectives within a window against the seconds before it. An undecided diagnosis
opens a longer window, at most once in ten minutes.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

_WINDOW_S = 3.0
_BUDGET = 0.002  # share of the job's time
_MAX_ON = 0.1  # share of the time in which the plugin records at most
_FIRST_COST = 0.04  # until it is measured; public reports: 4 to 13 % for some sizes
_MIN_COST, _MAX_COST = 0.01, 0.2  # a smaller measured cost is noise
_N_MEASURED = 9
_MIN_MEASURED = 5
_FIRST_S = 8.0
_LONG_S = 30.0
_LONG_EVERY_S = 600.0
_MIN_CALLS = 20  # a second: fewer show no rate


class GpuTimes(StrEnum):
    """off: never. sample: in windows. on: always."""

    OFF = "off"
    SAMPLE = "sample"
    ON = "on"


@dataclass
class PluginWindows:
    """The schedule of the plugin. All times are in seconds."""

    mode: GpuTimes = GpuTimes.SAMPLE
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_N_MEASURED))
    _rates: deque[int] = field(default_factory=lambda: deque(maxlen=int(_WINDOW_S)))
    _on_rates: list[int] = field(default_factory=list)
    _until_s: float = 0.0
    _next_s: float = 0.0
    _long_s: float = -_LONG_EVERY_S

    @property
    def cost(self) -> float:
        """The share of the job's speed that recording costs: the median of the last windows, or an assumption."""
        if len(self._costs) < _MIN_MEASURED:
            return _FIRST_COST
        return float(np.clip(np.median(self._costs), _MIN_COST, _MAX_COST))

    @property
    def interval_s(self) -> float:
        """From the start of a window to the start of the next window."""
        return _WINDOW_S / min(_MAX_ON, _BUDGET / self.cost)

    def seconds(self, wall_s: float, *, is_undecided: bool) -> float:
        """The time for which the plugin records from now on; 0 where it does not. Called once a second.

        is_undecided: the diagnosis needs the GPUs' times.
        """
        if self.mode is not GpuTimes.SAMPLE:
            return 2 * _WINDOW_S if self.mode is GpuTimes.ON else 0.0
        if is_undecided and wall_s - self._long_s >= _LONG_EVERY_S:
            self._long_s, self._until_s = wall_s, wall_s + _LONG_S
        if wall_s >= self._next_s:
            is_first, self._next_s = not self._next_s, self._begin_after(wall_s)
            self._until_s = max(self._until_s, 0.0 if is_first else wall_s + _WINDOW_S)
        return max(self._until_s - wall_s, 0.0)

    def _begin_after(self, wall_s: float) -> float:
        """When the next window starts. The first starts soon after the job, for short jobs."""
        on_grid = (wall_s // self.interval_s + 1) * self.interval_s
        return on_grid if self._next_s else min(on_grid, wall_s + _FIRST_S)

    def note_calls(self, n: int, *, is_on: bool) -> None:
        """Take the number of collectives of the last second. is_on: the plugin recorded throughout."""
        if is_on:
            self._on_rates.append(n)
            return
        if len(self._on_rates) > 1 and len(self._rates) == self._rates.maxlen:
            before, during = float(np.median(self._rates)), float(np.median(self._on_rates[1:]))
            if before >= _MIN_CALLS:
                self._costs.append(1.0 - during / before)
        if self._on_rates:
            self._rates.clear()
        self._on_rates = []
        self._rates.append(n)
