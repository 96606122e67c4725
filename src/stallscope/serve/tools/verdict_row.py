"""A verdict as a flat row in tool answers, at the hub and at a node: the fields of events/verdict_fields.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import WithJsonSchema

from stallscope.events.verdict_fields import FIELDS, STATES, FieldType
from stallscope.serve.tools.tenant_context import TenantContext, iso_time
from stallscope.store.hub.job_filter import JobChoice

_JSON_SCHEMAS: Mapping[FieldType, dict[str, Any]] = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "time": {"type": "string", "format": "date-time"},
    "texts": {"type": "array", "items": {"type": "string"}},
    "integers": {"type": "array", "items": {"type": "integer"}},
}
_STORED: dict[str, tuple[dict[str, Any], str]] = {
    "verdict_id": ({"type": "string"}, "the incident"),
    "cluster": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "cluster"),
    "job": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "job; null in rows of earlier releases"),
    "state": ({"type": "string"}, " or ".join(STATES)),
    "node": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "machine of the first named rank"),
    "rank": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "the first named rank"),
}


def _schema(first: Mapping[str, tuple[dict[str, Any], str]], last: Mapping[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {
        name: type_ | {"description": text} for name, (type_, text) in first.items()
    }
    for field in FIELDS:
        type_ = _JSON_SCHEMAS[field.type]
        is_nullable = not field.is_required and field.type not in ("texts", "integers")
        shape = {"anyOf": [type_, {"type": "null"}]} if is_nullable else type_
        properties[field.json_name] = shape | {"description": field.meaning}
    properties |= last
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


VerdictRow = Annotated[
    dict[str, Any],
    WithJsonSchema(
        _schema({}, {"full": {"anyOf": [{"type": "object"}, {"type": "null"}], "description": "detail=full"}})
    ),
]
"""A verdict of a trace."""

StoredVerdict = Annotated[dict[str, Any], WithJsonSchema(_schema(_STORED, {}))]
"""A verdict of the hub: the same fields, with the incident's identity and state."""


def stored_verdicts(
    context: TenantContext,
    *,
    cluster: str | None = None,
    node: str | None = None,
    rank: int | None = None,
    kind: str | None = None,
    severity: str | None = None,
    state: str | None = None,
    verdict_id: str | None = None,
    choice: JobChoice | None = None,
    from_ns: int | None = None,
    to_ns: int | None = None,
    max_rows: int,
) -> list[dict[str, Any]]:
    """The matching rows of `verdicts`: open incidents first, then the newest."""
    return context.rows(
        "found_verdicts",
        only=choice,
        cluster=cluster,
        node=node,
        rank=rank,
        kind=kind,
        severity=severity,
        state=state,
        verdict_id=verdict_id,
        from_ns=from_ns,
        to_ns=to_ns,
        max_rows=max_rows,
    )


def stored_verdict(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the hub's table as tools return it. Columns added after the row was written are null or empty."""
    out = {
        "verdict_id": row["verdict_id"],
        "cluster": row["cluster_id"],
        "job": row["job"],
        "state": row["state"],
        "node": row["node_id"],
        "rank": row["rank"],
    }
    for field in FIELDS:
        value = row[field.name]
        if field.type in ("texts", "integers"):
            value = json.loads(value) if value else []
        out[field.json_name] = iso_time(value) if field.type == "time" else value
    return out
