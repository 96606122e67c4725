"""A verdict as one flat row, for every interface: hub table, tools of node and hub, OTLP incidents."""

from collections.abc import Mapping
from typing import Any

from stallscope.diagnose.report.verdict import Verdict, wall_text
from stallscope.events.owner import GROUP_LABELS, column
from stallscope.events.verdict_fields import FIELDS


def verdict_row(verdict: Verdict) -> dict[str, Any]:
    """The values of FIELDS: fields of the verdict, and nested values under one name. Times are ns since 1970."""
    main = verdict.causes[0] if verdict.causes else None
    cost, late_ms = verdict.cost, verdict.late_ms or {}
    nested = {
        "late_ms": late_ms.get("median"),
        "max_late_ms": late_ms.get("max"),
        "cause": main.cause.name if main else None,
        "cause_share": round(main.share, 4) if main else None,
        "gpu_seconds": cost.gpu_seconds if cost else None,
        "at_most_gpu_seconds": cost.at_most_gpu_seconds if cost else None,
        "is_lower_bound": cost.is_lower_bound if cost else None,
        "usd": cost.usd if cost else None,
        "at_most_usd": cost.at_most_usd if cost else None,
        **{column(label): verdict.owner.get(label) for label in GROUP_LABELS},
    }
    return {
        field.name: nested[field.name] if field.name in nested else getattr(verdict, field.name)
        for field in FIELDS
    }


def json_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the JSON names of FIELDS, times as ISO 8601 text."""
    return {
        field.json_name: wall_text(row[field.name]) if field.type == "time" else row[field.name]
        for field in FIELDS
    }
