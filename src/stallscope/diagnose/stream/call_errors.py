"""Failed CUDA calls of a stream: when to evaluate all calls, and which calls to evaluate later.

An error that ends a context is reported at once. A refused allocation, or another error that a library may handle, is
not a failure while the process may still continue: it is judged when the process has ended or has made no call for a
while.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.processes.cuda_errors import ENDS_CONTEXT, MAY_BE_HANDLED, NO_CALLS_AFTER_NS, failed
from stallscope.diagnose.stream.job_members import ProcessKey
from stallscope.events.layout import Array

_PATIENCE_NS = 2 * NO_CALLS_AFTER_NS


@dataclass
class FailedCalls:
    """Failed calls of a job. Times are on the clocks of the processes' nodes.

    ended_context: a call that was not judged yet ended its context. refused: time of the last other error, by process
    that may continue; reported: the same of processes whose failure was reported.
    """

    ended_context: bool = False
    refused: dict[ProcessKey, int] = field(default_factory=dict)
    reported: dict[ProcessKey, int] = field(default_factory=dict)

    def note(self, calls: Array) -> None:
        """Take arriving calls."""
        for node, pid, ts_ns, result in failed(calls)[["node", "pid", "ts_ns", "result"]].tolist():
            if result in ENDS_CONTEXT:
                self.ended_context = True
            else:
                self.refused[node, pid] = max(ts_ns, self.refused.get((node, pid), ts_ns))

    def absorb(self, other: "FailedCalls") -> None:
        """Take over the failed calls of a job that has turned out to be part of this job."""
        self.ended_context |= other.ended_context
        self.refused.update(other.refused)
        self.reported.update(other.reported)

    def is_due(
        self, now_ns: Callable[[int], int], ended: Iterable[ProcessKey], *, is_last: bool = False
    ) -> bool:
        """Whether failed calls must be judged now. Their processes then count as judged.

        now_ns: time of a node's latest event. ended: processes that have ended. is_last: the stream has ended.
        """
        gone = set(ended)
        over = {
            process: ts_ns
            for process, ts_ns in self.refused.items()
            if is_last or process in gone or now_ns(process[0]) - ts_ns >= _PATIENCE_NS
        }
        is_due = self.ended_context or bool(over)
        self.ended_context = False
        self.reported |= over
        for process in over:
            del self.refused[process]
        return is_due

    def judged(self, calls: Array) -> Array:
        """The calls without the refused calls of processes that may continue."""
        waits = np.zeros(len(calls), bool)
        for node, pid in self.refused:
            waits |= (
                (calls["node"] == node) & (calls["pid"] == pid) & np.isin(calls["result"], [*MAY_BE_HANDLED])
            )
        return calls[~waits] if waits.any() else calls

    def has_continued(self, last_ns: Mapping[ProcessKey, int]) -> bool:
        """Whether a process makes calls after its failure was reported. last_ns: the last arrival of each process."""
        again = {
            process
            for process, ts_ns in self.reported.items()
            if last_ns.get(process, 0) > ts_ns + NO_CALLS_AFTER_NS
        }
        for process in again:
            del self.reported[process]
        return bool(again)
