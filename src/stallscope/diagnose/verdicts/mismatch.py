"""Verdicts on rounds that ranks entered differently."""

from stallscope.diagnose.hangs.mismatch import Mismatch
from stallscope.diagnose.hangs.missing_rank import patience_ns
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.verdicts.hang import still_cost


def verdicts(case: Case, found: list[Mismatch]) -> list[Verdict]:
    """One for each set of ranks that differ in a communicator: after a first time they are often off for good."""
    alike: dict[tuple[int, tuple[int, ...]], list[Mismatch]] = {}
    for one in sorted(found, key=lambda one: one.at_ns):
        alike.setdefault((one.comm, tuple(sorted(set(one.odd.tolist())))), []).append(one)
    stands_ns = _stands_still_ns(case) if found else 0
    return [_mismatch(case, some, stands_ns=stands_ns) for some in alike.values()]


def _stands_still_ns(case: Case) -> int:
    """For how long nobody has made a call at the end, where that is longer than is usual; else 0."""
    for_ns = case.now_ns - int(case.arrival_ns.max())
    return for_ns if for_ns >= patience_ns(case.line, case.arrival_ns, case.limits) else 0


def _mismatch(case: Case, alike: list[Mismatch], *, stands_ns: int) -> Verdict:
    """alike: in order of time. stands_ns: for how long the job has stood still since."""
    line, found = case.line, alike[0]
    ranks = sorted(int(line.rank[process]) for process in found.odd)
    return Verdict(
        kind="mismatch",
        summary="",
        ranks=ranks,
        nodes=sorted({case.trace.nodes[int(line.node[process])] for process in found.odd}),
        comm_hash=f"{int(line.comm_hash[found.comm]):016x}",
        first_round=found.seq,
        last_round=max(one.seq for one in alike),
        n_late_rounds=len(alike),
        n_rounds=case.met.n_rounds,
        since_ns=wall_ns(case.trace, case.first_node, found.at_ns),
        n_incidents=1,
        confidence=0.9,
        victims=sorted({int(line.rank[process]) for process in found.present} - set(ranks)),
        cost=still_cost(case, stands_ns, line.n_processes - len(ranks)) if stands_ns else None,
        advice=[
            "Compare the code path of these ranks in that step: a branch, a shape or a batch differs between ranks."
        ],
        evidence={"calls": list(found.calls)}
        | ({"waited_s": round(stands_ns / 1e9, 1)} if stands_ns else {}),
    )
