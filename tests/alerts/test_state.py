"""One alert for each incident: raised, updated and resolved once, over restarts, silences and acknowledgements."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.alerts.builders import T0_NS, S, config, incident

from stallscope.alerts.config import Config, Match
from stallscope.alerts.state import AlertState
from stallscope.errors import BadInput, NotFound, StorageFailed


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "alerts.db"


@pytest.fixture
def state(path: Path) -> Iterator[AlertState]:
    with closing(AlertState(path)) as opened:
        opened.evaluate(config(), T0_NS - S)  # an earlier start; older incidents raise no alert
        yield opened


def sent(state: AlertState, configuration: Config, at_s: float, *incidents: Any) -> list[str]:
    """The changes that are due and delivered at a moment, after these incidents."""
    now_ns = T0_NS + round(at_s * S)
    state.note(incidents)
    state.evaluate(configuration, now_ns)
    changes: list[str] = []
    while deliveries := state.due("hook", now_ns):
        for delivery in deliveries:
            changes.append(delivery.change)
            state.delivered("hook", delivery, now_ns)
    return changes


def test_incident_is_raised_updated_and_resolved_once(state):
    everything = config()
    assert sent(state, everything, 1, incident()) == ["raised"]
    assert sent(state, everything, 2, incident()) == []
    assert sent(state, everything, 3, incident(severity="critical", updated_ns=T0_NS + 3 * S)) == ["updated"]
    closed = incident(end_s=10, severity="critical")
    assert sent(state, everything, 11, closed) == []
    assert sent(state, everything, 41, closed) == ["resolved"]
    assert sent(state, everything, 100, closed) == []


def test_incident_that_opens_again_soon_stays_the_same_alert(state):
    assert sent(state, config(), 1, incident()) == ["raised"]
    assert sent(state, config(), 11, incident(end_s=10)) == []
    assert sent(state, config(), 20, incident(updated_ns=T0_NS + 20 * S)) == []
    assert sent(state, config(), 60) == []


def test_incident_that_opens_again_after_its_end_is_not_raised_again(state):
    sent(state, config(), 1, incident())
    assert sent(state, config(), 60, incident(end_s=10)) == ["resolved"]
    assert sent(state, config(), 70, incident(updated_ns=T0_NS + 70 * S)) == []


def test_incident_that_closed_before_its_raise_was_sent_is_raised_and_resolved(state):
    assert sent(state, config(), 60, incident(end_s=5)) == ["raised", "resolved"]


def test_incidents_that_closed_before_the_first_start_raise_no_alert(path):
    with closing(AlertState(path)) as state:
        assert sent(state, config(), 100, incident("old", end_s=5), incident("open")) == ["raised"]
        assert [alert["incidents"] for alert in state.listed()] == [["open"]]


def test_a_restart_before_the_resolve_does_not_raise_the_alert_again(state, path):
    sent(state, config(), 1, incident())
    with closing(AlertState(path)) as after_restart:
        assert sent(after_restart, config(), 2, incident()) == []
        assert sent(after_restart, config(), 60, incident(end_s=20)) == ["resolved"]


def test_a_small_increase_in_cost_sends_no_update(state):
    sent(state, config(), 1, incident(gpu_seconds=130.0))
    assert sent(state, config(), 2, incident(gpu_seconds=140.0, updated_ns=T0_NS + 2 * S)) == []
    assert sent(state, config(), 3, incident(gpu_seconds=300.0, updated_ns=T0_NS + 3 * S)) == ["updated"]


@pytest.mark.parametrize(
    "route", [{"min_duration": "30s"}, {"min_gpu_seconds": 500}, {"match": {"severity": "critical"}}]
)
def test_incident_below_a_condition_raises_no_alert(state, route):
    assert sent(state, config(**route), 5, incident()) == []


def test_incident_is_raised_when_it_has_lasted_long_enough(state):
    patient = config(min_duration="30s")
    assert sent(state, patient, 29, incident()) == []
    assert sent(state, patient, 30) == ["raised"]


def test_silenced_incident_is_raised_after_the_silence(state):
    state.silence(Match(node=("node-*",)), until_ns=T0_NS + 60 * S, user="me")
    assert sent(state, config(), 1, incident()) == []
    assert sent(state, config(), 61) == ["raised"]


def test_silence_of_an_open_alert_stops_updates_but_not_the_end(state):
    sent(state, config(), 1, incident())
    state.silence(Match(kind=("straggler",)), until_ns=T0_NS + 900 * S, user="me")
    assert sent(state, config(), 2, incident(severity="critical", updated_ns=T0_NS + 2 * S)) == []
    assert sent(state, config(), 60, incident(end_s=20, severity="critical")) == ["resolved"]


def test_silence_of_another_tenant_has_no_effect(state):
    state.silence(Match(node=("*",)), until_ns=T0_NS + 60 * S, user="me", tenant="other")
    assert sent(state, config(), 1, incident()) == ["raised"]


def test_silence_without_condition_is_refused(state):
    with pytest.raises(BadInput, match="needs a condition"):
        state.silence(Match(), until_ns=T0_NS, user="me")


def test_acknowledged_alert_reports_only_higher_severity_and_the_end(state):
    sent(state, config(), 1, incident(severity="medium"))
    (alert,) = state.listed()
    state.acknowledge(alert["key"], "me", T0_NS + S)
    assert sent(state, config(), 2, incident(severity="medium", ranks=[2, 3], updated_ns=T0_NS + 2 * S)) == []
    assert sent(state, config(), 3, incident(severity="high", updated_ns=T0_NS + 3 * S)) == ["updated"]
    state.acknowledge(alert["key"], "me", T0_NS + 4 * S)
    assert sent(state, config(), 60, incident(end_s=20, severity="high")) == ["resolved"]


def test_another_tenant_can_neither_see_nor_acknowledge_an_alert(state):
    sent(state, config(), 1, incident())
    (alert,) = state.listed()
    assert state.listed("other") == []
    with pytest.raises(NotFound, match="no alert"):
        state.acknowledge(alert["key"], "me", T0_NS, "other")


def test_incidents_of_one_node_are_one_alert(state):
    by_node = config(group_by="node")
    jobs = [incident(f"job{number}", ranks=[number]) for number in range(10)]
    assert sent(state, by_node, 1, *jobs) == ["raised"]
    (alert,) = state.listed()
    assert len(alert["incidents"]) == 10
    assert "9 more incidents" in alert["title"]
    assert sent(state, by_node, 60, *(incident(f"job{n}", end_s=10, ranks=[n]) for n in range(9))) == [
        "updated"
    ]
    assert sent(state, by_node, 100, incident("job9", end_s=20, ranks=[9])) == ["resolved"]
    assert sent(state, by_node, 200, incident("later", begin_s=150)) == ["raised"]


def test_failed_delivery_waits_and_is_not_lost(state):
    state.note([incident()])
    state.evaluate(config(), T0_NS)
    (delivery,) = state.due("hook", T0_NS)
    state.failed("hook", delivery, "refused", T0_NS + 5 * S)
    assert state.due("hook", T0_NS + 4 * S) == []
    (again,) = state.due("hook", T0_NS + 5 * S)
    assert (again.change, again.revision, again.n_failures) == ("raised", delivery.revision, 1)
    assert state.listed()[0]["last_error"] == "refused"


def test_alerts_of_a_hub_without_configuration_are_only_recorded(state):
    state.note([incident(end_s=3)])
    state.evaluate(None, T0_NS + 50 * S)
    assert sent(state, config(), 60) == []
    assert len(state.incidents(0)) == 1


@pytest.mark.parametrize("content", [b"no database" * 100, None], ids=["garbage", "truncated"])
def test_a_damaged_file_is_set_aside_and_alerts_start_again(
    state: AlertState, path: Path, content: bytes | None
):
    """A hub must start: the state of its alerts is worth less than the rows that it could not receive."""
    assert sent(state, config(), 0, incident()) == ["raised"]
    state.close()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    with closing(AlertState.renewed_if_damaged(path)) as again:
        assert not again.incidents(0)
        again.evaluate(config(), T0_NS - S)
        assert sent(again, config(), 1, incident()) == ["raised"]
    (aside,) = path.parent.glob("alerts.db.damaged-*[0-9]")
    assert aside.stat().st_size > 0
    path.with_name("alerts.db.newer").mkdir()
    with pytest.raises(StorageFailed):
        AlertState.renewed_if_damaged(path.with_name("alerts.db.newer"))
