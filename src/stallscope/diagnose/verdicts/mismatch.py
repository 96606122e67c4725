"""Verdicts on rounds that ranks entered differently."""

from stallscope.diagnose.evidence_fields import VerdictEvidence
from stallscope.diagnose.hangs.hung_rounds import patience_ns
from stallscope.diagnose.hangs.mismatched_rounds import Mismatch
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.verdicts.hang import still_cost


def verdicts(case: Case, mismatches: list[Mismatch]) -> list[Verdict]:
    """One verdict for each set of odd ranks of a communicator: after a first mismatch, later rounds often differ as
    well.
    """
    by_ranks: dict[tuple[int, tuple[int, ...]], list[Mismatch]] = {}
    for mismatch in sorted(mismatches, key=lambda mismatch: mismatch.at_ns):
        by_ranks.setdefault((mismatch.comm, tuple(sorted(set(mismatch.odd.tolist())))), []).append(mismatch)
    still_ns = _standstill_ns(case) if mismatches else 0
    return [_mismatch(case, group, still_ns=still_ns) for group in by_ranks.values()]


def _standstill_ns(case: Case) -> int:
    """How long no rank has made a call at the end of the trace; 0 where that is not longer than typical."""
    for_ns = case.now_ns - int(case.arrival_ns.max())
    return for_ns if for_ns >= patience_ns(case.timeline, case.arrival_ns, case.limits) else 0


def _mismatch(case: Case, group: list[Mismatch], *, still_ns: int) -> Verdict:
    """group: mismatches of the same ranks by time. still_ns: length of the standstill that followed, 0 without one."""
    timeline, first = case.timeline, group[0]
    ranks = sorted(int(timeline.rank[process]) for process in first.odd)
    return Verdict(
        kind="mismatch",
        summary="",
        ranks=ranks,
        nodes=sorted({case.trace.nodes[int(timeline.node[process])] for process in first.odd}),
        comm_hash=f"{int(timeline.comm_hash[first.comm]):016x}",
        first_round=first.seq,
        last_round=max(mismatch.seq for mismatch in group),
        n_late_rounds=len(group),
        n_rounds=case.matched.n_rounds,
        since_ns=wall_ns(case.trace, case.first_node, first.at_ns),
        n_incidents=1,
        confidence=0.9,
        victims=sorted({int(timeline.rank[process]) for process in first.present} - set(ranks)),
        cost=still_cost(case, still_ns, timeline.n_processes - len(ranks)) if still_ns else None,
        advice=[
            "Compare the code path of these ranks in that step: a branch, a shape or a batch differs between ranks."
        ],
        evidence=VerdictEvidence(
            calls=list(first.calls), waited_s=round(still_ns / 1e9, 1) if still_ns else None
        ),
    )
