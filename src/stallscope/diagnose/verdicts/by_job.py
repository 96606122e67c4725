"""One report on several jobs."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.evidence_fields import JobSpan
from stallscope.diagnose.report.budget import combined
from stallscope.diagnose.report.evidence import joined
from stallscope.diagnose.report.verdict import Report, Verdict, wall_text
from stallscope.diagnose.timeline.job_separation import call_times
from stallscope.events.trace import Trace
from stallscope.events.verdict_fields import SEVERITIES

_COUNTS = (
    "n_ranks",
    "n_nodes",
    "n_communicators",
    "n_rounds",
    "n_steps",
    "n_lost_records",
    "n_ranks_unseen",
    "seconds",
)


def together(reports: list[Report]) -> Report:
    """One report on several jobs: the most severe verdicts of all jobs first."""
    if len(reports) == 1:
        return reports[0]
    examined: dict[str, float] = dict.fromkeys(_COUNTS, 0)
    for report in reports:
        for name in examined:
            more = report.examined.get(name, 0)
            examined[name] = max(examined[name], more) if name == "seconds" else examined[name] + more
    return Report(
        source=next((report.source for report in reports if report.source), ""),
        examined={"n_jobs": len(reports), **examined},
        verdicts=sorted((verdict for report in reports for verdict in report.verdicts), key=_order),
        benign=[remark for report in reports for remark in report.benign],
        evidence=joined([report.evidence for report in reports if report.evidence]),
        gaps=tuple(dict.fromkeys(gap for report in reports for gap in report.gaps)),
        budget=combined([report.budget for report in reports if report.budget]),
    )


def _order(verdict: Verdict) -> int:
    return -SEVERITIES.index(verdict.severity) if verdict.severity in SEVERITIES else 0


def numbered(reports: list[Report], traces: list[Trace]) -> Report:
    """One report on the jobs of a trace; each verdict states the number of its job."""
    joint = together(
        [
            replace(
                report,
                verdicts=[_of_job(verdict, part, number, len(traces)) for verdict in report.verdicts],
                benign=[remark | {"job": number} for remark in report.benign],
            )
            for number, (report, part) in enumerate(zip(reports, traces, strict=True), 1)
        ]
    )
    times = [at_ns for part in traces for at_ns in call_times(part)]
    counts: dict[str, object] = {
        "n_nodes": len({node for part in traces for node in np.unique(part.collectives["node"]).tolist()}),
        "n_lost_records": sum(traces[0].lost.values()),
    }
    if times:
        counts["seconds"] = round((max(times) - min(times)) / 1e9, 3)
    return replace(joint, examined=joint.examined | counts)


def number_of(verdict: Verdict) -> int | None:
    """The number of a verdict's job, None where the trace has only one job."""
    return verdict.evidence.job.number if verdict.evidence.job else None


def _of_job(verdict: Verdict, part: Trace, number: int, n_jobs: int) -> Verdict:
    times = call_times(part)
    span = (wall_text(min(times)), wall_text(max(times))) if times else ()
    return replace(verdict, evidence=replace(verdict.evidence, job=JobSpan(number, n_jobs, *span)))
