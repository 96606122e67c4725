"""fleet.cluster.explain_rank: how one rank differs from its peers."""

import json
import statistics
from typing import Any

from pydantic import Field

from stallscope.errors import NotFound
from stallscope.events.names import CATEGORY_NAMES
from stallscope.serve.sql.values import clean
from stallscope.serve.tools.job_answer import job_rows
from stallscope.serve.tools.tenant_context import (
    Cluster,
    From,
    JobParams,
    TenantContext,
    To,
    iso_time,
    window,
)
from stallscope.serve.tools.tool_registry import Result, Row, Tool
from stallscope.serve.tools.verdict_row import StoredVerdict, stored_verdict, stored_verdicts
from stallscope.store.hub.job_filter import JobChoice

_N_LONGEST = 5
_N_FRAMES = 12
_MIN_LATE_NS = 2_000_000


class ExplainParams(JobParams):
    cluster: Cluster = None
    rank: int = Field(ge=0, le=10_000_000, description="Rank in the job.")
    from_: From = None
    to: To = None


class LedgerRow(Row):
    category: str = Field(
        description="Category of the time between two collectives; docs/reference/categories.md."
    )
    rank_ms: float = Field(description="The rank's time per round.")
    peers_ms: float = Field(description="Median of the peers.")
    excess_ms: float


class Rounds(Row):
    node: str | None
    n_rounds: int
    lag_ms: float = Field(description="Mean lateness against the median rank, by the senders' clocks.")
    max_late_ms: float
    share_late: float = Field(description="Share of rounds in which the rank was late by more than 2 ms.")


class SlowCall(Row):
    time: str | None
    op: str | None
    function: str | None
    duration_ms: float
    count_bytes: int | None
    stack: list[str] = Field(description="Innermost frame first; empty if no stack was captured.")


class OffCpu(Row):
    time: str | None
    category: str | None
    duration_ms: float
    runnable_ms: float | None = Field(description="Part of the time in which the thread was runnable.")
    taken_by: str | None = Field(description="The process that got the CPU.")
    stack: list[str]


class Explained(Result):
    summary: str
    rank: int
    job: str | None = Field(description="The examined job; null if no job is known.")
    rounds: Rounds | None = Field(description="null if the rank shares no round.")
    rows: list[LedgerRow] = Field(description="The time ledger against the peers, largest excess first.")
    slow_calls: list[SlowCall]
    off_cpu: list[OffCpu]
    verdicts: list[StoredVerdict] = Field(description="The verdicts that name this rank.")


def explain_rank(context: TenantContext, params: ExplainParams) -> Explained:
    """One rank in detail: its rounds, its time ledger against its peers, longest calls and waits with stacks."""
    times = window(params.from_, params.to)
    known = job_rows(context, cluster=params.cluster, choice=params.choice, rank=params.rank, times=times)
    jobs = [row.job for row in known]
    only = JobChoice(job=jobs[0]) if len(jobs) > 1 else params.choice
    late = context.rows("lateness", only=only, cluster=params.cluster, min_late_ns=_MIN_LATE_NS, **times)
    ledgers = context.rows("rank_ledgers", only=only, cluster=params.cluster, **times)
    rank_rows = [row for row in late if row["rank"] == params.rank]
    own_ledgers = [row for row in ledgers if row["rank"] == params.rank]
    named = [
        stored_verdict(row)
        for row in stored_verdicts(
            context,
            cluster=params.cluster,
            rank=params.rank,
            choice=only,
            from_ns=params.from_,
            to_ns=params.to,
            max_rows=_N_LONGEST,
        )
    ]
    if not rank_rows and not own_ledgers and not named:
        raise NotFound(
            f"no data about rank {params.rank} in this window; fleet.cluster.find_nccl_processes lists ranks"
        )
    detail = {
        "cluster": params.cluster,
        "rank": params.rank,
        "node": None,
        "pid": None,
        "max_rows": _N_LONGEST,
    }
    detail |= times
    rows = ledger_rows(own_ledgers, [row for row in ledgers if row["rank"] != params.rank])
    rounds = _rounds(rank_rows, late)
    return Explained(
        summary=_summary(params.rank, rounds, rows, named) + _other_jobs(params, jobs),
        rank=params.rank,
        job=jobs[0] if jobs else params.job,
        rounds=rounds,
        rows=rows,
        slow_calls=[_call(row) for row in context.rows("slow_calls", only=only, **detail)],
        off_cpu=[_off(row) for row in context.rows("off_cpu", only=only, **detail)],
        verdicts=named,
    )


def _other_jobs(params: ExplainParams, jobs: list[str]) -> str:
    """The sentence on further jobs with this rank, of which the answer holds the newest."""
    if len(jobs) < 2:
        return ""
    return f" {len(jobs)} jobs have a rank {params.rank}; this is the newest. Others: {', '.join(jobs[1:6])}."


def _rounds(rank_rows: list[dict[str, Any]], late: list[dict[str, Any]]) -> Rounds | None:
    if not rank_rows:
        return None
    row = max(rank_rows, key=lambda each: each["n_rounds"])
    median_ns = statistics.median(each["lag_ns"] for each in late)
    return Rounds(
        node=row["node_id"],
        n_rounds=row["n_rounds"],
        lag_ms=_ms(row["lag_ns"] - median_ns),
        max_late_ms=_ms(row["max_late_ns"]),
        share_late=round(row["n_late"] / row["n_rounds"], 4),
    )


def ledger_rows(rank_rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[LedgerRow]:
    """Each category's time per round: the rank's, and the median of the peers. Empty without a ledger.

    Both: rows of the question rank_ledgers.
    """
    if not rank_rows or not others:
        return []
    main_row = max(rank_rows, key=lambda row: row["n_rounds"])
    rows = []
    for category in CATEGORY_NAMES:
        rank_ns = _each_round(main_row, category)
        peers_ns = statistics.median(_each_round(row, category) for row in others)
        if max(rank_ns, peers_ns) >= 1000:
            rows.append(
                LedgerRow(
                    category=category,
                    rank_ms=_ms(rank_ns),
                    peers_ms=_ms(peers_ns),
                    excess_ms=_ms(rank_ns - peers_ns),
                )
            )
    return sorted(rows, key=lambda row: -row.excess_ms)


def _each_round(row: dict[str, Any], category: str) -> float:
    return float(row[f"{category}_ns"] or 0) / (row["n_rounds"] - 1)


def _summary(rank: int, rounds: Rounds | None, rows: list[LedgerRow], named: list[dict[str, Any]]) -> str:
    parts = []
    if rounds:
        direction = "earlier" if rounds.lag_ms < 0 else "later"
        parts.append(
            f"Rank {rank} is {abs(rounds.lag_ms):g} ms {direction} than the median rank, in {rounds.n_rounds} rounds."
        )
    if rows and rows[0].excess_ms > 0:
        parts.append(
            f"It spends {rows[0].excess_ms:g} ms more per round in {rows[0].category} than its peers."
        )
    if named:
        parts.append(f"Verdict: {named[0]['summary']}")
    return " ".join(parts) or f"Rank {rank} does not differ from its peers."


def _call(row: dict[str, Any]) -> SlowCall:
    return SlowCall(
        time=iso_time(row["ts_ns"]),
        op=row["op"],
        function=row["symbol"],
        duration_ms=_ms(row["duration_ns"]),
        count_bytes=row["count_bytes"],
        stack=_frames(row["frames"]),
    )


def _off(row: dict[str, Any]) -> OffCpu:
    runnable_ns = row["runnable_ns"]
    return OffCpu(
        time=iso_time(row["ts_ns"]),
        category=row["category"],
        duration_ms=_ms(row["duration_ns"]),
        runnable_ms=None if runnable_ns is None or runnable_ns < 0 else _ms(runnable_ns),
        taken_by=row["by_comm"] or None,
        stack=_frames(row["frames"]),
    )


def _frames(text: str | None) -> list[str]:
    """Frames of a stack as text; empty if the text is not a JSON list."""
    try:
        frames = json.loads(text) if text else []
    except ValueError:
        return []
    if not isinstance(frames, list):
        return []
    return [clean(each if isinstance(each, str) else json.dumps(each))[:200] for each in frames[:_N_FRAMES]]


def _ms(ns: float) -> float:
    return round(ns / 1e6, 3)


TOOL = Tool("fleet.cluster.explain_rank", "One rank in detail", explain_rank)
