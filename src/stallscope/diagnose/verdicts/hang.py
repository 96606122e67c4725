"""The verdict on a hang at the end of a trace: of missing ranks, or of all ranks."""

from dataclasses import replace

from stallscope.diagnose.causes import Explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.evidence_fields import CauseEvidence, VerdictEvidence
from stallscope.diagnose.hangs.deadlock import Deadlock, round_with_dead_rank, wedged
from stallscope.diagnose.hangs.hung_rounds import StuckRound, stuck
from stallscope.diagnose.report.verdict import Verdict, VerdictCost
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.verdicts._late import between, priced
from stallscope.events.names import CATEGORY_NAMES, Category


def verdicts(case: Case) -> list[Verdict]:
    """The verdict on the hang at the end of the trace: of missing ranks, or of all ranks. Empty without a hang."""
    now_ns = case.now_ns
    hang = stuck(
        case.timeline, case.clocks, case.trace, now_ns=now_ns, limits=case.limits
    ) or round_with_dead_rank(case.timeline, case.clocks, trace=case.trace, now_ns=now_ns, limits=case.limits)
    if hang:
        return [_ran_ahead(_hang(case, hang)) if hang.is_ahead else _hang(case, hang)]
    all_wait = wedged(
        case.timeline, case.programs, case.clocks, trace=case.trace, now_ns=now_ns, limits=case.limits
    )
    return [_wedged(case, all_wait)] if all_wait else []


def _hang(case: Case, hang: StuckRound) -> Verdict:
    timeline = case.timeline
    ranks = sorted(hang.ranks)
    why = cause("missing_rank")
    because = CauseEvidence(
        doing=list(hang.doing), waited_s=round(hang.for_ns / 1e9, 1), is_circle=hang.is_circle or None
    )
    return Verdict(
        kind="hang",
        summary="",
        ranks=ranks,
        nodes=sorted({case.trace.nodes[node] for node in hang.nodes}),
        comm_hash=f"{int(timeline.comm_hash[hang.comm]):016x}",
        first_round=hang.seq,
        last_round=hang.seq,
        n_late_rounds=1,
        n_rounds=case.matched.n_rounds,
        since_ns=wall_ns(case.trace, case.first_node, hang.since_ns),
        n_incidents=1,
        causes=[Explained(why, 1.0, float(hang.for_ns), because)],
        confidence=0.95 if not hang.is_circle else 0.7,
        victims=sorted(int(timeline.rank[process]) for process in hang.waiting),
        cost=still_cost(case, hang.for_ns, len(hang.waiting), n_unwatched=hang.n_unwatched),
        advice=why.advice(because),
        evidence=VerdictEvidence(doing=because.doing, waited_s=because.waited_s, is_circle=because.is_circle),
    )


def _ran_ahead(verdict: Verdict) -> Verdict:
    """The verdict where most ranks have ended without an error and the others wait: it names no rank."""
    ahead = ", ".join(map(str, verdict.victims))
    return replace(
        verdict,
        ranks=[],
        nodes=[],
        causes=[],
        confidence=0.5,
        evidence=VerdictEvidence(ahead=verdict.victims, waited_s=verdict.evidence.waited_s),
        abstained_because=(
            f"ranks {ahead} wait in round {verdict.first_round}; the other ranks have made all of their calls and "
            "ended with status 0"
        ),
        advice=[f"Compare the code path of ranks {ahead} after the last common round with the others' path."],
    )


def _wedged(case: Case, state: Deadlock) -> Verdict:
    timeline = case.timeline
    ranks = sorted(int(timeline.rank[process]) for process in state.odd)
    row = timeline.rows[state.row]
    because = None if ranks else _why_no_rank(state)
    return Verdict(
        kind="hang",
        summary="",
        ranks=ranks,
        nodes=sorted({case.trace.nodes[int(timeline.node[process])] for process in state.odd}),
        comm_hash=f"{int(row['comm_hash']):016x}",
        first_round=int(row["seq"]),
        last_round=int(row["seq"]),
        n_rounds=case.matched.n_rounds,
        since_ns=wall_ns(case.trace, case.first_node, state.since_ns),
        n_incidents=1,
        confidence=0.85 if ranks else 0.6,
        victims=sorted(int(timeline.rank[process]) for process in state.waiting),
        cost=still_cost(case, state.for_ns, len(state.waiting)),
        advice=[_against_wedge(state, ranks)],
        abstained_because=because,
        evidence=VerdictEvidence(
            waited_s=round(state.for_ns / 1e9, 1), crossed_order=True if ranks else None
        ),
    )


def _against_wedge(wedge: Deadlock, ranks: list[int]) -> str:
    if ranks:
        return (
            "Make this rank issue the collectives of both communicators in the same order as the other ranks."
        )
    if wedge.is_crossed:
        return "Issue the collectives of both communicators in the same order on all ranks."
    if any(category != Category.WAIT_GPU for category in wedge.states):
        return "Dump the stacks of all ranks (py-spy dump) before a restart: they show where each rank is blocked."
    return "Look for Xid errors and NVLink or network faults on all hosts; dump the stacks before a restart."


def _why_no_rank(wedge: Deadlock) -> str:
    if wedge.is_crossed:
        return "the ranks entered the rounds of two communicators in different orders, and neither order has a majority"
    blocked = {state for state in wedge.states if state != Category.WAIT_GPU}
    if blocked:
        states = " or ".join(sorted(CATEGORY_NAMES[state - 1] for state in blocked if state))
        return f"every rank has entered every round, and no rank makes progress (state {states})"
    if not wedge.n_unseen:
        return "every rank has entered every round: a GPU or the fabric makes no progress"
    return (
        f"the ranks in this trace have entered every round; {wedge.n_unseen} more ranks of the communicator are not "
        "in this trace"
    )


def still_cost(case: Case, still_ns: int, n_waiting: int, *, n_unwatched: int = 0) -> VerdictCost:
    """The cost of a standstill since the last arrivals. n_unwatched: processes that may have waited as well."""
    per_rank, observed_ns = still_ns / 1e9, case.observed_ns + still_ns
    if n_unwatched:
        return between(
            case, per_rank * n_waiting, per_rank * (n_waiting + n_unwatched), observed_ns=observed_ns
        )
    return priced(case, per_rank * n_waiting, is_lower_bound=True, observed_ns=observed_ns)
