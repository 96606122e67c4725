"""The verdict on CUDA calls that failed."""

from dataclasses import replace

from stallscope.diagnose.causes import Explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.evidence_fields import CauseEvidence, LaterFailure, VerdictEvidence
from stallscope.diagnose.processes.cuda_errors import (
    CODES,
    OUT_OF_MEMORY,
    Failure,
    continues,
    failures,
    returned_ns,
)
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace

_MAX_LATER_FAILURES = 16


def with_failures(trace: Trace, report: Report) -> Report:
    """The report with a verdict on failed calls. It precedes the other verdicts, which may be consequences."""
    failed = failures(trace)
    ended = [failure for failure in failed if not continues(trace, failure)]
    retried = [failure for failure in failed if failure not in ended]
    benign = [*report.benign, *(_remark(failure) for failure in retried)]
    if not ended:
        return replace(report, benign=benign) if retried else report
    return replace(report, verdicts=[_verdict(trace, ended), *report.verdicts], benign=benign)


def _verdict(trace: Trace, ended: list[Failure]) -> Verdict:
    first, *later = ended
    name, words = CODES[int(first.row["result"])]
    function = trace.symbols[int(first.row["symbol"])] if first.row["symbol"] < len(trace.symbols) else ""
    is_refused = int(first.row["result"]) == OUT_OF_MEMORY and first.row["count_bytes"] != UNKNOWN
    evidence = VerdictEvidence(
        pid=first.pid,
        error=int(first.row["result"]),
        error_text=words,
        function=function,
        n_failed_calls=first.n,
        requested_bytes=int(first.row["count_bytes"]) if is_refused else None,
        also_failed_later=[_later(trace, first, failure) for failure in later[:_MAX_LATER_FAILURES]] or None,
    )
    verdict = Verdict(
        kind="failure",
        summary="",
        ranks=[first.rank] if first.rank != UNKNOWN else [],
        nodes=[node] if (node := trace.nodes[first.node]) else [],
        since_ns=wall_ns(trace, first.node, int(first.row["ts_ns"])),
        n_incidents=1,
        causes=[Explained(cause(name), 1.0, 0.0, CauseEvidence(error=words, function=function))],
        confidence=0.95 if not later else 0.85,
        victims=sorted({failure.rank for failure in later if failure.rank not in (UNKNOWN, first.rank)}),
        advice=cause(name).advice(CauseEvidence()),
        evidence=evidence,
    )
    return replace(verdict, summary=text.summary(verdict))


def _later(trace: Trace, first: Failure, failure: Failure) -> LaterFailure:
    after_ns = returned_ns(trace, failure) - returned_ns(trace, first)
    return LaterFailure(failure.rank, error=int(failure.row["result"]), after_ms=after_ns / 1e6)


def _remark(failure: Failure) -> dict[str, object]:
    subject = f"Rank {failure.rank}" if failure.rank != UNKNOWN else f"Process {failure.pid}"
    code = int(failure.row["result"])
    if code == OUT_OF_MEMORY:
        return {
            "what": f"{subject} got no GPU memory at first, retried and continued",
            "n_refusals": failure.n,
        }
    return {"what": f"{subject} continued after an error: {CODES[code][1]}", "n_errors": failure.n}
