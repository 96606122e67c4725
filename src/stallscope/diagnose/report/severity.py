"""The severity of a verdict: critical, high, medium or low, from its cost, its confidence and its share of the job.

For late requests to an inference engine, the shares of the requests and of the clients that are hit count.
"""

from stallscope.diagnose.evidence_fields import VerdictEvidence
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.thresholds import Thresholds

LEVELS = ("low", "medium", "high", "critical")
_STANDSTILL = ("hang", "failure")


def severity(verdict: Verdict, gpu_seconds: float, limits: Thresholds) -> str:
    """The severity of a verdict on a job that was examined for gpu_seconds (ranks x time). Thresholds: limits."""
    share = _share(verdict, gpu_seconds)
    edges = (limits.medium_share, limits.high_share, limits.critical_share)
    level = sum(share >= edge for edge in edges)
    if verdict.confidence < limits.firm_confidence:
        level = max(level - 1, 0)
    return LEVELS[level]


def _share_hit(evidence: VerdictEvidence) -> float:
    """The share of the requests that are late; with the share of the clients hit, the mean of both shares."""
    of_requests = (evidence.n_late_requests or 0) / max(evidence.n_requests or 1, 1)
    if not evidence.n_clients:
        return of_requests
    return (of_requests + (evidence.n_late_clients or 0) / evidence.n_clients) / 2


def _share(verdict: Verdict, gpu_seconds: float) -> float:
    """Share of the job's GPU time that the fault costs: all of it from the onset of a standstill."""
    if verdict.kind in _STANDSTILL or verdict.evidence.waited_s is not None:
        return 1.0
    if verdict.kind == "latency":
        return _share_hit(verdict.evidence)
    if verdict.cost is None or gpu_seconds <= 0:
        return 0.0
    return (verdict.cost.gpu_seconds + verdict.cost.may_be_gpu_seconds) / 2 / gpu_seconds
