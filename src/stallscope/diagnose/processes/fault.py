"""A fault of one process, and the case that its rules examine."""

from dataclasses import dataclass, field

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes.activity import Z_80, Activity
from stallscope.diagnose.processes.buckets import Bucket
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.trace import Trace


@dataclass(frozen=True)
class Fault:
    """cause: its name. title: completes "because it ...". share: of the wall clock. line: of the user's code.

    occupies_gpu: the GPU's driver counts its work for the fault as busy time, so that time can be saved as well.
    """

    cause: str
    title: str
    share: float
    line: str
    advice: list[str]
    evidence: CauseEvidence = field(default_factory=CauseEvidence)
    is_of_gpu: bool = False
    occupies_gpu: bool = False

    def lost(self, activity: Activity) -> float:
        """The largest share of the wall clock that the process could save."""
        busy = activity.gpu_busy_at_least if self._ignores_driver(activity) else activity.gpu_busy or 0.0
        return self.share if self.is_of_gpu else min(self.share, 1 - busy)

    def lost_at_least(self, activity: Activity, error: float) -> float:
        """The lower end of the interval of lost(). error: the standard error of the share.

        Work of the host that overlaps with work of the GPU costs nothing. So a GPU that may be busy all the time leaves
        nothing to save.
        """
        busy = (
            activity.gpu_busy_at_least if self._ignores_driver(activity) else activity.gpu_busy_at_most or 0.0
        )
        share = max(self.share - Z_80 * error, 0.0)
        return share if self.is_of_gpu else min(share, 1 - busy)

    def _ignores_driver(self, activity: Activity) -> bool:
        return self.occupies_gpu or activity.gpu_busy is None

    def gain(self, activity: Activity) -> float:
        """The largest speedup of the process if the fault were removed."""
        return 1 / max(1 - self.lost(activity), 0.02)


@dataclass(frozen=True)
class Case:
    trace: Trace
    activity: Activity
    buckets: dict[str, Bucket]
    limits: Thresholds

    def bucket(self, name: str) -> Bucket:
        return self.buckets.get(name, Bucket())


def sampled(bucket: Bucket) -> CauseEvidence:
    """The evidence of a bucket: its number of samples, and its parts."""
    parts = [
        f"{name.replace('_', ' ')} {round(share, 3):.0%}"
        for name, share in bucket.parts.largest(4)
        if share >= 0.01
    ]
    return CauseEvidence(n_samples=bucket.n_samples, parts=parts if len(parts) > 1 else None)
