"""Incidents that machines have judged themselves, as rows of the hub. Input: rows of `node_verdicts`.

A machine may only state its own incidents: its name is part of the id, and it is the machine that the row names.
Rows that are not verdicts are left out, because any sender with a token can send them.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from stallscope.continuous.verdict_rows import table_of
from stallscope.events.verdict_fields import FIELDS, NODE_KINDS
from stallscope.store.hub import schema

TABLE = "node_verdicts"
_LISTS = {field.name for field in FIELDS if field.type in ("texts", "integers")}
Row = dict[str, Any]


def stated(rows: pa.Table, cluster: str, *, now_us: int) -> Iterator[tuple[Row, Row]]:
    """The rows of `verdicts` and `causal_chains`, one of each for each valid row. opened_at is now."""
    for sent in rows.select(["node_id", "incident", "change", "verdict"]).to_pylist():
        try:
            row = _verdict(sent, cluster, now_us)
            table_of(schema.VERDICTS, [row])
        except (ValueError, TypeError, KeyError, AttributeError, pa.ArrowException):
            continue
        yield row, _chain(row, now_us)


def _verdict(sent: Row, cluster: str, now_us: int) -> Row:
    stated_row = json.loads(sent["verdict"])
    flat, whole, reason = stated_row["row"], stated_row["verdict"], str(stated_row["reason"] or "")
    if flat["kind"] not in NODE_KINDS or not isinstance(whole, dict):
        raise ValueError(flat["kind"])
    values = {field.name: flat.get(field.name) for field in FIELDS}
    is_closed = sent["change"] == "closed"
    return {
        **{name: json.dumps(value or []) if name in _LISTS else value for name, value in values.items()},
        "nodes": json.dumps([sent["node_id"]]),
        "cluster_id": cluster,
        "verdict_id": _id(cluster, sent),
        "job": "",
        "state": "closed" if is_closed else "open",
        "opened_at": now_us,
        "updated_at": now_us,
        "closed_at": now_us if is_closed else None,
        "node_id": sent["node_id"],
        "rank": None,
        "verdict": json.dumps(whole | ({"closed_because": reason} if reason else {})),
    }


def _id(cluster: str, sent: Row) -> str:
    key = repr((cluster, sent["node_id"], sent["incident"]))
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def _chain(row: Row, now_us: int) -> Row:
    whole = json.loads(row["verdict"])
    begin_ns = row["since_ns"] if row["since_ns"] is not None else now_us * 1000
    return {
        "ts": begin_ns // 1000,
        "ts_ns": begin_ns,
        "cluster_id": row["cluster_id"],
        "node_id": row["node_id"],
        "rank": None,
        "causal_chain_id": row["verdict_id"],
        "severity": str(row["severity"] or "").upper(),
        "summary": row["summary"],
        "root_cause": row["cause"],
        "explanation": json.dumps(whole.get("evidence")),
        "recommendations": row["advice"],
        "timeline": "[]",
        "state": row["state"],
    }
