"""Ranks of a job that make no NCCL call: another library (gloo, MPI, UCX) connects them, and its messages are not read.

Such ranks meet in waits for sockets, for the library's threads or for child processes. A rank that waits far less than
the others is the rank that the others wait for: their waits are not faults of their own. Shares of whole runs are
compared, so only a rank that is slow for most of the time is named.

MPI and UCX wait for messages in a loop on the CPU. Ranks that make GPU calls at one rate, and pass the same line, poll
at the line at which one rank spends far less time than the other ranks. The late rank of several may not have been
sampled there at all.
"""

from collections import Counter
from dataclasses import replace

import numpy as np

from stallscope.diagnose.evidence_fields import VerdictEvidence
from stallscope.diagnose.processes.activity import Activity
from stallscope.diagnose.processes.budget_summary import word
from stallscope.diagnose.processes.code_locations import is_own, user_line
from stallscope.diagnose.report.verdict import Verdict
from stallscope.events.layout import Array
from stallscope.events.names import Category, SampleRole
from stallscope.events.trace import Trace

_WAITS = ("locks", "network", "child", "other")
_CAUSES_OF_WAITS = frozenset(
    ("lock_contention", "network_wait", "blocked", "child_program", "input_starvation")
)
_SAME_RATE = 0.1
"""The parts of a trace that count as start and end differ between ranks."""
_LESS = 0.15
"""A rank that waits for this share of the time less than the median of the others is the rank that they wait for."""
_MAX_LINES = 3
_NAMES = {
    "open_mpi": "Open MPI",
    "cray_mpich": "Cray MPICH",
    "intel_mpi": "Intel MPI",
    "mpich": "MPICH",
    "ucx": "UCX",
    "ucc": "UCC",
    "gloo": "gloo",
    "nvshmem": "NVSHMEM",
}
"""Communication libraries whose messages are not traced, by their names in the table of processes."""


def is_for(trace: Trace, activities: list[Activity]) -> bool:
    """Whether several processes are ranks of one job by their launcher, without a collective."""
    ranks = {activity.rank for activity in activities if activity.rank >= 0}
    return len(ranks) > 1 and not len(trace.collectives) and bool((trace.processes["nranks"] > 1).any())


def with_polling_as_waits(trace: Trace, activities: list[Activity]) -> list[Activity]:
    """The activities, with polling on the CPU counted as waits for messages. Unchanged if is_for() is false."""
    ranks = [activity for activity in activities if activity.rank >= 0]
    if not is_for(trace, activities) or not _is_in_step(ranks):
        return activities
    shares = [_shares_by_line(activity) for activity in ranks]
    gaps = _gaps(shares)
    line = max(gaps, key=gaps.__getitem__, default="")
    if not line or gaps[line] < _LESS:
        return activities
    return [_polling_at(line, activity) if activity.rank >= 0 else activity for activity in activities]


def _gaps(shares: list[dict[str, float]]) -> dict[str, float]:
    """By line, how much less time one rank spends there than the median of the others. shares: of each rank, by line.

    A rank may lack a line, unless it polls at lines of its own: in many programs the root receives elsewhere.
    """
    n_ranks_at = Counter(line for each in shares for line in each)
    own = [sum(each[line] for line in each if n_ranks_at[line] == 1) for each in shares]
    gaps = {}
    for line, n in n_ranks_at.items():
        of_line = [each.get(line, 0.0) for each in shares]
        gap = float(np.median(sorted(of_line)[1:]) - min(of_line))
        if n == len(shares) or (n == len(shares) - 1 >= 2 and own[of_line.index(0.0)] < gap / 2):
            gaps[line] = gap
    return gaps


def _is_in_step(ranks: list[Activity]) -> bool:
    rates = [activity.calls["synchronise"].per_second for activity in ranks]
    return min(rates) > 0 and max(rates) - min(rates) <= _SAME_RATE * max(rates)


def _is_on_cpu(rows: Array) -> Array:
    return np.isin(rows["category"], (Category.ON_CPU, Category.PREEMPTED))


def _shares_by_line(activity: Activity) -> dict[str, float]:
    """The share of the samples on the CPU, or ready to run, at each line of the user's code."""
    rows = activity.of_role(SampleRole.GPU)
    shares: dict[str, float] = {}
    for row in rows[_is_on_cpu(rows)]:
        if is_own(line := user_line(activity.frames(row))):
            shares[line] = shares.get(line, 0.0) + float(row["n"]) / max(activity.n_samples, 1)
    return shares


def _polling_at(line: str, activity: Activity) -> Activity:
    """The activity with its time on the CPU at a line as a wait for messages."""
    samples, spent_ns, budget = activity.samples.copy(), activity.spent_ns.copy(), dict(activity.budget)
    is_gpu_thread = samples["role"] == SampleRole.GPU
    is_there = is_gpu_thread & [user_line(activity.frames(row)) == line for row in samples]
    for category, item in ((Category.ON_CPU, "on_cpu"), (Category.PREEMPTED, "preempted")):
        is_in = is_gpu_thread & (samples["category"] == category)
        part = samples["n"][is_in & is_there].sum() / max(samples["n"][is_in].sum(), 1)
        moved_ns = spent_ns[:, category - 1] * part
        spent_ns[:, category - 1] -= moved_ns
        spent_ns[:, Category.NET - 1] += moved_ns
        budget["network"] += budget[item] * part
        budget[item] *= 1 - part
    samples["category"][is_there & _is_on_cpu(samples)] = Category.NET
    return replace(activity, samples=samples, spent_ns=spent_ns, budget=budget)


def attributed(
    trace: Trace, activities: list[Activity], verdicts: list[Verdict]
) -> tuple[list[Verdict], list[dict[str, object]]]:
    """The verdicts without the waits for a slow rank, and a remark on the ranks. For traces for which is_for().

    If no verdict on the slow rank remains, an inconclusive one takes the place of the waits.
    """
    ranks = [activity for activity in activities if activity.rank >= 0]
    waits = np.array([sum(activity.budget[item] for item in _WAITS) for activity in ranks])
    slow = int(waits.argmin())
    others = np.delete(waits, slow)
    size = int(trace.processes["nranks"].max())
    remark: dict[str, object] = {
        "what": f"{len(ranks)} of {size} ranks make no NCCL calls; messages of {_libraries(ranks)} are not traced"
    }
    if np.median(others) - waits[slow] < _LESS:
        return verdicts, [remark]
    victims = sorted(activity.rank for activity in ranks if activity.rank != ranks[slow].rank)
    remark["what"] = (
        f"{remark['what']}. Judging by the waits, the other ranks wait for rank {ranks[slow].rank}: they wait "
        f"{np.median(others):.0%} of the time for messages or other threads, and rank {ranks[slow].rank} "
        f"{waits[slow]:.0%}"
    )
    kept = [verdict for verdict in verdicts if not _is_wait_of(verdict, victims)]
    removed = [verdict for verdict in verdicts if _is_wait_of(verdict, victims)]
    if removed and not any(ranks[slow].rank in verdict.ranks for verdict in kept):
        kept.append(_without_fault(trace, ranks[slow], float(waits[slow]), float(np.median(others)), removed))
    return [
        _of_slow_rank(verdict, victims) if ranks[slow].rank in verdict.ranks else verdict for verdict in kept
    ], [remark]


def _libraries(ranks: list[Activity]) -> str:
    """The loaded libraries that may connect the ranks; gloo, MPI and UCX if no such library is known."""
    loaded = dict.fromkeys(name for activity in ranks for name in activity.libraries if name in _NAMES)
    names = [_NAMES[name] for name in loaded] or ["gloo", "MPI", "UCX"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _without_fault(
    trace: Trace, slow: Activity, own_wait: float, wait: float, waiting: list[Verdict]
) -> Verdict:
    """The answer where the rank that the others wait for has no known fault. waiting: the verdicts on the others."""
    item, share = max(slow.budget.items(), key=lambda pair: pair[1])
    lines = sorted({verdict.evidence.line for verdict in waiting if verdict.evidence.line})
    return Verdict(
        kind="inconclusive",
        summary="",
        ranks=[slow.rank],
        nodes=[name] if (name := trace.nodes[slow.node]) else [],
        confidence=0.5,
        abstained_because=(
            f"the other ranks wait {wait:.0%} of the time for messages or other threads"
            f"{' at ' + ', '.join(lines[:_MAX_LINES]) if lines else ''}, and rank {slow.rank} {own_wait:.0%}, so they "
            f"seem to wait for it; the largest item of its time budget is {word(item)} ({share:.0%})"
        ),
        advice=[
            f"Compare the work of rank {slow.rank} with the work of the other ranks: it may have more.",
            "Look at the lines at which the other ranks wait: they may wait for something else.",
        ],
        evidence=VerdictEvidence(
            pid=slow.pid,
            command=slow.command,
            largest_item=item,
            share=round(share, 4),
            wait_share=round(wait, 4),
            gpu_busy=None if slow.gpu_busy is None else round(slow.gpu_busy, 3),
        ),
    )


def _of_slow_rank(verdict: Verdict, victims: list[int]) -> Verdict:
    """The verdict on the rank that the others wait for, without its own waits for them if it has other causes."""
    own = [cause for cause in verdict.causes if cause.cause.name not in _CAUSES_OF_WAITS]
    if not own:
        return replace(verdict, victims=victims)
    first, cost = own[0], verdict.cost
    return replace(
        verdict,
        victims=victims,
        causes=own,
        cost=cost.times(first.excess_ns / verdict.causes[0].excess_ns) if cost else None,
        advice=first.cause.advice(first.evidence),
        evidence=replace(
            verdict.evidence,
            line=first.evidence.line,
            share=first.share,
            gain_at_most=first.evidence.gain_at_most,
        ),
    )


def _is_wait_of(verdict: Verdict, victims: list[int]) -> bool:
    is_wait = not verdict.causes or verdict.causes[0].cause.name in _CAUSES_OF_WAITS
    return bool(verdict.ranks) and set(verdict.ranks) <= set(victims) and is_wait
