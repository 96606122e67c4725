"""A request with a long prompt delays the tokens of other requests.

Found by diagnose/serving, so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence


def _because(evidence: CauseEvidence) -> str:
    return f"because it worked on a request with a long prompt: {evidence.work}" if evidence.work else ""


CAUSE = Cause(
    name="long_prompt",
    title="worked on a request with a long prompt",
    noun="long prompt of another request",
    categories=(),
    because=_because,
    advice=lambda _: [
        "Process prompts in chunks between the tokens of other requests (vLLM: --max-num-batched-tokens), "
        "or send long prompts to separate servers.",
    ],
)
