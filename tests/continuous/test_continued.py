"""Incidents that a stream opens again after a restart of the hub: which of them are stored already."""

import json
from typing import Any

import pytest

from stallscope.continuous.continued import ContinuedIncidents

S = 1_000_000_000
US = 1_000


def row(incident: str, since_s: float, until_s: float | None, **more: Any) -> dict[str, Any]:
    """A row of `verdicts` on rank 6, late from since_s to until_s, at 1 GPU second per second."""
    seconds = 0.0 if until_s is None else until_s - since_s
    values = {
        "cluster_id": "c1",
        "verdict_id": incident,
        "kind": "straggler",
        "state": "closed",
        "ranks": "[6]",
        "pids": "[4228]",
        "nodes": '["node-1"]',
        "comm_hash": "1650a0596a0e1c1a",
        "since_ns": int(since_s * S),
        "until_ns": None if until_s is None else int(until_s * S),
        "first_round": 163,
        "opened_at": int(since_s * 1e6),
        "updated_at": int((until_s or since_s) * 1e6),
        "gpu_seconds": seconds,
        "usd": None,
        "at_most_gpu_seconds": None,
        "at_most_usd": None,
        "n_late_rounds": 10,
        "n_incidents": 1,
        "verdict": json.dumps({"cost": {"gpu_seconds": seconds}}),
    }
    return values | more


def restarted(*stored: dict[str, Any]) -> ContinuedIncidents:
    """The incidents after a restart of a hub with these rows."""
    continued = ContinuedIncidents()
    for each in stored:
        if each["state"] == "open":
            continued.offer("a", each, now_s=0.0)
        else:
            continued.closed["a", each["verdict_id"]] = each
    return continued


def test_a_closed_incident_that_is_read_again_with_another_begin_is_stored_once():
    continued = restarted(row("first", 100.0, 104.0))
    again = row("again", 100.0 + 11e-6, 104.0 + 11e-6, state="open")
    assert continued.opened("a", again) is not None
    assert continued.is_repeated("a", again) and continued.name("a", "again") == "first"


def test_a_closed_incident_that_lasts_longer_than_stored_goes_on_under_its_id():
    continued = restarted(row("first", 100.0, 104.0))
    longer = row("again", 100.0 + 11e-6, 110.0, state="open")
    continued.opened("a", longer)
    assert not continued.is_repeated("a", longer)
    stored = continued.stored("a", longer)
    assert (stored["verdict_id"], stored["state"], stored["since_ns"]) == ("first", "open", 100 * S)
    assert stored["gpu_seconds"] == pytest.approx(10.0, abs=0.01)


@pytest.mark.parametrize(
    "other",
    [
        row("again", 200.0, 204.0),  # a second run with the same pid, communicator and round
        row("again", 100.0, 104.0, ranks="[7]", pids="[4229]"),
        row("again", 100.0, 104.0, kind="hang"),
        row("again", 100.0, 104.0, cluster_id="c2"),
    ],
    ids=["later run", "other rank", "other kind", "other cluster"],
)
def test_another_incident_keeps_its_own_id(other: dict[str, Any]):
    continued = restarted(row("first", 100.0, 104.0))
    assert continued.opened("a", other) is None
    assert not continued.is_repeated("a", other) and continued.name("a", "again") == "again"


def test_another_tenants_incident_is_not_the_same():
    continued = restarted(row("first", 100.0, 104.0))
    assert continued.opened("b", row("again", 100.0, 104.0)) is None


def test_idle_gpus_of_two_machines_are_two_incidents():
    idle = {"kind": "idle", "ranks": "[]", "pids": "[]", "comm_hash": None}
    continued = restarted(row("first", 100.0, 104.0, **idle))
    assert continued.opened("a", row("again", 100.0, 104.0, nodes='["node-2"]', **idle)) is None
    assert continued.opened("a", row("again", 100.0, 104.0, **idle)) is not None


def test_a_hang_without_an_end_is_read_again():
    hang = {"kind": "hang", "ranks": "[]", "pids": "[]"}
    continued = restarted(row("first", 100.0, None, updated_at=int(160e6), **hang))
    again = row("again", 100.0, None, state="open", updated_at=int(200e6), **hang)
    assert continued.opened("a", again) is not None and continued.is_repeated("a", again)


def test_two_closed_incidents_that_are_read_as_one_are_not_stored_again():
    continued = restarted(row("first", 100.0, 104.0), row("second", 150.0, 160.0))
    both = row("both", 100.0, 160.0, state="open")
    assert continued.opened("a", both) is not None and continued.is_repeated("a", both)


def test_the_cost_of_a_closed_incident_is_not_added_to_an_open_incident():
    continued = restarted(row("first", 100.0, 104.0), row("second", 150.0, 160.0, state="open"))
    both = row("both", 100.0, 170.0, state="open", gpu_seconds=24.0)
    continued.opened("a", both)
    stored = continued.stored("a", both)
    assert (stored["verdict_id"], stored["since_ns"]) == ("second", 150 * S)
    assert stored["gpu_seconds"] == pytest.approx(10.0 + 24.0 * 10 / 70, abs=0.01)
    assert not continued.is_repeated("a", both)
