"""Hangs, detected by the time without calls: a job is evaluated when its patience has passed without any call.

The hang must also have existed one second earlier. If the node of the missing ranks sends no more data, its agent may
have ended, so a verdict needs twice the patience.
"""

from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.hangs.hung_rounds import patience_ns
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.verdicts import hang
from stallscope.events.layout import UNKNOWN

_BETWEEN_CHECKS_NS = 1_000_000_000
_GROWN = 1.1  # an open hang is updated when it has lasted this many times as long
_LONGER = 2.0  # times the patience that a verdict on silent nodes needs


@dataclass
class Silence:
    """The schedule of evaluations of a job without calls. patience_ns: latest patience of the job."""

    patience_ns: float
    n_silent: int = 0
    reported_ns: int = 0

    def is_due(self, silent_ns: list[int], *, has_ended_process: bool, limits: Thresholds) -> bool:
        """Whether more processes are silent than at the last evaluation, or are silent for much longer.

        silent_ns: time without a call of each running process. has_ended_process: a process of the job has ended.
        """
        limit = min(self.patience_ns, limits.dead_after_ns) if has_ended_process else self.patience_ns
        n_silent = sum(ns >= limit + _BETWEEN_CHECKS_NS for ns in silent_ns)
        longest = max(silent_ns, default=0)
        if n_silent > self.n_silent or (n_silent and longest >= _GROWN * max(self.reported_ns, limit)):
            self.n_silent, self.reported_ns = n_silent, longest
            return True
        self.n_silent = min(self.n_silent, n_silent)
        if not n_silent:
            self.reported_ns = 0
        return False


def job_patience_ns(case: Case) -> float:
    """The time without calls after which a job may hang."""
    return patience_ns(case.timeline, case.arrival_ns, case.limits)


def hangs(case: Case) -> list[Verdict]:
    """The standstill at the end of a job's rows, if it has lasted for two evaluations."""
    now = hang.verdicts(case)
    if not now:
        return []
    earlier = tuple(end - _BETWEEN_CHECKS_NS if end != UNKNOWN else end for end in case.trace.ends_ns)
    known = case.trace.snapshots
    snapshots = known[known["ts_ns"] <= np.array(earlier)[known["node"]]]
    before = hang.verdicts(replace(case, trace=replace(case.trace, ends_ns=earlier, snapshots=snapshots)))
    if [verdict.ranks for verdict in before] != [verdict.ranks for verdict in now]:
        return []
    return [verdict for verdict in now if _is_confirmed(case, verdict)]


def _is_confirmed(case: Case, verdict: Verdict) -> bool:
    """Whether the missing ranks' nodes sent data while the others waited, or have been silent for long."""
    waited_ns = (verdict.evidence.waited_s or 0.0) * 1e9
    patience = job_patience_ns(case)
    nodes = {
        int(case.timeline.node[p]) for p, rank in enumerate(case.timeline.rank) if int(rank) in verdict.ranks
    }
    ends = [case.clocks.common_ns(node, case.trace.ends_ns[node]) for node in nodes]
    silent_ns = max((case.now_ns - end for end in ends), default=0)
    return silent_ns < waited_ns / 2 or waited_ns >= _LONGER * patience
