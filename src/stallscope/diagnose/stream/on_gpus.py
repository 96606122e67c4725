"""Candidate verdicts from the rounds on the GPUs, where NCCL's profiler plugin recorded them.

The plugin records windows. Without enough rounds in the remaining rows, nothing contradicts an open incident: it stays.
"""

from collections.abc import Sequence

from stallscope.diagnose import engine
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.stream import candidates
from stallscope.diagnose.stream.evaluation import Evaluation
from stallscope.diagnose.stream.history import MIN_QUIET_STEPS
from stallscope.diagnose.stream.incidents import UNCERTAIN, Candidate, Incidents, worded
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.verdicts import gpu_arrival
from stallscope.events.trace import Trace

GPU = "gpu"
_REPLACED = (candidates.SLOW, UNCERTAIN)
"""Sorts of verdicts that name no rank because hosts do not show the GPUs."""


def with_gpu_arrivals(
    trace: Trace, shown: Sequence[Candidate], incidents: Incidents, result: Evaluation
) -> list[Candidate]:
    """The candidates of the hosts and of the GPUs. A rank named by its GPU replaces a slowdown without a rank."""
    known = [incident.candidate for incident in incidents.open if incident.candidate.sort == GPU]
    if not len(trace.gpu_kernels) and not known:
        return list(shown)
    case = gpu_arrival.gpu_case(trace, result.case.limits, result.case.usd_per_gpu_hour)
    if case is None:
        new = known
    else:
        on_gpus = engine.gpu_report(case).verdicts
        by_gpu = gpu_arrival.held_by_gpu(trace, on_gpus)
        shown = [each for each in shown if gpu_arrival.is_of_host(trace, case, each.verdict, by_gpu)]
        new = _candidates(trace, case, shown, on_gpus)
    is_replaced = any(candidate.processes for candidate in new)
    kept = [each for each in shown if not (is_replaced and each.sort in _REPLACED)]
    return [*kept, *new]


def _candidates(
    trace: Trace, case: Case, shown: Sequence[Candidate], on_gpus: Sequence[Verdict]
) -> list[Candidate]:
    named = {rank for candidate in shown for rank in candidate.verdict.ranks}
    process_of = {int(rank): case.process_key(p) for p, rank in enumerate(case.timeline.rank.tolist())}

    def candidate(verdict: Verdict) -> Candidate:
        processes = frozenset(process_of[rank] for rank in verdict.ranks if rank in process_of)
        return Candidate(GPU, processes, worded(verdict), -1, MIN_QUIET_STEPS)

    return [candidate(verdict) for verdict in gpu_arrival.verdicts(trace, case, on_gpus, named)]
