"""Ranks of a job that make no NCCL call: another library (gloo, MPI, UCX) connects them, and its messages are not read.

Such ranks meet in waits for sockets, for the library's threads or for child processes. A rank that waits far less than
the others is the rank that the others wait for: their waits are not faults of their own. Shares of whole runs are
compared, so only a rank that is slow for most of the time is named.
"""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.processes.activity import Activity
from stallscope.diagnose.report.verdict import Verdict
from stallscope.events.trace import Trace

_WAITS = ("locks", "network", "child", "other")
_CAUSES_OF_WAITS = frozenset(
    ("lock_contention", "network_wait", "blocked", "child_program", "input_starvation")
)
_LESS = 0.15
"""A rank that waits for this share of the time less than the median of the others is the rank that they wait for."""


def is_for(trace: Trace, activities: list[Activity]) -> bool:
    """Whether several processes are ranks of one job by their launcher, without a collective."""
    ranks = {activity.rank for activity in activities if activity.rank >= 0}
    return len(ranks) > 1 and not len(trace.collectives) and bool((trace.processes["nranks"] > 1).any())


def attributed(
    trace: Trace, activities: list[Activity], verdicts: list[Verdict]
) -> tuple[list[Verdict], list[dict[str, object]]]:
    """The verdicts without the waits for a slow rank, and a remark on the ranks. For traces for which is_for()."""
    ranks = [activity for activity in activities if activity.rank >= 0]
    waits = np.array([sum(activity.budget[item] for item in _WAITS) for activity in ranks])
    slow = int(waits.argmin())
    others = np.delete(waits, slow)
    size = int(trace.processes["nranks"].max())
    remark: dict[str, object] = {
        "what": f"{len(ranks)} of {size} ranks make no NCCL calls; messages of gloo, MPI and UCX are not "
        "traced"
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
    return [
        replace(verdict, victims=victims) if ranks[slow].rank in verdict.ranks else verdict
        for verdict in kept
    ], [remark]


def _is_wait_of(verdict: Verdict, victims: list[int]) -> bool:
    is_wait = not verdict.causes or verdict.causes[0].cause.name in _CAUSES_OF_WAITS
    return bool(verdict.ranks) and set(verdict.ranks) <= set(victims) and is_wait
