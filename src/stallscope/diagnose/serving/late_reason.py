"""The reason for the delay of a late request, as a rule names it."""

from dataclasses import dataclass

from stallscope.diagnose.evidence_fields import CauseEvidence


@dataclass(frozen=True)
class Reason:
    """cause: of diagnose/causes. pid: the process that held the request; 0: none, as for a slow client."""

    cause: str
    pid: int
    evidence: CauseEvidence
