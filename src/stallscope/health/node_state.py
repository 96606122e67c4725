"""The state of a machine among its cohort, with hysteresis: a single slow or fast window changes nothing."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from stallscope.health.signals import SIGNALS

STATES = ("unknown", "healthy", "suspect", "straggler")

ENTER_WINDOWS = 2
"""A machine is a straggler after this many windows with a signal nearer to the threshold than to the median, or below,
if the mean of the signal is below the threshold. The mean has less noise than each window.
"""

LEAVE_WINDOWS = 3
"""A straggler is healthy after this many windows in which each signal is nearer to the median than to the threshold."""

_HISTORY_WINDOWS = 60
_UNANSWERED_WINDOWS = 3
Thresholds = Mapping[str, Mapping[str, float]]


@dataclass
class NodeState:
    """state: one of STATES. reason: one clause for people.

    score: the lowest signal as a share of the cohort's median, at most 1; without a quorum, of the machine's own
    median; None before the first window.
    """

    state: str = "unknown"
    score: float | None = None
    reason: str = "the first window is not complete"
    _low: dict[str, list[float]] = field(default_factory=dict)
    _n_good: int = 0
    _n_unanswered: int = 0
    _history: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=_HISTORY_WINDOWS))

    def update(self, signals: Mapping[str, float], answer: Mapping[str, Any] | None) -> None:
        """Judge a window. answer: of the hub; None if it did not answer.

        A window without an answer is not judged: older thresholds are wrong after a change of all machines. The state
        stays for three such windows.
        """
        self._n_unanswered = 0 if answer is not None else self._n_unanswered + 1
        if 0 < self._n_unanswered <= _UNANSWERED_WINDOWS:
            self._history.append(signals)
            return
        thresholds: Thresholds = (answer or {}).get("signals") or {}
        medians = {name: each["median"] for name, each in thresholds.items()} or self._own_medians()
        self._history.append(signals)
        self.score = _score(signals, medians)
        if not thresholds:
            self._set_unknown(answer)
            return
        n_nodes = int((answer or {}).get("n_nodes") or 0)
        entering, below = self._compared(signals, thresholds)
        if entering or below:
            self._n_good = 0
            self.state = "straggler" if entering or self.state == "straggler" else "suspect"
            name = (entering or below)[0]
            self.reason = _comparison(name, signals[name], thresholds[name]["median"], n_nodes)
            return
        self._n_good = self._n_good + 1 if _is_near_median(signals, thresholds) else 0
        if self.state != "straggler" or self._n_good >= LEAVE_WINDOWS:
            self.state, self.reason = "healthy", f"as fast as the {n_nodes} machines of the job"

    def _compared(self, signals: Mapping[str, float], thresholds: Thresholds) -> tuple[list[str], list[str]]:
        """The signals by which the machine is a straggler, and the signals below their threshold in this window."""
        entering, below = [], []
        for name, each in thresholds.items():
            value = signals.get(name)
            is_low = value is not None and value < _halfway(each)
            self._low[name] = (
                [*self._low.get(name, []), value][-ENTER_WINDOWS:] if is_low and value is not None else []
            )
            if len(self._low[name]) == ENTER_WINDOWS and mean(self._low[name]) < each["threshold"]:
                entering.append(name)
            if value is not None and value < each["threshold"]:
                below.append(name)
        return entering, below

    def _set_unknown(self, answer: Mapping[str, Any] | None) -> None:
        self._low, self._n_good, self.state = {}, 0, "unknown"
        if answer is None:
            self.reason = "the hub does not answer with thresholds"
        else:
            self.reason = (
                f"{answer.get('n_nodes', 0)} machines of the job report to the hub; "
                f"a comparison needs {answer.get('quorum', 0)}"
            )

    def _own_medians(self) -> dict[str, float]:
        names = {name for window in self._history for name in window}
        return {name: median(window[name] for window in self._history if name in window) for name in names}


def _score(signals: Mapping[str, float], medians: Mapping[str, float]) -> float | None:
    shares = [value / medians[name] for name, value in signals.items() if medians.get(name)]
    return min(1.0, *shares) if shares else None


def _is_near_median(signals: Mapping[str, float], thresholds: Thresholds) -> bool:
    return all(signals[name] >= _halfway(each) for name, each in thresholds.items() if name in signals)


def _halfway(limits: Mapping[str, float]) -> float:
    return (limits["threshold"] + limits["median"]) / 2


def _comparison(name: str, value: float, middle: float, n_nodes: int) -> str:
    unit = "" if SIGNALS[name].unit == "1" else f" {SIGNALS[name].unit}"
    return f"{name} {value:.3g}{unit}; the median of {n_nodes} machines is {middle:.3g}{unit}"
