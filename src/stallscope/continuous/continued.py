"""Incidents that continue under a new id of their stream: after a restart of the hub, a takeover, or a gap in the rows.

A stream knows the rows since its start, so it opens such an incident again. The hub's row keeps the first id, the
first begin, and the cost so far; the cost of the time that both cover counts once.

After a restart a stream also finds the incidents that closed before it. Ids contain the start of an incident, which
moves by microseconds when the same rows arrive in other batches. So an incident is recognised by its processes and its
time, and its stored row stays as it is unless the incident lasts longer than stored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Incident = tuple[str, str]
"""Tenant and id."""

GRACE_S = 900.0
"""An incident that was not seen again within this time has ended."""
GRACE_WITH_ROWS_S = 120.0
"""The same for clusters that send rows, in which the incident would be seen soon."""
_LONGER_NS = 100_000_000
"""A closed incident that is read again has continued if it now ends this much later."""
_SUMMED = ("gpu_seconds", "usd")
_UPPER = {"at_most_gpu_seconds": "gpu_seconds", "at_most_usd": "usd"}


@dataclass
class _OpenIncident:
    row: Row
    until_s: float
    has_rows: bool = False


@dataclass(frozen=True)
class _First:
    """The row of an incident before its stream opened it again.

    has_earlier: the stream's incident also covers closed incidents. known_until_ns: the end of these and of this
    incident if all are closed, otherwise None.
    """

    row: Row
    has_earlier: bool = False
    known_until_ns: int | None = None


@dataclass
class ContinuedIncidents:
    """offers: incidents that may continue. closed: recent closed incidents, whose rows may be read again."""

    offers: dict[Incident, _OpenIncident] = field(default_factory=dict)
    closed: dict[Incident, Row] = field(default_factory=dict)
    _firsts: dict[Incident, _First] = field(default_factory=dict)

    def offer(self, tenant: str, row: Row, *, now_s: float) -> None:
        """Note the row of an incident that may be seen again. now_s: monotonic."""
        self.offers[tenant, row["verdict_id"]] = _OpenIncident(row, now_s + GRACE_S)

    def rows_arrived(self, tenant: str, cluster: str, *, now_s: float) -> None:
        """Note that a cluster sends rows."""
        for (owner, _), offer in self.offers.items():
            if owner == tenant and (offer.row["cluster_id"] or "") == cluster and not offer.has_rows:
                offer.has_rows, offer.until_s = True, min(offer.until_s, now_s + GRACE_WITH_ROWS_S)

    def opened(self, tenant: str, row: Row) -> Row | None:
        """The first row of an incident that its stream has just opened; None for a new incident."""
        incident = (tenant, row["verdict_id"])
        earlier = [
            known
            for key, known in self.closed.items()
            if key == incident or (key[0] == tenant and _is_same(known, row) and _overlap(known, row))
        ]
        if self.offers.pop(incident, None) and incident not in self.closed:
            return None  # the stream found it from its start, under its id
        same = [
            key
            for key, offer in self.offers.items()
            if key[0] == tenant and key not in self.closed and _is_same(offer.row, row)
        ]
        if same:
            key = max(same, key=lambda key: self.offers[key].row["updated_at"])
            first = _First(self.offers.pop(key).row, has_earlier=bool(earlier))
        elif earlier:
            last = max(earlier, key=_end_ns)
            first = _First(last, has_earlier=len(earlier) > 1, known_until_ns=_end_ns(last))
        else:
            return None
        self._firsts[incident] = first
        return first.row

    def stored(self, tenant: str, row: Row) -> Row:
        """The row to store for an incident of a stream."""
        first = self._firsts.get((tenant, row["verdict_id"]))
        return row if first is None else _joined(row, first.row, has_earlier=first.has_earlier)

    def is_repeated(self, tenant: str, row: Row) -> bool:
        """Whether the row of an incident of a stream adds nothing to closed incidents that are stored."""
        first = self._firsts.get((tenant, row["verdict_id"]))
        if first is None or first.known_until_ns is None:
            return False
        until_ns = row["until_ns"] if row["until_ns"] is not None else _begin_ns(row)
        return bool(until_ns <= first.known_until_ns + _LONGER_NS)

    def ended(self, tenant: str, incident_id: str) -> None:
        """Note that a stream has closed an incident."""
        self._firsts.pop((tenant, incident_id), None)

    def name(self, tenant: str, incident_id: str) -> str:
        """The id under which an incident of a stream is stored."""
        first = self._firsts.get((tenant, incident_id))
        return incident_id if first is None else str(first.row["verdict_id"])

    def expired(self, *, now_s: float) -> list[tuple[str, Row]]:
        """Incidents that were not seen again in time, with their tenants; they are no longer offered."""
        keys = [key for key, offer in self.offers.items() if offer.until_s <= now_s]
        return [(key[0], self.offers.pop(key).row) for key in keys]


def _joined(row: Row, first: Mapping[str, Any], *, has_earlier: bool = False) -> Row:
    """The row of an incident that continues.

    first: its row before the restart or gap; opened_at in us. has_earlier: the row's cost includes other incidents.
    """
    out = row | {"verdict_id": first["verdict_id"], "opened_at": first["opened_at"]}
    is_whole = None not in (row["since_ns"], first["since_ns"]) and row["since_ns"] <= first["since_ns"]
    if is_whole and not has_earlier:
        return out
    share = _share_after(row, first["until_ns"])
    out |= {name: first[name] for name in ("since_ns", "first_round") if first[name] is not None}
    for name in _SUMMED:
        if None not in (row[name], first[name]):
            out[name] = round(first[name] + share * row[name], 4)
    for name, least in _UPPER.items():
        before, now = (each[name] if each[name] is not None else each[least] for each in (first, row))
        is_range = first[name] is not None or row[name] is not None
        out[name] = round(before + share * now, 4) if is_range and None not in (before, now) else None
    for name in ("n_late_rounds", "n_incidents"):
        if None not in (row[name], first[name]):
            out[name] = first[name] + round(share * row[name])
    whole = json.loads(row["verdict"])
    whole["continues_since"] = first["since_ns"]
    if whole.get("cost"):
        whole["cost"] |= {name: out[name] for name in (*_SUMMED, *_UPPER)}
    return out | {"verdict": json.dumps(whole)}


def _share_after(row: Mapping[str, Any], until_ns: int | None) -> float:
    """The share of the row's time after a moment: the cost before it is known already."""
    begin_ns, end_ns = row["since_ns"], row["until_ns"]
    if None in (begin_ns, end_ns, until_ns):
        return 1.0
    if end_ns <= begin_ns:
        return float(begin_ns > until_ns)
    return min(max((end_ns - max(begin_ns, until_ns)) / (end_ns - begin_ns), 0.0), 1.0)


def _begin_ns(row: Mapping[str, Any]) -> int:
    return int(row["since_ns"] if row["since_ns"] is not None else row["opened_at"] * 1000)


def _end_ns(row: Mapping[str, Any]) -> int:
    """The end of an incident: of a delay in the data, otherwise the time of its last change."""
    return int(row["until_ns"] if row["until_ns"] is not None else row["updated_at"] * 1000)


def _overlap(first: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether the times of two incidents overlap. Two runs of a job may have equal processes, but not at one time."""
    return _begin_ns(first) <= _end_ns(row) and _begin_ns(row) <= _end_ns(first)


def _is_same(first: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether two rows are on one fault: of one kind and cluster, on common processes, or on one communicator."""
    if any((first[name] or "") != (row[name] or "") for name in ("cluster_id", "kind")):
        return False
    ranks, pids, nodes = (
        [set(json.loads(each[name] or "[]")) for each in (first, row)] for name in ("ranks", "pids", "nodes")
    )
    if nodes[0] and nodes[1] and not nodes[0] & nodes[1]:
        return False
    if not (ranks[0] or ranks[1] or pids[0] or pids[1]):
        return bool(first["comm_hash"] == row["comm_hash"])
    if pids[0] and pids[1]:
        return bool(pids[0] & pids[1] and (ranks[0] & ranks[1] or not (ranks[0] and ranks[1])))
    return bool(ranks[0] & ranks[1] and first["comm_hash"] == row["comm_hash"])
