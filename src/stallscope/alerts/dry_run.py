"""Replays stored incidents against a configuration: the alerts that it would have raised."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from stallscope.alerts.config import Config
from stallscope.alerts.incident import Incident
from stallscope.alerts.notice import Change, Notice
from stallscope.alerts.state import AlertState


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A change that a receiver would have received. at_ns: ns since 1970."""

    at_ns: int
    receiver: str
    change: Change
    notice: Notice


def planned(config: Config, incidents: Sequence[Incident], now_ns: int) -> list[Planned]:
    """The changes that these incidents would have caused, in order of time.

    The history of an incident's severity and cost is not stored, so its last state counts from its start on. The
    result therefore has no updates.
    """
    moments = sorted(
        {moment for incident in incidents for moment in _moments(config, incident) if moment <= now_ns}
        | {now_ns}
    )
    changes: list[Planned] = []
    with TemporaryDirectory() as folder:
        state = AlertState(Path(folder) / "alerts.db")
        for at_ns in moments:
            state.note([_as_of(i, at_ns) for i in incidents if i.opened_ns <= at_ns])
            state.evaluate(config, at_ns)
            for name in config.receivers:
                # A raise and the end of the same alert can be due at one moment.
                while deliveries := [d for d in state.due(name, at_ns) if d.change != "updated"]:
                    for delivery in deliveries:
                        changes.append(
                            Planned(
                                at_ns=at_ns, receiver=name, change=delivery.change, notice=delivery.notice
                            )
                        )
                        state.delivered(name, delivery, at_ns)
        state.close()
    return changes


def _moments(config: Config, incident: Incident) -> set[int]:
    """Moments at which an incident's alerts can change: its start, its end, and each duration of a route."""
    moments = {incident.opened_ns}
    for route in config.routes:
        due_ns = incident.begin_ns + round(route.min_duration * 1e9)
        moments.add(max(incident.opened_ns, due_ns))
        if route.quiet_hours:
            end_ns = incident.closed_ns or incident.updated_ns
            moments |= set(range(incident.opened_ns, end_ns, 900 * 10**9))
    if incident.closed_ns is not None:
        moments |= {incident.closed_ns, incident.closed_ns + round(config.resolve_after * 1e9)}
    return moments


def _as_of(incident: Incident, at_ns: int) -> Incident:
    """The incident as it was at a moment: open until its end."""
    if incident.closed_ns is not None and incident.closed_ns > at_ns:
        return replace(incident, closed_ns=None, updated_ns=at_ns)
    return replace(incident, updated_ns=at_ns)
