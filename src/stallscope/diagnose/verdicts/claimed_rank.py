"""The verdict on a job in which several processes claim the same rank at the same time.

Their calls cannot be assigned to ranks, so the data shows neither a hang nor a straggler. Ranks come
from the launcher's environment: a wrapper that starts a job twice, or a script that sets RANK itself, repeats them.
"""

from itertools import pairwise

import numpy as np

from stallscope.diagnose.evidence_fields import ClaimingProcess, VerdictEvidence
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.trace import Trace

_MAX_NAMED = 4


def verdicts(case: Case) -> list[Verdict]:
    """One verdict where processes of this job claim the same rank at the same time; none otherwise."""
    timeline = case.timeline
    ranks, counts = np.unique(timeline.rank, return_counts=True)
    claims = {
        rank: sharing
        for rank in ranks[counts > 1].tolist()
        if _overlap(case, sharing := np.flatnonzero(timeline.rank == rank).tolist())
    }
    if not claims:
        return []
    named = [
        (rank, int(timeline.node[process]), int(timeline.pid[process]))
        for rank, processes in claims.items()
        for process in processes
    ]
    first = min(timeline.first[process] for processes in claims.values() for process in processes)
    return [verdict(case.trace, named, int(timeline.rows["ts_ns"][first]))]


def verdict(trace: Trace, claims: list[tuple[int, int, int]], since_ns: int) -> Verdict:
    """The verdict on processes that share a rank.

    claims: rank, node and pid of each process. since_ns: on the first process's clock.
    """
    ranks = sorted({rank for rank, _, _ in claims})
    processes = [ClaimingProcess(rank, trace.nodes[node], pid) for rank, node, pid in sorted(claims)]
    return Verdict(
        kind="inconclusive",
        summary="",
        nodes=sorted({name for _, node, _ in claims if (name := trace.nodes[node])}),
        since_ns=wall_ns(trace, claims[0][1], since_ns),
        n_incidents=1,
        confidence=0.5,
        abstained_because="; ".join(_claim(processes, rank) for rank in ranks[:_MAX_NAMED])
        + (f"; and {len(ranks) - _MAX_NAMED} more ranks" if len(ranks) > _MAX_NAMED else ""),
        advice=[
            "Give each process of a job its own rank (RANK), or trace only one of the two jobs (trace --pid).",
        ],
        evidence=VerdictEvidence(claimed_ranks=ranks, processes=processes),
    )


def _claim(processes: list[ClaimingProcess], rank: int) -> str:
    claimants = [
        f"{process.pid}" + (f" on {process.node}" if process.node else "")
        for process in processes
        if process.rank == rank
    ]
    return f"processes {' and '.join(claimants[:_MAX_NAMED])} claim rank {rank}"


def _overlap(case: Case, processes: list[int]) -> bool:
    """Whether two of these processes made calls at the same time; one after the other is a restart."""
    first = case.timeline.first
    times = sorted(
        (float(times_ns.min()), float(times_ns.max()))
        for times_ns in (case.arrival_ns[first[process] : first[process + 1]] for process in processes)
    )
    return any(later[0] <= before[1] for before, later in pairwise(times))
