"""A fault of one process, and the case that its rules examine."""

from dataclasses import dataclass, field

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes.activity import Activity
from stallscope.diagnose.processes.buckets import Bucket
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.trace import Trace


@dataclass(frozen=True)
class Fault:
    """cause: its name. title: completes "because it ...". share: of the wall clock. line: of the user's code."""

    cause: str
    title: str
    share: float
    line: str
    advice: list[str]
    evidence: CauseEvidence = field(default_factory=CauseEvidence)
    is_of_gpu: bool = False

    def lost(self, activity: Activity) -> float:
        """The largest share of the wall clock that the process could save."""
        busy = activity.gpu_busy
        return self.share if self.is_of_gpu or busy is None else min(self.share, 1 - busy)

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
