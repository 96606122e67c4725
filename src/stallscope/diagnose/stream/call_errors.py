"""Failing CUDA calls of a stream: when they are worth a look at all calls, and which of them must wait.

An error that ends a context is told at once. Memory that was refused is no failure while the process may still get
it by trying again: it is judged when the process has ended or made no sound for a while.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.processes.cuda_errors import NO_CALLS_AFTER_NS, OUT_OF_MEMORY, failed
from stallscope.diagnose.stream.job_members import Who
from stallscope.events.layout import Array

_PATIENCE_NS = 2 * NO_CALLS_AFTER_NS


@dataclass
class Failing:
    """broke: some call ended its context, and was not judged. refused: when memory was refused last, of processes
    that may go on; told: of those that were judged. Times are of the processes' nodes.
    """

    broke: bool = False
    refused: dict[Who, int] = field(default_factory=dict)
    told: dict[Who, int] = field(default_factory=dict)

    def note(self, calls: Array) -> None:
        """Take arriving calls."""
        for node, pid, ts_ns, result in failed(calls)[["node", "pid", "ts_ns", "result"]].tolist():
            if result == OUT_OF_MEMORY:
                self.refused[node, pid] = max(ts_ns, self.refused.get((node, pid), ts_ns))
            else:
                self.broke = True

    def absorb(self, other: "Failing") -> None:
        """Take over those of a job that has turned out to be part of this one."""
        self.broke |= other.broke
        self.refused.update(other.refused)
        self.told.update(other.told)

    def is_due(self, now_ns: Callable[[int], int], ended: Iterable[Who], *, is_last: bool = False) -> bool:
        """Whether something is to be judged now; those judged then do not wait any more.

        now_ns: by node, how far it was heard. ended: processes that have ended. is_last: nothing more will come.
        """
        gone = set(ended)
        over = {
            who: ts_ns
            for who, ts_ns in self.refused.items()
            if is_last or who in gone or now_ns(who[0]) - ts_ns >= _PATIENCE_NS
        }
        is_due = self.broke or bool(over)
        self.broke = False
        self.told |= over
        for who in over:
            del self.refused[who]
        return is_due

    def judged(self, calls: Array) -> Array:
        """The calls without refusals of processes that may go on."""
        waits = np.zeros(len(calls), bool)
        for node, pid in self.refused:
            waits |= (calls["node"] == node) & (calls["pid"] == pid) & (calls["result"] == OUT_OF_MEMORY)
        return calls[~waits] if waits.any() else calls

    def went_on(self, last_ns: Mapping[Who, int]) -> bool:
        """Whether a process whose end was told makes calls again. last_ns: the last arrival of each."""
        again = {who for who, ts_ns in self.told.items() if last_ns.get(who, 0) > ts_ns + NO_CALLS_AFTER_NS}
        for who in again:
            del self.told[who]
        return bool(again)
