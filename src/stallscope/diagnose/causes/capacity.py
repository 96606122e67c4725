"""More requests arrive than an inference server can answer: they wait in its queue.

Found by diagnose/serving, so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence


def _because(evidence: CauseEvidence) -> str:
    rate = evidence.calls_per_second
    return f"because requests arrive faster than it answers them: {rate:g} per second" if rate else ""


CAUSE = Cause(
    name="capacity",
    title="received more requests than it can answer",
    noun="load beyond capacity",
    categories=(),
    because=_because,
    advice=lambda _: ["No fault: add servers, allow larger batches, or limit the rate of requests."],
)
