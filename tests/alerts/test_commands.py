"""`stallscope alerts`, and the alerts over HTTP."""

import json
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import ASGIApp
from tests.alerts.builders import S, incident

from stallscope.alerts.config import load
from stallscope.alerts.state import AlertState, state_path
from stallscope.errors import StallscopeError
from stallscope.serve import alerts_api
from stallscope.serve.http_errors import refused
from stallscope.serve.tokens import Identity

NOW_S = round(time.time())


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "alerts.yaml"
    hook = {"type": "webhook", "url": "http://127.0.0.1:9/", "key": {"file": str(tmp_path / "key")}}
    path.write_text(json.dumps({"receivers": {"hook": hook}, "routes": [{"receivers": "hook"}]}))
    return path


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A hub's folder with two incidents of the last hour: open on node-a, closed on node-b."""
    folder = tmp_path / "hub"
    folder.mkdir()
    ago_s = NOW_S - 1_760_000_000
    with closing(AlertState(state_path(folder))) as state:
        state.evaluate(None, (NOW_S - 7200) * S)
        state.note(
            [
                incident("open", begin_s=ago_s - 600),
                incident("over", begin_s=ago_s - 3000, end_s=ago_s - 2000, nodes=["node-b"]),
            ]
        )
    return folder


def test_check_reads_the_secrets(run, config_file):
    code, _, errors = run("alerts", "check", config_file)
    assert code == 2
    assert "receivers.hook.key: the file" in errors
    (config_file.parent / "key").write_text("secret")
    code, out, _ = run("alerts", "check", config_file)
    assert (code, out) == (0, f"{config_file}: 1 receivers, 1 routes; valid\n")


def test_dry_run_lists_the_alerts_that_a_running_hub_raises(run, config_file, db):
    code, out, _ = run("alerts", "test", config_file, "--db", db, "--json")
    assert code == 0
    planned = [(row["change"], row["incidents"]) for row in json.loads(out)]
    assert planned == [("raised", ["over"]), ("resolved", ["over"]), ("raised", ["open"])]
    with closing(AlertState(state_path(db))) as state:
        state.evaluate(load(config_file), NOW_S * S)
        assert {tuple(alert["incidents"]) for alert in state.listed()} == {("over",), ("open",)}


def test_dry_run_names_the_time_without_records(run, config_file, db, tmp_path):
    assert "are not recorded" in run("alerts", "test", config_file, "--db", db)[1]
    assert "are not recorded" not in run("alerts", "test", config_file, "--db", db, "--since", "10m")[1]


def test_list_acknowledge_and_silence(run, config_file, db):
    with closing(AlertState(state_path(db))) as state:
        state.evaluate(load(config_file), NOW_S * S)
        (key,) = [alert["key"] for alert in state.listed() if alert["incidents"] == ["open"]]
    assert run("alerts", "acknowledge", key, "--user", "ann", "--db", db)[0] == 0
    assert run("alerts", "silence", "--for", "2h", "--node", "node-*", "--user", "ann", "--db", db)[0] == 0
    code, out, _ = run("alerts", "list", "--db", db)
    assert code == 0
    assert "acknowledged by ann" in out
    assert "by ann: node node-*" in out
    silence_id = out.partition("silence ")[2].split()[0]
    assert run("alerts", "unsilence", silence_id, "--db", db)[0] == 0
    assert "silence" not in run("alerts", "list", "--db", db)[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["acknowledge", "nothing"], "no alert 'nothing'"),
        (["unsilence", "nothing"], "no silence 'nothing'"),
        (["silence", "--for", "2h"], "needs a condition"),
        (["silence", "--for", "2h", "--kind", "bad"], "--kind: Input should be"),
    ],
)
def test_wrong_words_are_one_line(run, db, words, message):
    code, _, errors = run("alerts", *words, "--db", db)
    assert code != 0
    assert message in errors
    assert errors.count("\n") == 1


def application(state: AlertState, identity: Identity) -> ASGIApp:
    """The routes behind a layer that identifies every request as `identity`."""

    async def error(request: Request, raised: Exception):
        assert isinstance(raised, StallscopeError)
        return refused(raised)

    inner = Starlette(
        routes=alerts_api.routes(state, has_receivers=True), exception_handlers={StallscopeError: error}
    )

    async def app(scope, receive, send):
        scope.setdefault("state", {})["identity"] = identity
        await inner(scope, receive, send)

    return app


async def exchange(
    state: AlertState, tenant: str, *requests: tuple[str, str, object]
) -> list[httpx.Response]:
    identity = Identity(tenant, frozenset({"read"}), "t1")
    transport = httpx.ASGITransport(application(state, identity))
    async with httpx.AsyncClient(transport=transport, base_url="http://hub") as client:
        return [await client.request(method, path, json=body) for method, path, body in requests]


def test_tenant_manages_only_its_own_alerts_over_http(config_file, db):
    import asyncio

    silencing = {"match": {"node": ["node-*"]}, "duration": "2h"}
    with closing(AlertState(state_path(db))) as state:
        state.evaluate(load(config_file), NOW_S * S)
        listed, made = asyncio.run(
            exchange(
                state,
                "default",
                ("GET", "/api/v1/alerts?state=open", None),
                ("POST", "/api/v1/alerts/silences", silencing),
            )
        )
        (key,) = [alert["key"] for alert in listed.json()["alerts"] if alert["incidents"] == ["open"]]
        silence_path = f"/api/v1/alerts/silences/{made.json()['silence_id']}"
        answers = asyncio.run(
            exchange(
                state,
                "other",
                ("GET", "/api/v1/alerts", None),
                ("POST", f"/api/v1/alerts/{key}/acknowledge", None),
                ("DELETE", silence_path, None),
                ("POST", "/api/v1/alerts/silences", silencing | {"duration": "900d"}),
            )
        )
        assert answers[0].json() == {"has_receivers": True, "alerts": [], "silences": []}
        assert [answer.status_code for answer in answers[1:]] == [404, 404, 400]
        done = asyncio.run(
            exchange(
                state,
                "default",
                ("POST", f"/api/v1/alerts/{key}/acknowledge", None),
                ("DELETE", silence_path, None),
            )
        )
    assert made.status_code == 201
    assert [answer.status_code for answer in done] == [200, 204]
