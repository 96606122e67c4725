"""The verdict on the rank whose process broke first."""

from dataclasses import replace

from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.processes import exit_reason
from stallscope.diagnose.processes.exits import ProcessEnd, arrived_ranks, first_failed, last_arrival_ns
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.events.names import HostKind
from stallscope.events.trace import Trace

_TELL_OF_ENDS = ("failure", "hang")


def with_deaths(trace: Trace, report: Report) -> Report:
    """The report with a verdict on the rank whose process broke first, unless another verdict tells of it."""
    broke = (trace.host_events["kind"] == HostKind.EXIT) & (trace.host_events["value"] != 0)
    found = first_failed(trace) if broke.any() else None
    if found is None or any(found.rank in one.ranks for one in report.verdicts if one.kind in _TELL_OF_ENDS):
        return report
    return replace(report, verdicts=[_verdict(trace, found), *report.verdicts])


def _verdict(trace: Trace, found: ProcessEnd) -> Verdict:
    told = exit_reason.end(trace.host_events, found.node, found.pid)
    told |= exit_reason.failed_call(trace, found.node, found.pid, after_ns=last_arrival_ns(trace, found))
    verdict = Verdict(
        kind="failure",
        summary="",
        ranks=[found.rank],
        nodes=[node] if (node := trace.nodes[found.node]) else [],
        since_ns=found.at_ns if any(clock.node == found.node for clock in trace.clocks) else None,
        n_incidents=1,
        confidence=0.9,
        victims=sorted(set(arrived_ranks(trace).values()) - {found.rank}),
        advice=cause("missing_rank").advice(
            told | {"is_alive": False, "is_out_of_memory": bool(told.get("oom_killed"))}
        ),
        evidence={"pid": found.pid, **told},
    )
    return replace(verdict, summary=text.summary(verdict))
