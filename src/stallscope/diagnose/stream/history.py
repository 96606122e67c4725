"""The history of a job after its rows are dropped: sums of late steps, extent of the data, closed incidents."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from stallscope.diagnose.cost.delays import MAX_KEPT, Delays, total
from stallscope.diagnose.cost.step_growth import Baseline
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.stream.job_members import ProcessKey

MIN_QUIET_STEPS = 20
_QUIET_GAPS = 4
_FAR_GAPS = 8
_MAX_CLOSED = 64


@dataclass
class Track:
    """Delays of one process, whose rows have been dropped.

    over: of closed incidents; over_ns: end of the last closed incident, on the process's clock. since: delays after it.
    once: long delays that had happened once when their rows were dropped.
    """

    over: Delays | None = None
    since: Delays | None = None
    once: list[Delays] = field(default_factory=list)
    over_ns: int = -(1 << 62)

    @property
    def all(self) -> list[Delays]:
        """The delays of closed and current incidents."""
        return [part for part in (self.over, self.since) if part is not None]

    def recurred(self, once: set[int]) -> list[Delays]:
        """Long delays that have recurred since. once: the steps of delays that have not recurred."""
        return [part for part in self.once if part.late[0].step not in once]

    def add(self, delays: Delays, *, is_over: bool) -> None:
        """Take delays whose rows are about to be dropped."""
        if is_over:
            self.over = total([*([self.over] if self.over else []), delays])
            return
        if self.since is not None and is_far(int(self.since.late[-1].step), delays.steps):
            self.end()
        self.since = total([*([self.since] if self.since else []), delays])

    def end(self) -> None:
        """Count all delays to closed incidents."""
        if self.since is not None:
            self.over, self.since = total(self.all), None


@dataclass
class Tracks:
    """The tracks of a job's processes; a process that was never late has no track."""

    of: dict[ProcessKey, Track] = field(default_factory=dict)

    def track(self, process_key: ProcessKey) -> Track:
        """The track of a process, created where it is missing."""
        return self.of.setdefault(process_key, Track())

    def late(self, number: Mapping[ProcessKey, int]) -> list[LateStep]:
        """The latest late steps of all processes.

        number: processes of a case. Processes that are not in the case get the numbers after them.
        """
        beyond = len(number)
        late_steps = []
        for process_key, track in self.of.items():
            process = number.get(process_key, -1)
            kept = [*track.all, *track.once]
            if process < 0 and kept:
                process, beyond = beyond, beyond + 1
            late_steps += [_of(late_step, process) for part in kept for late_step in part.late]
        late_steps.sort(key=lambda late_step: late_step.step)
        return late_steps[-MAX_KEPT:]


@dataclass
class History:
    """The history of a job.

    settled_ns: by process, the time on its clock up to which late steps are in the tracks. first_step, first_seq:
    first step, and first round by communicator. gone_ns: observed time before the remaining rows.
    baseline: quiet steps before them.
    """

    late: Tracks = field(default_factory=Tracks)
    device: Tracks = field(default_factory=Tracks)
    settled_ns: dict[ProcessKey, int] = field(default_factory=dict)
    is_trimmed: bool = False
    first_step: int = 0
    next_step: int = 0
    first_seq: dict[int, int] = field(default_factory=dict)
    gone_ns: float = 0.0
    over: list[Verdict] = field(default_factory=list)
    baseline: Baseline | None = None

    def is_settled(self, process_key: ProcessKey, ts_ns: int) -> bool:
        """Whether late steps of a process at a moment of its clock are in the tracks."""
        return ts_ns <= self.settled_ns.get(process_key, -(1 << 62))

    def add_over(self, verdict: Verdict) -> None:
        """Keep the verdict of a closed incident."""
        self.over = [*self.over, verdict][-_MAX_CLOSED:]


def quiet_steps(steps: np.ndarray) -> int:
    """The number of steps on time after which the incident of a rank with these late steps closes.

    Several times the typical distance of its delays, so that a continuing incident seldom closes by chance; at least
    about as many as a rank needs to be named.
    """
    gaps = np.diff(np.unique(steps))
    return max(MIN_QUIET_STEPS, _QUIET_GAPS * round(float(np.median(gaps)))) if len(gaps) else MIN_QUIET_STEPS


def is_far(before: int, steps: np.ndarray) -> bool:
    """Whether late steps are far enough from an earlier late step to belong to another incident."""
    gaps = np.diff(np.unique(steps))
    if not len(gaps):
        return False
    return int(steps[0]) - before > max(MIN_QUIET_STEPS, _FAR_GAPS * float(np.median(gaps)))


def _of(late_step: LateStep, process: int) -> LateStep:
    return replace(late_step, process=process, first_row=-1, peak_row=-1)
