"""The change of an incident as rows of the hub: one row of `verdicts` and one of `causal_chains`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from stallscope.diagnose import Change, JobState, verdict_as_json, verdict_row
from stallscope.events.owner import GROUP_LABELS, column
from stallscope.events.verdict_fields import FIELDS
from stallscope.store.hub import schema


def stored_row(
    change: Change, cluster: str, *, opened_us: int, now_us: int, n_left_out: int = 0, every: int = 1
) -> dict[str, Any]:
    """The row of `verdicts` after a change. Times of the incident in us since 1970.

    n_left_out: rows of the cluster that arrived too fast to be examined. every: every k-th round is examined.
    """
    verdict = change.verdict
    row = verdict_row(verdict)
    lists = {field.name for field in FIELDS if field.type in ("texts", "integers")}
    return {
        **{name: json.dumps(value) if name in lists else value for name, value in row.items()},
        "cluster_id": cluster,
        "verdict_id": change.incident_id,
        "job": change.job,
        "state": change.state,
        "opened_at": opened_us,
        "updated_at": now_us,
        "closed_at": now_us if change.state == "closed" else None,
        "node_id": verdict.nodes[0] if verdict.nodes else None,
        "rank": verdict.ranks[0] if verdict.ranks else None,
        "verdict": json.dumps(
            verdict_as_json(verdict)
            | ({"closed_because": change.reason} if change.reason else {})
            | ({"n_rows_not_examined": n_left_out} if n_left_out else {})
            | ({"examined_every_nth_round": every} if every > 1 else {})
        ),
    }


def chain_row(change: Change, cluster: str, now_us: int) -> dict[str, Any]:
    """The change in the shape of `causal_chains`."""
    verdict = change.verdict
    begin_ns = verdict.since_ns if verdict.since_ns is not None else now_us * 1000
    timeline = [
        {
            "layer": "HOST",
            "op": part.cause.name,
            "detail": f"{part.share:.0%} of the excess",
            "dur_us": part.excess_ns / 1e3,
        }
        for part in verdict.causes
    ]
    return {
        "ts": begin_ns // 1000,
        "ts_ns": begin_ns,
        "cluster_id": cluster,
        "node_id": verdict.nodes[0] if verdict.nodes else None,
        "rank": verdict.ranks[0] if verdict.ranks else None,
        "causal_chain_id": change.incident_id,
        "severity": verdict.severity.upper(),
        "summary": verdict.summary,
        "root_cause": verdict.causes[0].state if verdict.causes else verdict.abstained_because,
        "explanation": json.dumps(verdict_as_json(verdict)["evidence"]),
        "recommendations": json.dumps(verdict.advice),
        "timeline": json.dumps(timeline),
        "state": change.state,
    }


def job_row(job: JobState, cluster: str) -> dict[str, Any]:
    """The row of `jobs`, without the time of its change."""
    return {
        "cluster_id": cluster,
        "job": job.id,
        "begin_ns": job.begin_ns,
        "last_ns": job.last_ns,
        "ended_ns": job.ended_ns,
        "n_ranks": len(job.members),
        "members": json.dumps([[member.node, member.pid, member.rank] for member in job.members]),
        "answer": job.answer.value,
        "reasons": json.dumps([asdict(reason) for reason in job.reasons]),
        "evidence": json.dumps(_evidence(job)),
        **{column(label): job.owner.get(label) for label in GROUP_LABELS},
    }


def _evidence(job: JobState) -> dict[str, Any] | None:
    """The evidence of the last evaluation, with its typical step, by which jobs are compared."""
    if job.evidence is None:
        return None
    step_ms = job.evidence.step_ms
    return job.evidence.as_json() | {"step_ms": None if step_ms is None else round(step_ms, 3)}


def table_of(table: schema.HubTable, rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Rows in the store's format."""
    return pa.Table.from_pylist(list(rows), schema=schema.arrow_schema(table, without=schema.GIVEN_BY_HUB))
