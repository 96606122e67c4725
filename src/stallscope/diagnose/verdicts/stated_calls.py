"""Adds the operation, the group, stacks and lines of code that the source states to a measured verdict."""

from collections import Counter
from dataclasses import replace

import numpy as np

from stallscope.diagnose.evidence_fields import RankActivity
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline import user_frame
from stallscope.events.call_labels import CALL_LABEL, CallWords, call_words, group_fact
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace


def with_words(trace: Trace, verdict: Verdict) -> Verdict:
    """A hang with its operation, its group and lines of code, where the source states them."""
    if verdict.kind not in ("hang", "inconclusive", "mismatch") or verdict.comm_hash is None:
        return verdict
    evidence = verdict.evidence
    waiting = verdict.victims or evidence.suspects or []
    calls = _calls(trace)
    common = Counter(calls[rank][0] for rank in waiting if rank in calls).most_common(1)
    words = common[0][0] if common else CallWords("", "", "")
    evidence = replace(
        evidence,
        group=trace.facts.get(group_fact(int(verdict.comm_hash, 16))) or evidence.group,
        operation=words.operation or evidence.operation,
        line=words.line or evidence.line,
        doing=[_with_stack(trace, activity, calls) for activity in evidence.doing or []] or None,
    )
    changed = replace(verdict, evidence=evidence)
    return replace(changed, summary=text.summary(changed)) if evidence != verdict.evidence else verdict


def _calls(trace: Trace) -> dict[int, list[CallWords]]:
    """The calls that the source names, by rank and time."""
    ranks = trace.launcher_ranks()
    calls: dict[int, list[CallWords]] = {}
    rows = trace.annotations[trace.annotations["label"] == CALL_LABEL]
    for row in np.sort(rows, order="ts_ns", kind="stable"):
        rank = ranks.get((int(row["node"]), int(row["pid"])), UNKNOWN)
        calls.setdefault(rank, []).append(call_words(bytes(row["value"])))
    return calls


def _with_stack(trace: Trace, activity: RankActivity, calls: dict[int, list[CallWords]]) -> RankActivity:
    """The state of a missing rank, with its last call and its stack where they are known."""
    rank = activity.rank
    if rank in calls and activity.last_call is None:
        last = calls[rank][-1]
        activity = replace(
            activity, last_call=" at ".join(word for word in (last.operation, last.line) if word)
        )
    if activity.stack is not None or not len(trace.positions):
        return activity
    processes = [key for key, value in trace.launcher_ranks().items() if value == rank]
    frames = _newest_stack(trace, processes[0]) if processes else ()
    if not frames:
        return activity
    return replace(activity, at=user_frame.in_own_code(frames), stack=list(frames))


def _newest_stack(trace: Trace, process: tuple[int, int]) -> tuple[str, ...]:
    rows = trace.positions
    rows = rows[(rows["node"] == process[0]) & (rows["pid"] == process[1])]
    return trace.stacks.get(int(rows["stack"][np.argmax(rows["ts_ns"])]), ()) if len(rows) else ()
