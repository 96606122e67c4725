"""The verdict on a job that stood still before the capture began."""

from dataclasses import replace

from stallscope.diagnose.evidence_fields import RankActivity, VerdictEvidence
from stallscope.diagnose.hangs.earlier_hang import RankState, StillRank, still_ranks
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict, VerdictCost
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import user_frame
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.verdicts import claimed_rank
from stallscope.events.counted import counted
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import CATEGORY_NAMES
from stallscope.events.trace import Trace

_FEW = 3
_CONFIDENCE, _CONFIDENCE_OF_FEW = 0.6, 0.5


def report(trace: Trace, *, limits: Thresholds, usd_per_gpu_hour: float | None = None) -> Report | None:
    """The report on a trace for which is_for(); None where a rank makes progress."""
    ranks = still_ranks(trace)
    if len(ranks) < 2:
        return None
    if claims := _claims(ranks):
        verdict = claimed_rank.verdict(trace, claims, min(rank.since_ns for rank in ranks))
        return Report(
            trace.source, _examined(trace, ranks, 0), [replace(verdict, summary=text.summary(verdict))]
        )
    still_ns = min(rank.until_ns for rank in ranks) - max(rank.since_ns for rank in ranks)
    if still_ns < limits.hang_after_ns:
        return None
    verdict = _verdict(trace, ranks, still_ns, usd_per_gpu_hour)
    return Report(
        source=trace.source,
        examined=_examined(trace, ranks, still_ns),
        verdicts=[replace(verdict, summary=text.summary(verdict))],
    )


def _claims(ranks: list[StillRank]) -> list[tuple[int, int, int]]:
    """Rank, node and pid of the processes that share a rank."""
    numbers = [rank.rank for rank in ranks]
    return [(rank.rank, rank.node, rank.pid) for rank in ranks if numbers.count(rank.rank) > 1]


def without_standstill(trace: Trace) -> Report:
    """The report on a trace in which at least one rank makes progress."""
    return Report(source=trace.source, examined=_examined(trace, still_ranks(trace), 0), verdicts=[])


def _examined(trace: Trace, ranks: list[StillRank], still_ns: int) -> dict[str, object]:
    counts = dict.fromkeys(("n_communicators", "n_rounds", "n_steps"), 0)
    return {
        "n_ranks": len(ranks),
        "n_nodes": len({rank.node for rank in ranks}),
        **counts,
        "n_lost_records": sum(trace.lost.values()),
        "seconds": round(still_ns / 1e9, 3),
    }


def _verdict(trace: Trace, ranks: list[StillRank], still_ns: int, usd_per_gpu_hour: float | None) -> Verdict:
    apart = [rank for rank in ranks if rank.state is RankState.ELSEWHERE]
    waiting = [rank for rank in ranks if rank.state is RankState.WAITS]
    is_clear = len(apart) == 1 and len(waiting) == len(ranks) - 1
    gpu_seconds = len(waiting) * still_ns / 1e9
    usd = None if usd_per_gpu_hour is None else round(gpu_seconds / 3600 * usd_per_gpu_hour, 2)
    described = apart if is_clear else ranks
    return Verdict(
        kind="hang",
        summary="",
        ranks=[apart[0].rank] if is_clear else [],
        nodes=sorted({trace.nodes[rank.node] for rank in described}) if is_clear else [],
        since_ns=wall_ns(trace, ranks[0].node, max(rank.since_ns for rank in ranks)),
        n_incidents=1,
        confidence=(_CONFIDENCE if len(ranks) >= _FEW else _CONFIDENCE_OF_FEW) if is_clear else 0.3,
        victims=[rank.rank for rank in waiting],
        cost=VerdictCost(round(gpu_seconds, 3), usd, None, is_lower_bound=True),
        advice=[
            f"Look at {user_frame.in_own_code(apart[0].frames)} first."
            if is_clear
            else "Compare the stacks of the ranks. Start the agent before the job to see the round in which they hang."
        ],
        abstained_because=_why_likely(apart[0]) if is_clear else _why_no_rank(ranks, apart, waiting),
        evidence=VerdictEvidence(
            captured_late=True,
            waited_s=round(still_ns / 1e9, 1),
            n_ranks=len(ranks),
            doing=[_doing(trace, rank) for rank in described],
        ),
    )


def _why_likely(apart: StillRank) -> str:
    return f"only rank {apart.rank} is outside NCCL and CUDA; the data does not show whether the others wait for it"


def _why_no_rank(ranks: list[StillRank], apart: list[StillRank], waiting: list[StillRank]) -> str:
    if len(waiting) == len(ranks):
        return "all ranks wait for the GPU or NCCL"
    unknown = len(ranks) - len(apart) - len(waiting)
    parts = [
        (len(waiting), "waiting for the GPU or NCCL"),
        (len(apart), "in other code"),
        (unknown, "unknown"),
    ]
    return "of " + counted(len(ranks), "rank") + ": " + ", ".join(f"{n} {state}" for n, state in parts if n)


def _doing(trace: Trace, rank: StillRank) -> RankActivity:
    """The state of a rank, as an entry of the evidence."""
    activity = RankActivity(
        rank.rank,
        is_alive=True,
        pid=rank.pid,
        standstill_state=rank.state.value,
        at=user_frame.in_own_code(rank.frames) if rank.frames else None,
        stack=list(rank.frames) or None,
    )
    rows = trace.snapshots[(trace.snapshots["node"] == rank.node) & (trace.snapshots["pid"] == rank.pid)]
    if not len(rows):
        return activity
    state = rows[rows["ts_ns"].argmax()]
    return replace(
        activity,
        state=CATEGORY_NAMES[int(state["category"]) - 1] if state["category"] else None,
        syscall_nr=int(state["syscall_nr"]) if state["syscall_nr"] != UNKNOWN else None,
    )
