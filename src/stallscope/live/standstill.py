"""The verdict on a job that stood still before the trace began. Nothing of it is in the rounds, for there are none."""

import time
from pathlib import Path

from stallscope.diagnose import already_still
from stallscope.diagnose.thresholds import Thresholds
from stallscope.live.page import VerdictLine
from stallscope.store import node

_EVERY_S = 5.0


class Standstill:
    """Reads the trace now and then while it has no rounds; it is small then."""

    def __init__(self, db: Path, limits: Thresholds):
        self._db, self._limits = db, limits
        self._told: VerdictLine | None = None
        self._next_s = 0.0

    def verdict(self, *, has_rounds: bool) -> VerdictLine | None:
        """What there is to say, with the time at which it was first said; None where there is nothing. Raises
        StallscopeError.
        """
        if has_rounds:
            return None
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _EVERY_S
            trace = node.read(self._db)
            found = already_still.report(trace, limits=self._limits) if already_still.is_for(trace) else None
            first = self._told.time if self._told else time.strftime("%H:%M:%S", time.gmtime())
            self._told = VerdictLine(first, False, found.verdicts[0].summary) if found else None
        return self._told
