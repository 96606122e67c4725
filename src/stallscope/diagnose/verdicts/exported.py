"""The report of an exported timeline or of exported incident spans: their verdicts, without a new diagnosis."""

from stallscope.diagnose.causes import Explained, all_causes
from stallscope.diagnose.report.verdict import Report, Verdict, VerdictCost
from stallscope.diagnose.verdicts.stated import empty_report
from stallscope.events.exported_verdicts import EXPORTED, ExportedVerdict, exported
from stallscope.events.trace import Gap, Trace


def is_for(trace: Trace) -> bool:
    """Whether a trace contains the verdicts of an export."""
    return EXPORTED in trace.facts


def report(trace: Trace) -> Report:
    """The exported report. It is healthy only if the export states that the job is healthy."""
    stated = exported(trace.facts[EXPORTED])
    verdicts = [_verdict(each) for each in stated if each.kind != "healthy"]
    whole = empty_report(trace)
    is_healthy = any(each.kind == "healthy" for each in stated)
    gap = Gap("the export contains no answer", "Explain the node trace itself.")
    return Report(whole.source, whole.examined, verdicts, gaps=() if verdicts or is_healthy else (gap,))


def _verdict(stated: ExportedVerdict) -> Verdict:
    known = {cause.name: cause for cause in all_causes()}
    cost = stated.gpu_seconds
    return Verdict(
        kind=stated.kind,
        summary=stated.summary,
        ranks=stated.ranks,
        n_incidents=1,
        causes=[Explained(known[name], share, 0.0) for name, share in stated.causes if name in known],
        confidence=stated.confidence,
        cost=None if cost is None else VerdictCost(cost, None, None, is_lower_bound=False),
        abstained_because=stated.summary if stated.kind == "inconclusive" else None,
    )
