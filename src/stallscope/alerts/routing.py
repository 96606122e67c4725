"""Which receivers an incident reaches, and as part of which alert. Pure: time and configuration are passed in."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from stallscope.alerts.incident import Incident
from stallscope.events.owner import JOB_LABELS, PARTY_LABELS

if TYPE_CHECKING:  # importing pydantic here would slow every command
    from stallscope.alerts.config import Config, Match, Route


@dataclass(frozen=True)
class Target:
    """An incident's alert at one receiver. key: the same for all incidents of the group."""

    key: str
    receiver: str
    route: "Route"


def targets(config: "Config", incident: Incident) -> Iterator[Target]:
    """The alerts that an incident belongs to, by the routes from top to bottom; each receiver once."""
    reached: set[str] = set()
    for route in config.routes:
        if not matches(route.match, incident):
            continue
        for receiver in route.receivers:
            if receiver not in reached:
                reached.add(receiver)
                yield Target(group_key(route.group_by, incident), receiver, route)
        if not route.continues:
            return


def matches(match: "Match", incident: Incident) -> bool:
    """Whether every condition accepts the incident; at least one of its nodes must match `node`."""
    return (
        (not match.severity or incident.severity in match.severity)
        and (not match.kind or incident.row["kind"] in match.kind)
        and _accepts(match.tenant, [incident.tenant])
        and _accepts(match.cluster, [incident.cluster])
        and _accepts(match.node, incident.row["nodes"])
        and _accepts(match.job, _labels(incident, *JOB_LABELS))
        and _accepts(match.owner, _labels(incident, *PARTY_LABELS))
        and _accepts(match.namespace, _labels(incident, "namespace"))
    )


def is_due(route: "Route", incident: Incident, now_ns: int) -> bool:
    """Whether an incident has reached the route's duration and cost, and no quiet hours delay it."""
    row, quiet = incident.row, route.quiet_hours
    if quiet and incident.severity not in quiet.except_severity and quiet.contains(now_ns / 1e9):
        return False
    return (
        incident.duration_s(now_ns) >= route.min_duration
        and (row["gpu_seconds"] or 0.0) >= route.min_gpu_seconds
        and (row["usd"] or 0.0) >= route.min_usd
    )


def group_key(group_by: Sequence[str], incident: Incident) -> str:
    """A stable identifier of at most 40 characters: of the incident, or of the incidents with the same values."""
    if "incident" in group_by:
        values = [incident.tenant, incident.verdict_id]
    else:
        value_of = {
            "cluster": incident.cluster,
            "kind": incident.row["kind"],
            "node": next(iter(incident.row["nodes"]), ""),
        }
        values = [incident.tenant, *(f"{name}={value_of[name]}" for name in sorted(set(group_by)))]
    digest = hashlib.blake2b(json.dumps(values).encode(), digest_size=12).hexdigest()
    return f"stallscope-{digest}"


def _labels(incident: Incident, *names: str) -> list[str]:
    return [incident.owner[name] for name in names if incident.owner.get(name)]


def _accepts(patterns: Sequence[str], values: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(value, pattern) for value in values for pattern in patterns)
