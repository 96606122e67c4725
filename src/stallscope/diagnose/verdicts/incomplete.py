"""The verdict on collectives that have not completed, from a source that records completion."""

from dataclasses import replace

from stallscope.diagnose.causes import Explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.evidence_fields import RankActivity, VerdictEvidence
from stallscope.diagnose.hangs.incomplete_collectives import Standstill
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.trace import Trace

_SURE = {"not_entered": 0.95, "not_completed": 0.9, "not_started": 0.9, "idle": 0.85, "no_dump": 0.7}
_ON_DEVICE = ("not_completed", "not_started")


def verdict(trace: Trace, held: Standstill) -> Verdict:
    """The verdict on a standstill: a hang of the responsible ranks, or an inconclusive answer."""
    ranks = trace.processes["rank"]
    unnamed = [int(ranks[p]) for p in held.silent if p not in held.held_by]
    evidence = VerdictEvidence(
        doing=[RankActivity(int(ranks[p]), has=why) for p, why in held.held_by.items()],
        is_circle=held.is_circle or None,
        left_no_dump=sorted(unnamed) or None,
    )
    in_round = held.round is not None
    hang = Verdict(
        kind="hang",
        summary="",
        ranks=sorted(int(ranks[process]) for process in held.held_by),
        nodes=sorted(name for name in trace.nodes if name),
        comm_hash=f"{held.round[0]:016x}" if held.round else None,
        first_round=held.round[1] if held.round else None,
        last_round=held.round[1] if held.round else None,
        n_late_rounds=int(in_round),
        since_ns=wall_ns(trace, 0, held.since_ns) if in_round else None,
        n_incidents=1,
        causes=_causes(held),
        confidence=0.7 if held.is_circle else min((_SURE[why] for why in held.held_by.values()), default=0.5),
        victims=sorted(int(ranks[process]) for process in held.waiting),
        advice=_advice(held),
        evidence=evidence,
    )
    return hang if held.held_by else _without_rank(trace, held, hang)


def _causes(held: Standstill) -> list[Explained]:
    """The cause of ranks that never entered the round; ranks that entered without completing have no known cause."""
    absent = [why for why in held.held_by.values() if why not in _ON_DEVICE]
    return [Explained(cause("missing_rank"), len(absent) / len(held.held_by), 0.0)] if absent else []


def _advice(held: Standstill) -> list[str]:
    on_device = [
        "Look for Xid errors and stuck kernels on the GPUs of these ranks: their peers have started or completed."
    ]
    is_silent = "no_dump" in held.held_by.values()
    is_on_device = any(why in _ON_DEVICE for why in held.held_by.values())
    absent = [advice for part in _causes(held) for advice in part.cause.advice(part.evidence)]
    if is_silent:
        absent = [
            "Check whether the processes without a dump are alive: dump their stacks (py-spy dump), read their logs."
        ]
    return [*(on_device if is_on_device else []), *absent]


def _without_rank(trace: Trace, held: Standstill, verdict: Verdict) -> Verdict:
    suspects = sorted(int(trace.processes["rank"][process]) for process in held.suspects)
    if held.is_ahead:
        return _ran_ahead(verdict, suspects)
    return replace(
        verdict,
        kind="inconclusive",
        causes=[],
        evidence=VerdictEvidence(suspects=suspects, left_no_dump=verdict.evidence.left_no_dump),
        abstained_because=(
            "all ranks have entered the round and none has completed it, so a GPU or the fabric is stuck"
        ),
        advice=["Look for Xid errors, stuck kernels and link errors on the GPUs of the suspects."],
    )


def _ran_ahead(verdict: Verdict, ahead: list[int]) -> Verdict:
    ranks = f"rank {ahead[0]}" if len(ahead) == 1 else f"ranks {', '.join(map(str, ahead))}"
    return replace(
        verdict,
        causes=[],
        confidence=0.5,
        evidence=VerdictEvidence(ahead=ahead, left_no_dump=verdict.evidence.left_no_dump),
        abstained_because=(
            f"{ranks} entered round {verdict.first_round}, and the other ranks have completed all of their calls; "
            f"either {ranks} made one call too many, or all other ranks stopped before that call"
        ),
        advice=[
            f"Compare the code path of {ranks} after the last common round with the other ranks' path: look for a "
            "conditional call, such as a barrier on one rank."
        ],
    )
