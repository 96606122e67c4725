"""The right answer for a simulated job, and the cost of the fault."""

from dataclasses import dataclass, replace

from stallscope.events.layout import Array
from stallscope.synth.fault_models import Answer


@dataclass(frozen=True)
class Truth:
    """The right diagnosis; no answers: a healthy job.

    n_incidents: by answer. lost_gpu_seconds: additional waiting time of all ranks but the culprits against the twin,
    the same job with the same scatter and no fault; -1 without a twin. slowdown_ns: delay of the job's
    end; -1 without a twin, and for a hang. clock_offset_ns, clock_drift: by node, against true time.
    has_gpu_times: the records hold the GPUs' own times. times_launches: the records hold the time in launches.
    """

    answers: tuple[Answer, ...]
    n_incidents: tuple[int, ...]
    lost_gpu_seconds: float
    slowdown_ns: int
    clock_offset_ns: Array
    clock_drift: Array
    has_gpu_times: bool = False
    times_launches: bool = False

    @property
    def knowable(self) -> tuple[Answer, ...]:
        """The answers that the records allow: only the GPUs' own times can show which rank's device is slow, and only
        launch timing that a host is busy with launches.
        """
        return tuple(map(self._knowable, self.answers))

    def _knowable(self, answer: Answer) -> Answer:
        if answer.is_on_device and not self.has_gpu_times:
            return replace(answer, kind="unknown_device", ranks=())
        if answer.is_in_launches and not self.times_launches:
            return replace(answer, cause="host_compute")
        return answer

    @property
    def kind(self) -> str:
        """The first answer's kind, `healthy` if there is none."""
        return self.answers[0].kind if self.answers else "healthy"

    @property
    def cause(self) -> str:
        """The first answer's cause, `none` if there is none."""
        return self.answers[0].cause if self.answers else "none"

    @property
    def culprits(self) -> tuple[int, ...]:
        """All culprits, in order."""
        return tuple(sorted({rank for answer in self.answers for rank in answer.ranks}))
