"""The last step of a report: evidence, gaps, budget and severity, for verdicts of any source."""

from collections.abc import Sequence
from dataclasses import replace

from stallscope.diagnose.report.budget import Budget, budget_of
from stallscope.diagnose.report.evidence import from_counts, gaps
from stallscope.diagnose.report.severity import severity
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.trace import Trace


def concluded(report: Report, trace: Trace, limits: Thresholds) -> Report:
    """The report with the answer's evidence; the gaps decide between healthy and inconclusive."""
    evidence = report.evidence or from_counts(report.examined, trace.coverage)
    whole = report.budget or budget_of(trace, limits)
    return replace(
        report,
        verdicts=graded(report.verdicts, report, limits),
        benign=report.benign + _shared_loss(whole),
        evidence=evidence,
        gaps=gaps(evidence, limits),
        budget=whole,
    )


def graded(verdicts: Sequence[Verdict], report: Report, limits: Thresholds) -> list[Verdict]:
    """The verdicts with their severity. report: has the ranks and the time that were examined."""
    gpu_seconds = int(report.examined["n_ranks"]) * float(report.examined.get("seconds", 0.0))
    return [replace(verdict, severity=severity(verdict, gpu_seconds, limits)) for verdict in verdicts]


def _shared_loss(whole: Budget) -> list[dict[str, object]]:
    """A remark where every rank spends much of its time in one avoidable category."""
    if whole.dominant is None or whole.n_processes == 1:
        return []
    share, label = whole.shares[whole.dominant], whole.label(whole.dominant)
    return [
        {
            "what": f"all {whole.n_processes} ranks spend {share:.0%} of the time in {label}: no rank is to blame, "
            "but this slows down every rank",
            "category": whole.dominant,
            "share": share,
        }
    ]
