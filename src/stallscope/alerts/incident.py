"""An incident as the alerts use it: the flat verdict row with the identity and the state of the incident."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stallscope.events.verdict_fields import FIELDS, SEVERITIES

_NAMES = tuple(field.name for field in FIELDS)
_LISTS = tuple(field.name for field in FIELDS if field.type in ("texts", "integers"))


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One incident. row: the values of events/verdict_fields.py. Times are ns since 1970.

    closed_ns: None while the incident is open. code: the innermost stack frame of the culprit, "" without a stack.
    owner: labels of events/owner.py. recommendation: the action for programs, empty where none is known.
    closed_because: why the diagnosis closed the incident: the fault is over, or the data ended.
    """

    tenant: str
    verdict_id: str
    cluster: str
    opened_ns: int
    updated_ns: int
    closed_ns: int | None
    row: Mapping[str, Any]
    code: str = ""
    owner: Mapping[str, str] = field(default_factory=dict)
    recommendation: Mapping[str, Any] = field(default_factory=dict)
    closed_because: str = ""

    @property
    def is_open(self) -> bool:
        return self.closed_ns is None

    @property
    def severity(self) -> str:
        return str(self.row.get("severity") or SEVERITIES[0])

    @property
    def begin_ns(self) -> int:
        """Start of the delay; the first report if the start is unknown."""
        since_ns = self.row.get("since_ns")
        return self.opened_ns if since_ns is None else int(since_ns)

    def duration_s(self, now_ns: int) -> float:
        """Time from the start of the delay to its end, or to now while the incident is open."""
        return max(0.0, ((now_ns if self.closed_ns is None else self.closed_ns) - self.begin_ns) / 1e9)

    def as_text(self) -> str:
        """JSON that from_text() reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "Incident":
        """Raises ValueError for text that as_text() did not write."""
        return Incident(**json.loads(text))


def severity_rank(severity: str) -> int:
    """0 for low, up to 3 for critical."""
    return SEVERITIES.index(severity) if severity in SEVERITIES else 0


def from_hub(rows: Iterable[Mapping[str, Any]]) -> list[Incident]:
    """Incidents of rows of the hub's table `verdicts`; times are datetimes there."""
    return [
        Incident(
            tenant=row["tenant"],
            verdict_id=row["verdict_id"],
            cluster=row["cluster_id"] or "",
            opened_ns=_ns(row["opened_at"]),
            updated_ns=_ns(row["updated_at"]),
            closed_ns=None if row["state"] == "open" else _ns(row["closed_at"] or row["updated_at"]),
            row={name: json.loads(row[name] or "[]") if name in _LISTS else row[name] for name in _NAMES},
            **_of_verdict(json.loads(row["verdict"] or "{}")),
        )
        for row in rows
    ]


def from_agent(line: Mapping[str, Any], cluster: str = "") -> Incident:
    """The incident of a line of live/incident_lines.py."""
    at_ns, attributes = line["at_ns"], line["attributes"]
    values = {name: attributes.get(f"stallscope.{name}") for name in _NAMES}
    times = {"since_ns": line["begin_ns"], "until_ns": line["end_ns"], "summary": line["summary"]}
    return Incident(
        tenant="",
        verdict_id=line["incident"],
        cluster=cluster,
        opened_ns=line["begin_ns"],
        updated_ns=at_ns,
        closed_ns=at_ns if line["state"] == "closed" else None,
        row=values | {name: values[name] or [] for name in _LISTS} | times,
        **_of_verdict(line["verdict"] | {"closed_because": line["reason"]}),
    )


def _of_verdict(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that only the whole verdict has."""
    return {
        "code": _code(verdict),
        "owner": verdict.get("owner") or {},
        "recommendation": verdict.get("recommendation") or {},
        "closed_because": verdict.get("closed_because") or "",
    }


def _code(verdict: Mapping[str, Any]) -> str:
    """The innermost frame of the stack in the verdict's evidence; "" without a stack."""
    frames = (verdict.get("evidence") or {}).get("stack")
    return str(frames[0])[:200] if isinstance(frames, list) and frames else ""


def _ns(moment: Any) -> int:
    """ns since 1970 of a datetime with a zone, exact to the microsecond."""
    return round(moment.timestamp() * 1e6) * 1000
