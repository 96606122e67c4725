"""The alerts of a running hub over HTTP: with a token, and with the session of a browser."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from tests.alerts.builders import S, config, incident

from stallscope import hub
from stallscope.alerts.state import AlertState, state_path
from stallscope.serve.tokens import FILE_NAME, Tokens

SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder and the address of a hub with an alert on the incident v1 of the tenant a."""
    folder = tmp_path_factory.mktemp("hub")
    now_s = time.time() - 1_760_000_000
    with closing(AlertState(state_path(folder))) as state:
        state.note([incident("v1", tenant="a", begin_s=now_s - 60, owner={"user": "ann"})])
        state.evaluate(config(), round((now_s + 1_760_000_000) * S))
    listen = "127.0.0.1:0"
    options = hub.Options(db=folder, otlp_grpc=listen, otlp_http=listen, api=listen)
    with hub.started(options) as ports:
        yield folder, f"http://127.0.0.1:{ports.api}"


@contextmanager
def signed_in(served: tuple[Path, str], tenant: str, *scopes: str) -> Iterator[httpx.Client]:
    folder, url = served
    token = Tokens(folder / FILE_NAME).create(scopes or ("read",), tenant)
    with httpx.Client(base_url=url, headers=SAME_ORIGIN, timeout=30) as client:
        assert client.post("/login", json={"token": token}).status_code == 200
        yield client


def alerts(client: httpx.Client, **params: str) -> list[dict[str, object]]:
    return list(client.get("/api/v1/alerts", params=params).json()["alerts"])


def test_session_of_the_tenant_acknowledges_and_silences(served):
    with signed_in(served, "a") as client:
        (alert,) = alerts(client, incident="v1", state="open")
        path = f"/api/v1/alerts/{alert['key']}/acknowledge"
        assert client.post(path, json={}).status_code == 200
        assert alerts(client)[0]["acknowledged_by"].startswith("token ")
        assert client.request("DELETE", path, json={}).status_code == 204
        assert alerts(client)[0]["acknowledged_by"] is None
        body = {"match": {"owner": ["ann"]}, "duration": "2h", "comment": "disk replaced"}
        made = client.post("/api/v1/alerts/silences", json=body)
        assert made.status_code == 201
        (silence,) = client.get("/api/v1/alerts").json()["silences"]
        assert silence["match"] == {"owner": ["ann"]}
        of_other = client.post("/api/v1/alerts/silences", json=body | {"match": {"owner": ["bob"]}}).json()
        covering = client.get("/api/v1/alerts", params={"incident": "v1"}).json()["silences"]
        assert covering == [silence]
        assert client.get("/api/v1/alerts", params={"incident": "v2"}).json()["silences"] == []
        other_path = f"/api/v1/alerts/silences/{of_other['silence_id']}"
        assert client.request("DELETE", other_path, json={}).status_code == 204
        silence_path = f"/api/v1/alerts/silences/{silence['silence_id']}"
        assert client.request("DELETE", silence_path, json={}).status_code == 204


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "same-origin", "Content-Type": "text/plain"},
    ],
)
def test_another_site_changes_no_alert(served, headers):
    with signed_in(served, "a") as client:
        (alert,) = alerts(client)
        for method, path in (
            ("POST", f"/api/v1/alerts/{alert['key']}/acknowledge"),
            ("DELETE", f"/api/v1/alerts/{alert['key']}/acknowledge"),
            ("POST", "/api/v1/alerts/silences"),
            ("DELETE", "/api/v1/alerts/silences/1"),
        ):
            sent = {"Content-Type": "application/json"} | headers
            assert client.request(method, path, content="{}", headers=sent).status_code == 403
        assert alerts(client)[0]["acknowledged_by"] is None


def test_another_tenant_and_a_token_without_read_change_no_alert(served):
    with signed_in(served, "a") as client:
        key = alerts(client)[0]["key"]
    with signed_in(served, "b") as client:
        assert alerts(client, incident="v1") == []
        assert client.post(f"/api/v1/alerts/{key}/acknowledge", json={}).status_code == 404
    folder, url = served
    header = {"Authorization": f"Bearer {Tokens(folder / FILE_NAME).create(('ingest',), 'a')}"}
    assert httpx.post(f"{url}/api/v1/alerts/{key}/acknowledge", headers=header).status_code == 403


def test_hub_without_receivers_reports_it(served):
    with signed_in(served, "a") as client:
        assert client.get("/api/v1/alerts").json()["has_receivers"] is False
