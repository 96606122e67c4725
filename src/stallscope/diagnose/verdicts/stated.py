"""Verdicts on statements of logs and stack dumps: the first failure, and ranks with a different stack.

This module also adds the operation, the group and the lines of code to measured verdicts, such as hangs by counters.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.evidence_fields import LaterFailure, RankActivity, StackLocation, VerdictEvidence
from stallscope.diagnose.hangs.stack_locations import OddRanks, odd_ranks
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.timeline import user_frame
from stallscope.events.call_labels import CALL_LABEL, CallWords, call_words, group_fact
from stallscope.events.failure_labels import FAILURE_LABELS, STATED, failure_words
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+")
_AT_ONCE_NS = 1_000_000_000
_MOST = 16
_WALL_NS = 10**17  # smaller times are the order of lines


@dataclass(frozen=True)
class _Failure:
    """The failure of a rank, from all lines about it. rank: UNKNOWN where no line names it."""

    rank: int
    ts_ns: int
    words: str
    status: int
    pid: int
    host: str
    node: int
    stack: tuple[str, ...]
    is_machine: bool = False


def is_stated(trace: Trace) -> bool:
    """Whether a trace holds statements of logs and stack dumps."""
    return STATED in trace.facts


def is_for(trace: Trace) -> bool:
    """Whether a trace holds statements without any collective."""
    return is_stated(trace) and not len(trace.collectives)


def empty_report(trace: Trace) -> Report:
    """The report on such a trace before its statements are added."""
    counts = dict.fromkeys(("n_communicators", "n_rounds", "n_steps", "n_lost_records"), 0)
    return Report(
        source=trace.source,
        examined={"n_ranks": len(trace.processes), "n_nodes": len(trace.nodes), **counts, "seconds": 0.0},
        verdicts=[],
    )


def with_statements(trace: Trace, report: Report) -> Report:
    """The report with verdicts on failures and stacks, and with the words of calls and groups."""
    verdicts = [
        _with_words(trace, _doubted(verdict) if is_stated(trace) else verdict) for verdict in report.verdicts
    ]
    failure = _failure_verdict(trace)
    if failure is not None:
        verdicts = [failure, *(v for v in verdicts if not (failure.ranks and v.ranks == failure.ranks))]
    if (
        STATED in trace.facts
        and len(trace.positions)
        and not any(v.kind in ("hang", "failure") for v in verdicts)
    ):
        odd = odd_ranks(trace)
        stacks = _stack_verdict(trace, odd) if odd else None
        verdicts += [stacks] if stacks else []
    if not any(verdict.kind in ("hang", "failure", "straggler") for verdict in verdicts):
        verdicts += _slow_verdicts(trace)
    if is_stated(trace) and not verdicts:
        verdicts = [_undecided(trace)]
    verdicts = [replace(v, summary=text.summary(v)) if v.summary == "" else v for v in verdicts]
    return replace(report, verdicts=verdicts, benign=[*report.benign, *_remarks(trace)])


def _slow_verdicts(trace: Trace) -> list[Verdict]:
    """A verdict for each rank that timers or metrics call slow; inconclusive where they name no rank."""
    ranks = trace.launcher_ranks()
    by_rank: dict[int, list[str]] = {}
    for row in trace.annotations[trace.annotations["label"] == FAILURE_LABELS["slow"]]:
        rank = ranks.get((int(row["node"]), int(row["pid"])), UNKNOWN)
        words = by_rank.setdefault(rank, [])
        stated = failure_words(bytes(row["value"])).words
        words += [stated] if stated not in words else []
    known = {rank for rank in ranks.values() if rank != UNKNOWN}
    verdicts = [
        Verdict(
            kind="straggler",
            summary="",
            ranks=[rank],
            n_incidents=1,
            confidence=0.6,
            victims=sorted(known - set(by_rank)),
            advice=[
                "Trace that rank live (stallscope trace), or profile it next to a rank that is not slow."
            ],
            evidence=VerdictEvidence(stated="; ".join(words[:4]), statements=words[:_MOST]),
        )
        for rank, words in sorted(by_rank.items())
        if rank != UNKNOWN
    ]
    if not verdicts and by_rank:
        because = "; ".join(by_rank[UNKNOWN][:4])
        return [Verdict(kind="inconclusive", summary="", confidence=0.4, abstained_because=because)]
    return verdicts


def _undecided(trace: Trace) -> Verdict:
    """The verdict where no statement decides: statements alone never show a healthy job."""
    gap = next(iter(trace.coverage.gaps), None)
    return Verdict(
        kind="inconclusive",
        summary="",
        confidence=0.3,
        abstained_because=gap.reason if gap else "logs and stack dumps do not show whether a job runs well",
        advice=[gap.action] if gap else [],
    )


def _doubted(verdict: Verdict) -> Verdict:
    """A hang as inconclusive, if its suspects are several ranks without a line: a truncated log looks the same."""
    doing = verdict.evidence.doing or []
    is_silent = all(activity.has == "no_dump" for activity in doing)
    if verdict.kind != "hang" or not doing or not is_silent or len(verdict.ranks) < 2:
        return verdict
    suspects = f"ranks {', '.join(map(str, verdict.ranks[:_MOST]))}"
    doubted = replace(
        verdict,
        kind="inconclusive",
        ranks=[],
        nodes=[],
        causes=[],
        confidence=0.4,
        abstained_because=f"the others wait for some of {suspects}, and nothing is known of any of these ranks",
        evidence=replace(verdict.evidence, doing=None, suspects=verdict.ranks),
    )
    return replace(doubted, summary=text.summary(doubted))


def _remarks(trace: Trace) -> list[dict[str, object]]:
    """Statements that do not end a rank: a transport that fell back, warnings of NCCL."""
    ranks = trace.launcher_ranks()
    rows = trace.annotations[trace.annotations["label"] == FAILURE_LABELS["remark"]]
    by_words: dict[str, list[int]] = {}
    for row in rows:
        words = failure_words(bytes(row["value"])).words
        by_words.setdefault(words, []).append(ranks.get((int(row["node"]), int(row["pid"])), UNKNOWN))
    remarks: list[dict[str, object]] = []
    for words, ranks_stated in list(by_words.items())[:_MOST]:
        known = sorted({rank for rank in ranks_stated if rank != UNKNOWN})
        subject = f"rank{'s' * (len(known) > 1)} {', '.join(map(str, known[:_MOST]))}: " if known else ""
        remarks.append({"what": f"{subject}{words}"})
    return remarks


def _failure_verdict(trace: Trace) -> Verdict | None:
    failures = _failures(trace)
    if not failures:
        return None
    first = failures[0]
    ranks = sorted({failure.rank for failure in failures if failure.rank != UNKNOWN})
    same = [failure for failure in failures if _normal(failure.words) == _normal(first.words)]
    known = {rank for rank in trace.launcher_ranks().values() if rank != UNKNOWN}
    if len(same) > 1 and 2 * len(same) > len(known):
        return _all_failed(trace, same)
    others = [failure for failure in failures[1:] if failure.rank != first.rank]
    evidence = VerdictEvidence(
        stated=first.words,
        n_failures=len(failures),
        exit_status=first.status if first.status != UNKNOWN else None,
        pid=first.pid if first.pid != UNKNOWN else None,
        at=user_frame.in_own_code(first.stack) if first.stack else None,
        stack=list(first.stack) or None,
        also_failed_later=[LaterFailure(other.rank, stated=other.words) for other in others[:_MOST]] or None,
        failed_ranks=ranks[:_MOST] if len(ranks) > 1 else None,
    )
    is_close = any(failure.ts_ns - first.ts_ns < _AT_ONCE_NS for failure in others)
    return Verdict(
        kind="failure",
        summary="",
        ranks=[first.rank] if first.rank != UNKNOWN else [],
        nodes=[host] if (host := first.host or trace.nodes[first.node]) else [],
        since_ns=first.ts_ns if first.ts_ns > _WALL_NS else None,
        n_incidents=1,
        confidence=0.6 if is_close or first.rank == UNKNOWN else 0.85,
        victims=sorted(known - {first.rank}),
        advice=_advice(first),
        evidence=evidence,
    )


def _failures(trace: Trace) -> list[_Failure]:
    """The failures by time, one per rank; a statement of the machine on a rank explains the end of that rank."""
    ranks = trace.launcher_ranks()
    kinds = {FAILURE_LABELS["failure"]: False, FAILURE_LABELS["machine"]: True}
    by_key: dict[tuple[int, int], _Failure] = {}
    for row in np.sort(trace.annotations, order="ts_ns", kind="stable"):
        is_machine = kinds.get(bytes(row["label"]))
        if is_machine is None:
            continue
        words = failure_words(bytes(row["value"]))
        node, pid, ts_ns = int(row["node"]), int(row["pid"]), int(row["ts_ns"])
        rank = ranks.get((node, pid), UNKNOWN)
        failure = _Failure(
            rank,
            ts_ns,
            words.words,
            words.status,
            words.pid,
            words.host,
            node,
            _stack(trace, node, pid, ts_ns),
            is_machine,
        )
        key = (rank, 0) if rank != UNKNOWN else (UNKNOWN, len(by_key))
        by_key[key] = failure if key not in by_key else _joined(by_key[key], failure)
    return sorted(_explained(list(by_key.values())), key=lambda failure: failure.ts_ns)


def _joined(first: _Failure, second: _Failure) -> _Failure:
    """The failure from two lines on one rank: the words of the error, the status of the end."""
    error = next((failure for failure in (first, second) if failure.is_machine or failure.stack), first)
    return replace(
        error,
        ts_ns=min(first.ts_ns, second.ts_ns),
        status=max(first.status, second.status),
        pid=max(first.pid, second.pid),
        host=first.host or second.host,
        stack=first.stack or second.stack,
    )


def _explained(failures: list[_Failure]) -> list[_Failure]:
    """The failures, with kills and errors without a rank joined to the only rank that they can belong to."""
    for unassigned in [unassigned for unassigned in failures if unassigned.rank == UNKNOWN]:
        same_pid = [
            other for other in failures if other.rank != UNKNOWN and other.pid == unassigned.pid != UNKNOWN
        ]
        same_end = [
            other
            for other in failures
            if other.rank != UNKNOWN
            and (
                other.status == unassigned.status != UNKNOWN
                or (not unassigned.is_machine and not other.stack)
            )
        ]
        owners = same_pid or same_end
        if len(owners) == 1:
            failures = [other for other in failures if other is not unassigned and other is not owners[0]]
            joined = _joined(replace(unassigned, rank=owners[0].rank, node=owners[0].node), owners[0])
            failures.append(replace(joined, rank=owners[0].rank, node=owners[0].node))
    return failures


def _stack(trace: Trace, node: int, pid: int, ts_ns: int) -> tuple[str, ...]:
    rows = trace.positions
    rows = rows[(rows["node"] == node) & (rows["pid"] == pid) & (rows["ts_ns"] == ts_ns)]
    return trace.stacks.get(int(rows["stack"][0]), ()) if len(rows) else ()


def _normal(words: str) -> str:
    """The beginning of an error without its numbers, which is equal for the same error of two ranks."""
    return _NUMBERS.sub("", words)[:48]


def _all_failed(trace: Trace, same: Sequence[_Failure]) -> Verdict:
    ranks = sorted({failure.rank for failure in same if failure.rank != UNKNOWN})
    stack = next((failure.stack for failure in same if failure.stack), ())
    evidence = VerdictEvidence(
        stated=same[0].words,
        failed_ranks=ranks[:_MOST],
        at=user_frame.in_own_code(stack) if stack else None,
        stack=list(stack) or None,
    )
    return Verdict(
        kind="inconclusive",
        summary="",
        n_incidents=1,
        confidence=0.6,
        abstained_because=f"{len(same)} ranks failed with the same error: {same[0].words}",
        advice=[f"Read the traceback at {evidence.at}." if stack else "Read the first traceback of the log."],
        evidence=evidence,
    )


def _advice(failure: _Failure) -> list[str]:
    words = failure.words.lower()
    if "out-of-memory" in words or "out of memory (slurm)" in words:
        return ["Give the job more host memory, or reduce the memory of its data loaders."]
    if "xid" in words:
        return ["Look up the Xid in NVIDIA's list, drain the node, and run dcgmi diag on that GPU."]
    if "cuda out of memory" in words or "outofmemoryerror" in words:
        return ["Compare this rank with its peers: the batch, and other processes on the GPU."]
    if failure.stack:
        return [f"Look at {user_frame.in_own_code(failure.stack)}: the traceback ends there."]
    return ["Read the last lines of that rank's log before its end."]


def _stack_verdict(trace: Trace, odd: OddRanks) -> Verdict | None:
    groups = [StackLocation(list(group.ranks[:64]), group.place, group.waits) for group in odd.groups[:_MOST]]
    n_ranks = sum(len(group.ranks) for group in odd.groups)
    evidence = VerdictEvidence(stack_groups=groups, n_ranks=n_ranks)
    if not odd.odd:
        return Verdict(
            kind="inconclusive",
            summary="",
            n_incidents=1,
            confidence=0.3,
            abstained_because=odd.because,
            advice=[
                "Dump the stacks of all ranks twice, half a minute apart, and explain both dumps together."
            ],
            evidence=evidence,
        )
    frames = {rank: group.frames for group in odd.groups for rank in group.ranks}
    doing = [
        RankActivity(rank, is_alive=True, at=user_frame.in_own_code(frames[rank]), stack=list(frames[rank]))
        for rank in odd.odd
    ]
    majority = odd.groups[0]
    return Verdict(
        kind="hang",
        summary="",
        ranks=list(odd.odd),
        nodes=sorted({name for name in _nodes(trace, odd.odd) if name}),
        n_incidents=1,
        confidence=0.6 if n_ranks > 2 else 0.5,
        victims=sorted(rank for group in odd.groups for rank in group.ranks if rank not in odd.odd),
        advice=[f"Look at {doing[0].at} first."],
        evidence=replace(evidence, doing=doing, by_stacks=True, others_at=majority.place),
    )


def _nodes(trace: Trace, ranks: Sequence[int]) -> list[str]:
    return [trace.nodes[node] for (node, _), rank in trace.launcher_ranks().items() if rank in ranks]


def _with_words(trace: Trace, verdict: Verdict) -> Verdict:
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
