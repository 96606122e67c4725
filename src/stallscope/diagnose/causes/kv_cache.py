"""An inference engine has no space left in its KV cache: requests wait, or lose their space and begin again.

Found by diagnose/serving, so it claims no category of a rank's excess.
"""

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence


def _because(evidence: CauseEvidence) -> str:
    return f"because {evidence.work}" if evidence.work else ""


CAUSE = Cause(
    name="kv_cache",
    title="had no space left in its KV cache",
    noun="full KV cache",
    categories=(),
    because=_because,
    advice=lambda _: [
        "Enlarge the KV cache (vLLM: --gpu-memory-utilization, --kv-cache-dtype fp8), limit the length of requests "
        "(--max-model-len) or the batch (--max-num-seqs), or add servers.",
    ],
)
