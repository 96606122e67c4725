"""Verdicts on statements of logs and stack dumps: the first failure, slow ranks, and ranks with a different stack."""

from collections.abc import Sequence
from dataclasses import replace

from stallscope.diagnose.evidence_fields import RankActivity, StackLocation, VerdictEvidence
from stallscope.diagnose.hangs.stack_locations import OddRanks, odd_ranks
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.timeline import user_frame
from stallscope.diagnose.verdicts.stated_calls import with_words
from stallscope.diagnose.verdicts.stated_failure import failure_verdict
from stallscope.events.failure_labels import FAILURE_LABELS, STATED, failure_words
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace

_MOST = 16


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
        with_words(trace, _doubted(verdict) if is_stated(trace) else verdict) for verdict in report.verdicts
    ]
    failure = failure_verdict(trace)
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
    """A verdict for each rank that timers or metrics report as slow; inconclusive if they name no rank."""
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
        abstained_because=f"the others wait for some of {suspects}, and the files contain no data on these ranks",
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


def _stack_verdict(trace: Trace, odd: OddRanks) -> Verdict | None:
    groups = [
        StackLocation(list(group.ranks[:64]), group.location, group.waits) for group in odd.groups[:_MOST]
    ]
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
        evidence=replace(evidence, doing=doing, by_stacks=True, others_at=majority.location),
    )


def _nodes(trace: Trace, ranks: Sequence[int]) -> list[str]:
    return [trace.nodes[node] for (node, _), rank in trace.launcher_ranks().items() if rank in ranks]
