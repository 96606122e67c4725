"""The text of an alert: the verdict in three lines, the cost, the next action, and a link."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import quote

from stallscope.alerts.incident import Incident, severity_rank
from stallscope.events.counted import counted

Change = Literal["raised", "updated", "resolved"]


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What a receiver shows. incidents: the members of the alert, the most severe first. Times are ns since 1970."""

    key: str
    title: str
    lines: tuple[str, ...]
    action: str
    link: str
    severity: str
    tenant: str
    cluster: str
    nodes: tuple[str, ...]
    kind: str
    begin_ns: int
    end_ns: int | None
    incidents: tuple[dict[str, Any], ...]

    @property
    def digest(self) -> str:
        """Changes when the severity, the ranks, the cause or the magnitude of the cost changes."""
        members = [
            (each["verdict_id"], each["kind"], each["ranks"], each["cause"], _magnitude(each["gpu_seconds"]))
            for each in self.incidents
        ]
        text = json.dumps([self.severity, members])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def text(self) -> str:
        """All lines as plain text."""
        action = [f"Action: {self.action}"] if self.action else []
        return "\n".join([self.title, *self.lines, *action, *([self.link] if self.link else [])])

    def as_text(self) -> str:
        """JSON that from_text() reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "Notice":
        """Raises ValueError for text that as_text() did not write."""
        data = json.loads(text)
        lists = {name: tuple(data[name]) for name in ("lines", "nodes", "incidents")}
        return Notice(**data | lists)


def notice(key: str, incidents: Sequence[Incident], page_url: str) -> Notice:
    """The notice of an alert. incidents: its members, at least one; an alert describes the open members if any."""
    open_incidents = [incident for incident in incidents if incident.is_open]
    ordered = sorted(open_incidents or incidents, key=_urgency, reverse=True)
    first, row = ordered[0], ordered[0].row
    also = f" ({counted(len(ordered) - 1, 'more incident')} in this alert)" if len(ordered) > 1 else ""
    ends = [incident.closed_ns for incident in incidents if incident.closed_ns is not None]
    advice = row["advice"]
    return Notice(
        key=key,
        title=f"{row['summary']}{also}",
        lines=(_since(first), _cause(first), _cost(ordered)),
        action=advice[0] if advice else "",
        link=_link(first, page_url),
        severity=first.severity,
        tenant=first.tenant,
        cluster=first.cluster,
        nodes=tuple(dict.fromkeys(node for incident in ordered for node in incident.row["nodes"])),
        kind=row["kind"],
        begin_ns=min(incident.begin_ns for incident in incidents),
        end_ns=None if open_incidents else max(ends),
        incidents=tuple(_member(incident) for incident in ordered),
    )


def _urgency(incident: Incident) -> tuple[int, float]:
    return severity_rank(incident.severity), incident.row["gpu_seconds"] or 0.0


def _member(incident: Incident) -> dict[str, Any]:
    names = (
        "kind",
        "severity",
        "summary",
        "ranks",
        "nodes",
        "pids",
        "cause",
        "confidence",
        "gpu_seconds",
        "usd",
    )
    return {
        "verdict_id": incident.verdict_id,
        "cluster": incident.cluster,
        "state": "open" if incident.is_open else "closed",
        "owner": dict(incident.owner),
        "recommendation": dict(incident.recommendation),
        **{name: incident.row[name] for name in names},
    }


def _since(incident: Incident) -> str:
    begin = _utc(incident.begin_ns)
    if incident.closed_ns is None:
        return f"Since {begin}, still open."
    because = f": {incident.closed_because}" if incident.closed_because else ""
    return f"From {begin} to {_utc(incident.closed_ns)} ({incident.duration_s(incident.closed_ns):,.0f} s){because}."


def _cause(incident: Incident) -> str:
    row = incident.row
    if not row["cause"]:
        return f"Cause unknown: {row['abstained_because']}." if row["abstained_because"] else "Cause unknown."
    share = f", {row['cause_share']:.0%} of the delay" if row["cause_share"] is not None else ""
    code = f", at {incident.code}" if incident.code else ""
    return f"Cause: {row['cause']}{share}{code}."


def _cost(incidents: Sequence[Incident]) -> str:
    rows = [incident.row for incident in incidents]
    seconds = sum(row["gpu_seconds"] or 0.0 for row in rows)
    priced = [row["usd"] for row in rows if row["usd"] is not None]
    usd = f", ${sum(priced):,.2f}" if priced else ""
    at_least = "at least " if any(row["is_lower_bound"] for row in rows) else ""
    confidence = rows[0]["confidence"]
    sure = f" Confidence {confidence:.0%}." if confidence is not None else ""
    return f"Cost: {at_least}{seconds:,.0f} GPU seconds{usd}.{sure}"


def _magnitude(gpu_seconds: float | None) -> int:
    """Grows by 1 when the cost doubles, so that a growing cost causes few updates."""
    return int(math.log2(gpu_seconds)) if gpu_seconds and gpu_seconds >= 1 else 0


def _link(incident: Incident, page_url: str) -> str:
    """The page at the start of the incident."""
    if not page_url:
        return ""
    at_ms = incident.begin_ns // 1_000_000
    return f"{page_url.rstrip('/')}/ui/?incident={quote(incident.verdict_id, safe='')}&at={at_ms}"


def _utc(ns: int) -> str:
    return datetime.fromtimestamp(ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
