"""Deliveries to a real server: each change arrives once, in spite of failures in between."""

import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.alerts.builders import T0_NS, S, config, incident
from tests.alerts.receiving import Received, receiving

from stallscope.alerts.delivery import DeliveryCounts, retry_wait_s, send_once
from stallscope.alerts.receivers.http import DeliveryFailed, post
from stallscope.alerts.state import AlertState


@pytest.fixture
def server() -> Iterator[Received]:
    with receiving() as received:
        yield received


def attempt(state: AlertState, url: str, now_ns: int) -> DeliveryCounts:
    """One attempt at every due change."""
    counts, configuration = DeliveryCounts(), config(url)
    for delivery in state.due("hook", now_ns):
        send_once(state, configuration, "hook", delivery, lambda: now_ns, counts)
    return counts


def changes(received: Received) -> list[str]:
    return [body["type"].rpartition(".")[2] for _, body in received.requests]


def test_busy_receiver_gets_the_change_after_the_time_that_it_asks_for(tmp_path, server):
    with closing(AlertState(tmp_path / "alerts.db")) as state:
        state.note([incident()])
        state.evaluate(config(), T0_NS)
        server.fail = (429, {"Retry-After": "30"})
        attempt(state, server.url, T0_NS)
        server.fail = None
        attempt(state, server.url, T0_NS + 29 * S)
        assert server.requests == []
        attempt(state, server.url, T0_NS + 30 * S)
        assert changes(server) == ["raised"]
        assert state.listed()[0]["last_error"] == ""


def test_error_of_a_receiver_is_stored_without_its_address(tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/services/secret"
        with closing(AlertState(tmp_path / "alerts.db")) as state:
            state.note([incident()])
            state.evaluate(config(), T0_NS)
            assert attempt(state, url, T0_NS).alert_delivery_failures == 1
            (alert,) = state.listed()
    assert "cannot be reached" in alert["last_error"]
    assert "secret" not in alert["last_error"]


def test_redirect_is_an_error(server):
    server.fail = (302, {"Location": "http://127.0.0.1:1/"})
    with pytest.raises(DeliveryFailed, match="answered 302"):
        post(server.url, {})


@pytest.mark.parametrize("url", ["file:///etc/passwd", "hooks", "http:///x"])
def test_address_that_is_not_http_is_refused(url):
    with pytest.raises(DeliveryFailed):
        post(url, {})


def test_waits_double_up_to_five_minutes():
    transient = DeliveryFailed("down")
    assert [retry_wait_s(n, transient, 1.0) for n in range(4)] == [1, 2, 4, 8]
    assert retry_wait_s(30, transient, 1.0) == 300
    assert retry_wait_s(0, DeliveryFailed("wrong key", is_permanent=True), 1.0) == 300
    assert retry_wait_s(0, DeliveryFailed("busy", retry_after_s=60), 0.0) == 60


def schedule(folder: Path, seed: int, received: Received) -> None:
    """A random history of three incidents, with restarts, a failing receiver, and late readings of the source."""
    draw = random.Random(seed)
    ends_s = {f"v{number}": draw.uniform(5, 200) for number in range(3)}
    state = SimpleNamespace(now=AlertState(folder / f"{seed}.db"))
    state.now.evaluate(config(), T0_NS - S)
    at_s, down_until_s = 0.0, 0.0
    while at_s < 1200:
        at_s += draw.uniform(0.5, 10)
        now_ns = T0_NS + round(at_s * S)
        if draw.random() < 0.05:
            state.now.close()
            state.now = AlertState(folder / f"{seed}.db")
        if draw.random() < 0.05 and at_s < 600:
            down_until_s = at_s + draw.uniform(1, 60)
        received.fail = (draw.choice((429, 500, 503)), {}) if at_s < down_until_s else None
        if draw.random() < 0.8:  # the source is read late
            state.now.note(
                incident(
                    name,
                    end_s=end_s if at_s >= end_s else None,
                    updated_ns=min(now_ns, T0_NS + round(end_s * S)),
                )
                for name, end_s in ends_s.items()
            )
        state.now.evaluate(config(), now_ns)
        if draw.random() < 0.8:
            attempt(state.now, received.url, now_ns)
    state.now.close()


@pytest.mark.parametrize("seed", range(5))
def test_every_incident_is_raised_and_resolved_once_under_faults(tmp_path, server, seed):
    schedule(tmp_path, seed, server)
    assert_once(server)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(5, 50))
def test_every_incident_is_raised_and_resolved_once_under_more_faults(tmp_path, server, seed):
    schedule(tmp_path, seed, server)
    assert_once(server)


def assert_once(received: Received) -> None:
    by_incident = Counter((body["subject"], body["type"].rpartition(".")[2]) for _, body in received.requests)
    keys = {key for key, _ in by_incident}
    assert len(keys) == 3
    assert all(by_incident[key, "raised"] == by_incident[key, "resolved"] == 1 for key in keys)
    for key in keys:
        order = [body["type"].rpartition(".")[2] for _, body in received.requests if body["subject"] == key]
        assert (order[0], order[-1]) == ("raised", "resolved")
