"""The verdict on a job that hung before the trace began. Such a trace has no rounds to diagnose."""

import time
from pathlib import Path

from stallscope.diagnose import Change, Thresholds, Verdict, standstill
from stallscope.store import node

_EVERY_S = 5.0
_INCIDENT = "still-before-the-trace"


class Standstill:
    """Rereads the trace periodically while it has no rounds; it is small until then."""

    def __init__(self, db: Path, limits: Thresholds):
        self._db, self._limits = db, limits
        self._verdict: Verdict | None = None
        self._since_ns = 0
        self._next_s = 0.0
        self._opened: Verdict | None = None

    def changes(self, *, has_rounds: bool) -> list[Change]:
        """The standstill as an incident: opened when first reported, closed when the job continues.

        Raises StallscopeError.
        """
        verdict, opened = self._current(has_rounds=has_rounds), self._opened
        self._opened = verdict and (opened or verdict)
        if verdict and not opened:
            return [Change("opened", _INCIDENT, verdict, self._since_ns)]
        if opened and not verdict:
            return [Change("closed", _INCIDENT, opened, time.time_ns(), "the job continues")]
        return []

    def _current(self, *, has_rounds: bool) -> Verdict | None:
        if has_rounds:
            return None
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVERY_S
            trace = node.read(self._db)
            report = standstill(trace, self._limits)
            if report and not self._verdict:
                self._since_ns = time.time_ns()
            self._verdict = report.verdicts[0] if report else None
        return self._verdict
