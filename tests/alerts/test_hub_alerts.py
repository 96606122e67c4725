"""The alerts of a hub: from rows of its store to a receiver, across a restart; a real Alertmanager; the rules."""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.alerts.builders import incident
from tests.alerts.receiving import receiving
from tests.store.hub.rows import events

from stallscope.alerts import service
from stallscope.alerts.config import validated
from stallscope.alerts.state import AlertState, state_path
from stallscope.events.verdict_fields import FIELDS
from stallscope.store.hub import schema
from stallscope.store.hub.store import Batch, HubStore

from ..patience import until


def row(*, is_open: bool, severity: str = "high") -> pa.Table:
    """The row of `verdicts` of an incident that began a minute ago."""
    now = datetime.now(UTC)
    values = incident(since_ns=time.time_ns() - 60 * 10**9, severity=severity).row
    lists = {field.name for field in FIELDS if field.type in ("texts", "integers")}
    stored = {name: json.dumps(value) if name in lists else value for name, value in values.items()}
    stored |= {"verdict_id": "v1", "cluster_id": "c1", "state": "open" if is_open else "closed"}
    stored |= {"opened_at": now, "updated_at": now, "closed_at": None if is_open else now, "verdict": "{}"}
    return pa.Table.from_pylist(
        [stored], schema=schema.arrow_schema(schema.VERDICTS, without=schema.GIVEN_BY_HUB)
    )


def commit(store: HubStore, *, is_open: bool, severity: str = "high") -> None:
    """Store the row, and an event, because a tenant without events has no data."""
    tables = {"verdicts": row(is_open=is_open, severity=severity), "events": events(["started"])}
    store.append(Batch("", "default", tables)).result(30)


def test_incident_is_one_alert_over_a_restart_of_the_hub(tmp_path: Path):
    with receiving() as received:
        config = validated(
            {
                "resolve_after": "0s",
                "receivers": {"hook": {"type": "webhook", "url": received.url}},
                "routes": [{"receivers": "hook"}],
            },
            "alerts.yaml",
        )

        def types() -> list[str]:
            return [body["type"].rpartition(".")[2] for _, body in received.requests]

        for is_open in (True, False):
            with closing(HubStore.open(tmp_path / "hub")) as store:
                state = AlertState(state_path(store.folder))
                with closing(service.of_hub(store, state, config)):
                    commit(store, is_open=is_open)
                    until(lambda is_open=is_open: types() == ["raised"] if is_open else "resolved" in types())
        assert types() == ["raised", "resolved"]
        (first, last) = (body["data"] for _, body in received.requests)
        assert first["key"] == last["key"]
        assert last["end_ns"] is not None


@pytest.fixture
def alertmanager(repository: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a running Alertmanager."""
    program = repository / "build/alertmanager/usr/bin/prometheus-alertmanager"
    if not program.exists():
        pytest.skip("alertmanager: it was not downloaded (make setup)")
    if os.geteuid():
        pytest.skip("alertmanager: needs root for a mount namespace")
    (tmp_path / "alertmanager.yml").write_text("route: {receiver: none}\nreceivers: [{name: none}]\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # The program reads its templates from /usr/share.
    script = 'mount --bind "$0" /usr/share && exec "$@"'
    command = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        script,
        program.parents[1] / "share",
        program,
        f"--config.file={tmp_path}/alertmanager.yml",
        f"--storage.path={tmp_path}/data",
    ]
    command += [f"--web.listen-address={address}", "--cluster.listen-address="]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
    try:
        until(lambda: is_ready(f"http://{address}"))
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
            return True
    except OSError:
        return False


def alerts_of(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/v2/alerts", timeout=5) as answer:
        return list(json.load(answer))


def with_severity(url: str, severity: str) -> list[dict[str, Any]]:
    """All alerts, if the severity of each is this severity."""
    alerts = alerts_of(url)
    return alerts if all(alert["annotations"]["severity"] == severity for alert in alerts) else []


def test_alertmanager_shows_one_alert_until_the_incident_is_over(tmp_path: Path, alertmanager: str):
    config = validated(
        {
            "resolve_after": "0s",
            "receivers": {"am": {"type": "alertmanager", "url": alertmanager}},
            "routes": [{"receivers": "am"}],
        },
        "alerts.yaml",
    )
    with closing(HubStore.open(tmp_path / "hub")) as store:
        with closing(service.of_hub(store, AlertState(state_path(store.folder)), config)):
            commit(store, is_open=True)
            (alert,) = until(lambda: alerts_of(alertmanager))
            assert alert["labels"]["alertname"] == "StallscopeIncident"
            assert alert["annotations"]["summary"] == "Rank 2 (host node-a) slows down the job."
            assert alert["annotations"]["severity"] == "high"
        with closing(service.of_hub(store, AlertState(state_path(store.folder)), config)):  # after a restart
            commit(store, is_open=True, severity="critical")
            (changed,) = until(lambda: with_severity(alertmanager, "critical"))
            assert changed["fingerprint"] == alert["fingerprint"]
            commit(store, is_open=False)
            until(lambda: not alerts_of(alertmanager))


def test_prometheus_rules_fire_as_their_test_file_states(repository: Path):
    promtool = repository / "build/prometheus/usr/bin/promtool"
    if not promtool.exists():
        pytest.skip("promtool: it was not downloaded (make setup)")
    rules = repository / "deploy/prometheus/stallscope-rules.test.yaml"
    done = subprocess.run([promtool, "test", "rules", rules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
