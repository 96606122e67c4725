"""The state of a machine among its cohort, with hysteresis: a single slow or fast window changes nothing."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from stallscope.health.signals import SIGNALS

STATES = ("unknown", "healthy", "suspect", "straggler")

ENTER_WINDOWS = 2
"""A machine is a straggler after this many windows below the threshold of one signal."""

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
    _below: dict[str, int] = field(default_factory=dict)
    _n_good: int = 0
    _latest: Mapping[str, Any] | None = None
    _n_unanswered: int = 0
    _history: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=_HISTORY_WINDOWS))

    def update(self, signals: Mapping[str, float], answer: Mapping[str, Any] | None) -> None:
        """Judge a window. answer: of the hub; None if it did not answer: its last answer counts for three windows."""
        self._n_unanswered = 0 if answer is not None else self._n_unanswered + 1
        if answer is not None:
            self._latest = answer
        elif self._n_unanswered <= _UNANSWERED_WINDOWS:
            answer = self._latest
        thresholds: Thresholds = (answer or {}).get("signals") or {}
        medians = {name: each["median"] for name, each in thresholds.items()} or self._own_medians()
        self._history.append(signals)
        self.score = _score(signals, medians)
        if not thresholds:
            self._set_unknown(answer)
            return
        for name in SIGNALS:
            is_below = name in thresholds and signals.get(name, 0.0) < thresholds[name]["threshold"]
            self._below[name] = self._below.get(name, 0) + 1 if is_below and name in signals else 0
        n_nodes = int((answer or {}).get("n_nodes") or 0)
        worst = max(SIGNALS, key=lambda name: self._below[name])
        if self._below[worst]:
            self._n_good = 0
            is_long = self._below[worst] >= ENTER_WINDOWS or self.state == "straggler"
            self.state = "straggler" if is_long else "suspect"
            self.reason = _comparison(worst, signals[worst], thresholds[worst]["median"], n_nodes)
            return
        self._n_good = self._n_good + 1 if _is_near_median(signals, thresholds) else 0
        if self.state != "straggler" or self._n_good >= LEAVE_WINDOWS:
            self.state, self.reason = "healthy", f"as fast as the {n_nodes} machines of the job"

    def _set_unknown(self, answer: Mapping[str, Any] | None) -> None:
        self._below, self._n_good, self.state = {}, 0, "unknown"
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
    return all(
        signals[name] >= (each["threshold"] + each["median"]) / 2
        for name, each in thresholds.items()
        if name in signals
    )


def _comparison(name: str, value: float, middle: float, n_nodes: int) -> str:
    unit = "" if SIGNALS[name].unit == "1" else f" {SIGNALS[name].unit}"
    return f"{name} {value:.3g}{unit}; the median of {n_nodes} machines is {middle:.3g}{unit}"
