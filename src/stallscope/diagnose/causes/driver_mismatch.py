"""The driver, its services and the CUDA version of the program are incompatible."""

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence


def _advice(evidence: CauseEvidence) -> list[str]:
    return [
        "Install a driver new enough for the CUDA in the job's image, or its forward-compatibility package.",
        "Compare nvidia-smi and the image with a healthy host; with NVSwitch check nvidia-fabricmanager.",
    ]


CAUSE = Cause(
    name="driver_mismatch",
    title="has a driver that does not support its CUDA version",
    categories=(),
    advice=_advice,
)
