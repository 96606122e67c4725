"""The verdict on the rank whose process failed first."""

from dataclasses import replace

from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.evidence_fields import CauseEvidence, RankActivity, VerdictEvidence, merged
from stallscope.diagnose.processes import exit_reason
from stallscope.diagnose.processes.exits import ProcessEnd, arrived_ranks, first_failed, last_arrival_ns
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.events.names import HostKind
from stallscope.events.trace import Trace

_COVER_ENDS = ("failure", "hang")


def with_deaths(trace: Trace, report: Report) -> Report:
    """The report with a verdict on the rank whose process failed first, unless another verdict names that rank."""
    has_failed = (trace.host_events["kind"] == HostKind.EXIT) & (trace.host_events["value"] != 0)
    end = first_failed(trace) if has_failed.any() else None
    if end is None or any(end.rank in v.ranks for v in report.verdicts if v.kind in _COVER_ENDS):
        return report
    return replace(report, verdicts=[_verdict(trace, end), *report.verdicts])


def _verdict(trace: Trace, end: ProcessEnd) -> Verdict:
    activity = merged(
        RankActivity(end.rank, is_alive=False),
        exit_reason.end(trace.host_events, end.node, end.pid),
        exit_reason.failed_call(trace, end.node, end.pid, after_ns=last_arrival_ns(trace, end)),
    )
    verdict = Verdict(
        kind="failure",
        summary="",
        ranks=[end.rank],
        nodes=[node] if (node := trace.nodes[end.node]) else [],
        since_ns=end.at_ns if any(clock.node == end.node for clock in trace.clocks) else None,
        n_incidents=1,
        confidence=0.9,
        victims=sorted(set(arrived_ranks(trace).values()) - {end.rank}),
        advice=cause("missing_rank").advice(CauseEvidence(doing=[activity])),
        evidence=VerdictEvidence(
            pid=end.pid,
            exit_status=activity.exit_status,
            oom_killed=activity.oom_killed,
            ended_by=activity.ended_by,
            exit_requested_by=activity.exit_requested_by,
            failed_call=activity.failed_call,
            error=activity.error,
        ),
    )
    return replace(verdict, summary=text.summary(verdict))
