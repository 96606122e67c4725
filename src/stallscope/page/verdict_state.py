"""A stored verdict as the page shows it: its loss per second of its duration, its victims counted, lists bounded."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from stallscope.diagnose import all_causes, without_old_names
from stallscope.events.verdict_fields import KINDS
from stallscope.serve.tools.verdict_row import stored_verdict

MAX_LISTED = 3
"""Entries that a list shows; the number of all entries is next to it."""

LOSSES = ("gpu_seconds_lost", "usd_lost", "gpus_lost", "usd_per_hour")
"""The fields of losses()."""


def urgency(kind: str) -> int:
    """The position of a kind of verdict: the most urgent first."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def losses(row: Mapping[str, Any]) -> dict[str, list[float] | None]:
    """GPU seconds and dollars lost, and both for each second or hour of the delay, each as [low, high]."""
    out: dict[str, list[float] | None] = {
        "gpu_seconds_lost": _range(row["gpu_seconds"], row["at_most_gpu_seconds"], 1.0),
        "usd_lost": _range(row["usd"], row["at_most_usd"], 1.0),
        "gpus_lost": None,
        "usd_per_hour": None,
    }
    since_ns, until_ns = row["since_ns"], row["until_ns"]
    if until_ns is None and row["updated_at"] is not None:
        until_ns = int(row["updated_at"].timestamp() * 1e9)
    if since_ns is not None and until_ns is not None and until_ns > since_ns:
        seconds = (until_ns - since_ns) / 1e9
        out["gpus_lost"] = _range(row["gpu_seconds"], row["at_most_gpu_seconds"], 1 / seconds)
        out["usd_per_hour"] = _range(row["usd"], row["at_most_usd"], 3600 / seconds)
    return out


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict for its card: the fields of the tool `verdicts`, causes, and evidence with bounded lists."""
    whole = without_old_names(json.loads(row["verdict"])) if row["verdict"] else {}
    flat = stored_verdict(row)
    return {
        **bounded(flat),
        "advice": flat["advice"],
        **losses(row),
        "n_victims": len(flat["victims"]),
        "n_ranks_named": len(flat["ranks"]),
        "causes": bounded([_with_label(cause) for cause in whole.get("causes") or []]),
        "evidence": bounded(whole.get("evidence") or {}),
        "closed_because": whole.get("closed_because"),
        "n_rows_not_examined": whole.get("n_rows_not_examined", whole.get("n_rows_not_looked_at")),
    }


def _with_label(cause: Mapping[str, Any]) -> dict[str, Any]:
    """A cause with its name in words, as in the text of `explain`."""
    return {**cause, "label": cause_label(cause["cause"])}


def cause_label(name: str | None) -> str:
    """A cause in words; "" without a cause."""
    return _cause_labels().get(name or "", name or "")


@cache
def _cause_labels() -> dict[str, str]:
    return {known.name: known.noun or known.title for known in all_causes()}


def bounded(value: Any) -> Any:
    """The value with each list cut to MAX_LISTED entries and a last entry "and N more"."""
    if isinstance(value, dict):
        return {name: bounded(each) for name, each in value.items()}
    if isinstance(value, list):
        first = [bounded(each) for each in value[:MAX_LISTED]]
        n_more = len(value) - len(first)
        return [*first, f"and {n_more:,} more"] if n_more else first
    return value


def _range(low: float | None, high: float | None, factor: float) -> list[float] | None:
    if low is None:
        return None
    return [round(low * factor, 2), round((low if high is None else max(low, high)) * factor, 2)]
