"""Incidents for the tests of alerts, and a configuration with one receiver."""

from typing import Any

from stallscope.alerts.config import Config, validated
from stallscope.alerts.incident import Incident
from stallscope.events.verdict_fields import FIELDS

S = 10**9
T0_NS = 1_760_000_000 * S


def incident(
    verdict_id: str = "v1", *, begin_s: float = 0, end_s: float | None = None, **values: Any
) -> Incident:
    """A straggler of 120 GPU seconds on node-a. begin_s, end_s: after T0_NS; end_s None: still open."""
    lists = {field.name: [] for field in FIELDS if field.type in ("texts", "integers")}
    row = {field.name: None for field in FIELDS} | lists
    row |= {
        "kind": "straggler",
        "severity": "high",
        "summary": "Rank 2 (host node-a) slows down the job.",
        "ranks": [2],
        "nodes": ["node-a"],
        "cause": "io",
        "cause_share": 0.93,
        "confidence": 0.97,
        "gpu_seconds": 120.0,
        "advice": ["Look at the disk of node-a."],
        "is_lower_bound": False,
        "since_ns": T0_NS + round(begin_s * S),
    }
    own = {name: values.pop(name) for name in ("tenant", "cluster", "owner") if name in values}
    updated_ns = values.pop("updated_ns", T0_NS + round((begin_s if end_s is None else end_s) * S))
    return Incident(
        verdict_id=verdict_id,
        opened_ns=T0_NS + round(begin_s * S),
        updated_ns=updated_ns,
        closed_ns=None if end_s is None else T0_NS + round(end_s * S),
        row=row | values,
        **{"tenant": "default", "cluster": "c1"} | own,
    )


def config(url: str = "http://127.0.0.1:9/", **route: Any) -> Config:
    """One webhook that receives every incident. route: keys of the route."""
    return validated(
        {
            "page_url": "https://hub.example",
            "receivers": {"hook": {"type": "webhook", "url": url}},
            "routes": [{"receivers": "hook"} | route],
        },
        "alerts.yaml",
    )
