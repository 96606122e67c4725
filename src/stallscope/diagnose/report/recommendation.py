"""The recommended action on a verdict, for programs such as orchestrators.

Conservative: an action that ends work or removes a machine needs a cause that names the machine or the process, high
confidence and high severity. Every other verdict recommends only an inspection (`look`).
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stallscope.diagnose.report.verdict import Verdict

ACTIONS = ("none", "look", "restart_rank", "restart_job", "drain_node", "replace_gpu")
CONFIDENCE = 0.9
"""Confidence below which only an inspection is recommended."""

_OF_THE_GPU = frozenset({"gpu_fault", "device_error"})
_OF_THE_MACHINE = frozenset({"gpu_throttled", "gpu_slow"})
_OF_THE_PROCESS = frozenset({"process_stopped"})


@dataclass(frozen=True)
class Recommendation:
    """action: one of ACTIONS. ranks, nodes: the target; empty: the whole job. because: one clause."""

    action: str
    because: str
    ranks: list[int]
    nodes: list[str]
    confidence: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def recommendation(verdict: "Verdict") -> Recommendation:
    """The recommended action."""
    action, because = _action(verdict)
    of_job = action in ("none", "restart_job")
    return Recommendation(
        action=action,
        because=because,
        ranks=[] if of_job else list(verdict.ranks),
        nodes=[] if of_job else list(verdict.nodes),
        confidence=verdict.confidence,
    )


def _action(verdict: "Verdict") -> tuple[str, str]:
    cause = verdict.causes[0].cause.name if verdict.causes else ""
    if verdict.kind == "inconclusive":
        return "look", "the cause is not known"
    if verdict.confidence < CONFIDENCE:
        return "look", f"the confidence is below {CONFIDENCE:.0%}"
    if verdict.severity == "low" and verdict.kind not in ("hang", "failure"):
        return ("look", "the cost is not known") if verdict.cost is None else ("none", "the cost is small")
    if cause in _OF_THE_GPU:
        return "replace_gpu", "the GPU reported an error that a restart does not repair"
    if verdict.kind == "hang":
        if cause in _OF_THE_PROCESS:
            return "restart_rank", "the process is stopped"
        return "restart_job", "the job makes no progress"
    if cause in _OF_THE_MACHINE and verdict.severity in ("high", "critical") and len(verdict.nodes) == 1:
        return "drain_node", "a GPU of the machine is slower than its peers"
    return "look", "the cause is in the job or shared with other programs"
