"""`alerts test` lists the alerts that a live run has sent, for all kinds of routes."""

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.alerts.builders import T0_NS, S, config, incident

from stallscope.alerts.dry_run import planned
from stallscope.alerts.incident import Incident
from stallscope.alerts.state import AlertState

END_S, EVERY_S = 600, 10
"""Incidents begin and end at multiples of EVERY_S, when the live run evaluates."""

ROUTES: tuple[dict[str, Any], ...] = (
    {},
    {"min_duration": "90s"},
    {"group_by": "node"},
    {"group_by": ["cluster", "kind"], "min_duration": "40s"},
    {"match": {"owner": "ann"}},
    {"min_gpu_seconds": 100},
)


def incidents(draw: random.Random) -> list[Incident]:
    """Eight incidents on three machines, of which some do not end."""
    out = []
    for number in range(8):
        begin_s = EVERY_S * draw.randrange(1, 40)
        end_s = begin_s + EVERY_S * draw.randrange(1, 25) if draw.random() < 0.8 else None
        values = {"nodes": [f"node-{draw.randrange(3)}"], "gpu_seconds": draw.choice([20.0, 200.0])}
        owner = {"user": draw.choice(["ann", "bob"])}
        out.append(incident(f"v{number}", begin_s=begin_s, end_s=end_s, owner=owner, **values))
    return out


def live(path: Path, all_incidents: list[Incident], route: dict[str, Any]) -> list[tuple[str, str]]:
    """The changes that a hub sends while these incidents happen."""
    sent = []
    with closing(AlertState(path)) as state:
        state.evaluate(config(**route), T0_NS)
        for at_s in range(EVERY_S, END_S, EVERY_S):
            now_ns = T0_NS + at_s * S
            begun = [
                replace(each, closed_ns=None, updated_ns=now_ns)
                for each in all_incidents
                if each.opened_ns == now_ns
            ]
            state.note(begun + [each for each in all_incidents if each.closed_ns == now_ns])
            state.evaluate(config(**route), now_ns)
            while due := state.due("hook", now_ns):
                for delivery in due:
                    sent.append((delivery.notice.key, delivery.change))
                    state.delivered("hook", delivery, now_ns)
    return [change for change in sent if change[1] != "updated"]


@pytest.mark.parametrize("number", range(len(ROUTES)))
def test_dry_run_lists_the_alerts_of_a_live_run(tmp_path: Path, number: int):
    route = ROUTES[number]
    all_incidents = incidents(random.Random(number))
    sent = live(tmp_path / "alerts.db", all_incidents, route)
    plan = planned(config(**route), all_incidents, T0_NS + (END_S - EVERY_S) * S)
    assert sorted((each.notice.key, each.change) for each in plan) == sorted(sent)
    assert any(change == "raised" for _, change in sent)
