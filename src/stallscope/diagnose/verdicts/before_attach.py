"""The verdict on a job that stood still before the capture began."""

from dataclasses import replace

from stallscope.diagnose.hangs.before_attach import RankState, StillRank, still_ranks
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
    """The report on a trace for which is_for(); None where not every rank stands still."""
    ranks = still_ranks(trace)
    if len(ranks) < 2:
        return None
    if claims := _claims(ranks):
        found = claimed_rank.verdict(trace, claims, min(one.since_ns for one in ranks))
        return Report(trace.source, _examined(trace, ranks, 0), [replace(found, summary=text.summary(found))])
    still_ns = min(one.until_ns for one in ranks) - max(one.since_ns for one in ranks)
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
    numbers = [one.rank for one in ranks]
    return [(one.rank, one.node, one.pid) for one in ranks if numbers.count(one.rank) > 1]


def without_standstill(trace: Trace) -> Report:
    """The report on a trace in which ranks were looked at and do not all stand still."""
    return Report(source=trace.source, examined=_examined(trace, still_ranks(trace), 0), verdicts=[])


def _examined(trace: Trace, ranks: list[StillRank], still_ns: int) -> dict[str, object]:
    counts = dict.fromkeys(("n_communicators", "n_rounds", "n_steps"), 0)
    return {
        "n_ranks": len(ranks),
        "n_nodes": len({one.node for one in ranks}),
        **counts,
        "n_lost_records": sum(trace.lost.values()),
        "seconds": round(still_ns / 1e9, 3),
    }


def _verdict(trace: Trace, ranks: list[StillRank], still_ns: int, usd_per_gpu_hour: float | None) -> Verdict:
    apart = [one for one in ranks if one.state is RankState.ELSEWHERE]
    waiting = [one for one in ranks if one.state is RankState.WAITS]
    is_clear = len(apart) == 1 and len(waiting) == len(ranks) - 1
    gpu_seconds = len(waiting) * still_ns / 1e9
    usd = None if usd_per_gpu_hour is None else round(gpu_seconds / 3600 * usd_per_gpu_hour, 2)
    told = apart if is_clear else ranks
    return Verdict(
        kind="hang",
        summary="",
        ranks=[apart[0].rank] if is_clear else [],
        nodes=sorted({trace.nodes[one.node] for one in told}) if is_clear else [],
        since_ns=wall_ns(trace, ranks[0].node, max(one.since_ns for one in ranks)),
        n_incidents=1,
        confidence=(_CONFIDENCE if len(ranks) >= _FEW else _CONFIDENCE_OF_FEW) if is_clear else 0.3,
        victims=[one.rank for one in waiting],
        cost=VerdictCost(round(gpu_seconds, 3), usd, None, is_lower_bound=True),
        advice=[
            f"Look at {user_frame.in_own_code(apart[0].frames)} first."
            if is_clear
            else "Compare where the ranks stand; start the agent before the job, to see which round they hang in."
        ],
        abstained_because=_why_likely(apart[0]) if is_clear else _why_nobody(ranks, apart, waiting),
        evidence={
            "captured_late": True,
            "waited_s": round(still_ns / 1e9, 1),
            "n_ranks": len(ranks),
            "doing": [_doing(trace, one) for one in told],
        },
    )


def _why_likely(apart: StillRank) -> str:
    return (
        f"rank {apart.rank} alone stands outside NCCL and CUDA; whether the others wait for it was not seen"
    )


def _why_nobody(ranks: list[StillRank], apart: list[StillRank], waiting: list[StillRank]) -> str:
    if len(waiting) == len(ranks):
        return "all wait for the GPU or NCCL"
    unknown = len(ranks) - len(apart) - len(waiting)
    parts = [
        (len(waiting), "wait for the GPU or NCCL"),
        (len(apart), "elsewhere"),
        (unknown, "not to be told"),
    ]
    return "of " + counted(len(ranks), "rank") + ": " + ", ".join(f"{n} {what}" for n, what in parts if n)


def _doing(trace: Trace, one: StillRank) -> dict[str, object]:
    told: dict[str, object] = {"rank": one.rank, "is_alive": True, "pid": one.pid, "stands": one.state.value}
    mine = trace.snapshots[(trace.snapshots["node"] == one.node) & (trace.snapshots["pid"] == one.pid)]
    if len(mine):
        state = mine[mine["ts_ns"].argmax()]
        if state["category"]:
            told["state"] = CATEGORY_NAMES[int(state["category"]) - 1]
        if state["syscall_nr"] != UNKNOWN:
            told["syscall_nr"] = int(state["syscall_nr"])
    if one.frames:
        told["at"], told["stack"] = user_frame.in_own_code(one.frames), list(one.frames)
    return told
