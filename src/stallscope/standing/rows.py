"""What becomes of an incident's change at the hub: a row of `verdicts` and one of `causal_chains`."""

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from stallscope.diagnose.report.verdict import verdict_as_json
from stallscope.diagnose.stream import Change
from stallscope.store.hub import schema

_SEVERITY = {"hang": "HIGH", "mismatch": "HIGH", "straggler": "HIGH", "inconclusive": "LOW"}


def verdict_row(
    change: Change, cluster: str, *, opened_us: int, now_us: int, n_left_out: int = 0
) -> dict[str, Any]:
    """The row of `verdicts` that a change leaves. Times in us since 1970.

    n_left_out: rows of the cluster that came too fast to be looked at.
    """
    verdict = change.verdict
    main = verdict.causes[0] if verdict.causes else None
    return {
        "cluster_id": cluster,
        "verdict_id": change.incident_id,
        "state": "closed" if change.kind == "closed" else "open",
        "kind": verdict.kind,
        "summary": verdict.summary,
        "opened_at": opened_us,
        "updated_at": now_us,
        "closed_at": now_us if change.kind == "closed" else None,
        "since_ns": verdict.since_ns,
        "until_ns": verdict.until_ns,
        "node_id": verdict.nodes[0] if verdict.nodes else None,
        "rank": verdict.ranks[0] if verdict.ranks else None,
        "ranks": json.dumps(verdict.ranks),
        "nodes": json.dumps(verdict.nodes),
        "comm_hash": verdict.comm_hash,
        "cause": main.cause.name if main else None,
        "cause_share": main.share if main else None,
        "confidence": verdict.confidence,
        "late_ms": verdict.late_ms.get("median") if verdict.late_ms else None,
        "n_late_rounds": verdict.n_late_rounds,
        "gpu_seconds": verdict.cost.gpu_seconds if verdict.cost else None,
        "usd": verdict.cost.usd if verdict.cost else None,
        "is_lower_bound": verdict.cost.is_lower_bound if verdict.cost else None,
        "at_most_gpu_seconds": verdict.cost.at_most_gpu_seconds if verdict.cost else None,
        "at_most_usd": verdict.cost.at_most_usd if verdict.cost else None,
        "verdict": json.dumps(
            verdict_as_json(verdict)
            | ({"closed_because": change.reason} if change.reason else {})
            | ({"n_rows_not_looked_at": n_left_out} if n_left_out else {})
        ),
    }


def chain_row(change: Change, cluster: str, now_us: int) -> dict[str, Any]:
    """The same in the shape of `causal_chains`."""
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
        "severity": _SEVERITY.get(verdict.kind, "MEDIUM"),
        "summary": verdict.summary,
        "root_cause": verdict.causes[0].state if verdict.causes else verdict.abstained_because,
        "explanation": json.dumps(verdict.evidence),
        "recommendations": json.dumps(verdict.advice),
        "timeline": json.dumps(timeline),
        "state": "closed" if change.kind == "closed" else "open",
    }


def table_of(table: schema.HubTable, rows: Sequence[dict[str, Any]]) -> pa.Table:
    """Rows as the store takes them."""
    return pa.Table.from_pylist(list(rows), schema=schema.arrow_schema(table, without=schema.GIVEN_BY_HUB))
