"""The layers of a request: bearer, audit, rate limit, body limit, handler; and its line in the log."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.serve.house import audited, client_of, house_in

from stallscope import __version__
from stallscope.errors import NotFound
from stallscope.serve import app
from stallscope.serve.app import AppContext, major_minor
from stallscope.serve.audit import AuditLog
from stallscope.serve.capabilities import SURFACES


async def _echo(request: Request) -> Response:
    request.state.identity.require("read")
    request.state.noted["tool"] = "echo"
    return JSONResponse({"n_bytes": len(await request.body()), "tenant": request.state.identity.tenant})


async def _missing(request: Request) -> Response:
    raise NotFound("rank 7 is not there; ask for another")


async def _broken(request: Request) -> Response:
    raise RuntimeError("a secret detail")


PARTS = (Route("/echo", _echo, methods=["POST"]), Route("/missing", _missing), Route("/broken", _broken))


def answer(
    house: AppContext, method: str, path: str, *, token: str | None = None, **more: object
) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with client_of(house, *PARTS, token=token) as client:
            return await client.request(method, path, **more)

    return asyncio.run(ask())


@pytest.fixture
def house(tmp_path: Path) -> Iterator[AppContext]:
    output = {"ingest": ["otlp"]}
    with house_in(tmp_path, capabilities=lambda: output, state=lambda: {"n_rows": 3}) as house:
        yield house


@pytest.fixture
def reader(house: AppContext) -> str:
    return house.tokens.create(["read"], "team-a")


def test_the_layers_stand_in_this_order():
    assert (app.peer_limit, app.bearer, app.audit, app.rate_limit, app.body_limit) == app.LAYERS


def test_versions_need_no_token_and_omit_the_patch_level(house: AppContext):
    output = answer(house, "GET", "/api/versions")
    assert output.status_code == 200
    flags = output.json()["capabilities"]
    assert flags.pop("ingest") == ["otlp"]
    assert flags == dict.fromkeys(SURFACES, False)
    assert output.json()["versions"]["stallscope"] == ".".join(__version__.split(".")[:2])
    assert [major_minor(v) for v in ("1.2.3", "0.1.0.dev3+g123", "2.0")] == ["1.2", "0.1", "2.0"]


def test_health_without_a_token_reports_only_that_the_hub_is_alive(house: AppContext, reader: str):
    assert answer(house, "GET", "/api/v1/health").json() == {"alive": True}
    full = answer(house, "GET", "/api/v1/health", token=reader).json()
    assert full == {"alive": True, "version": __version__, "n_rows": 3}
    house = replace(house, admin_state=lambda: {"rows_stored": 5})
    admin = house.tokens.create(["admin"], "team-a")
    assert answer(house, "GET", "/api/v1/health", token=admin).json()["rows_stored"] == 5
    assert "rows_stored" not in answer(house, "GET", "/api/v1/health", token=reader).json()
    assert answer(house, "GET", "/api/v1/health", token="wrong").status_code == 401


def test_metrics_of_all_tenants_need_the_scope_admin(house: AppContext, reader: str):
    assert answer(house, "GET", "/metrics").status_code == 401
    assert answer(house, "GET", "/metrics", token=reader).status_code == 403
    admin = house.tokens.create(["admin"], "team-a")
    output = answer(house, "GET", "/metrics", token=admin)
    assert output.status_code == 200
    assert 'stallscope_http_requests_total{method="GET",status="403"}' not in output.text  # another app's
    assert "# TYPE stallscope_http_requests_total counter" in output.text


def test_a_request_without_a_good_token_goes_no_further_and_is_logged_by_the_bearer_layer(
    house: AppContext, reader: str, tmp_path: Path
):
    for token in (None, "sst_0123456789ab_" + "x" * 43):
        output = answer(house, "POST", "/echo", token=token)
        assert output.status_code == 401
        assert output.headers["www-authenticate"].startswith("Bearer")
        assert output.json()["error"]["kind"] == "not_authenticated"
    assert [(line["event"], line["status"], line["path"]) for line in audited(tmp_path)] == [
        ("refused", 401, "/echo")
    ] * 2


def test_the_audit_log_has_the_tenant_token_tool_and_status(house: AppContext, reader: str, tmp_path: Path):
    output = answer(house, "POST", "/echo?token=abc", token=reader, content=b"12345")
    assert output.json() == {"n_bytes": 5, "tenant": "team-a"}
    (line,) = audited(tmp_path)
    assert (
        line.items()
        >= {
            "event": "request",
            "method": "POST",
            "path": "/echo",
            "status": 200,
            "tenant": "team-a",
            "token_id": reader.split("_")[1],
            "tool": "echo",
        }.items()
    )
    assert "abc" not in str(line)


def test_the_audit_log_sees_refusals_by_scope_and_by_rate(house: AppContext, tmp_path: Path):
    house = replace(house, requests_per_minute=2)
    token = house.tokens.create(["sql"], "a")

    async def ask() -> list[httpx.Response]:
        async with client_of(house, *PARTS, token=token) as client:
            return [await client.post("/echo") for _ in range(4)]

    done = asyncio.run(ask())
    assert [entry.status_code for entry in done] == [403, 403, 429, 429]
    assert done[0].json()["error"]["kind"] == "not_allowed"
    assert done[2].json()["error"]["kind"] == "too_many"
    assert 1 <= int(done[2].headers["retry-after"]) <= 60
    assert [line["status"] for line in audited(tmp_path)] == [403, 403, 429, 429]


def test_one_token_that_asks_too_much_does_not_slow_another(house: AppContext):
    house = replace(house, requests_per_minute=1)
    first, second = (house.tokens.create(["read"], tenant) for tenant in ("a", "b"))

    async def ask() -> list[int]:
        async with client_of(house, *PARTS) as client:
            return [
                (await client.post("/echo", headers={"Authorization": f"Bearer {token}"})).status_code
                for token in (first, first, second)
            ]

    assert asyncio.run(ask()) == [200, 429, 200]


def test_a_body_that_is_too_long_is_refused_whether_announced_or_not(house: AppContext):
    house = replace(house, max_body_bytes=10)
    token = house.tokens.create(["read"], "a")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"four"

    assert answer(house, "POST", "/echo", token=token, content=b"1234567890").status_code == 200
    for content in (b"12345678901", pieces()):
        output = answer(house, "POST", "/echo", token=token, content=content)
        assert (output.status_code, output.json()["error"]["kind"]) == (413, "too_large")
    output = answer(house, "POST", "/echo", token=token, headers={"Content-Length": "-1"})
    assert output.status_code == 413


def test_every_error_has_the_same_body(house: AppContext, reader: str, tmp_path: Path):
    output = [
        answer(house, "GET", "/missing", token=reader),
        answer(house, "GET", "/nowhere", token=reader),
        answer(house, "GET", "/echo", token=reader),
        answer(house, "GET", "/broken", token=reader),
    ]
    assert [entry.status_code for entry in output] == [404, 404, 405, 500]
    for entry in output:
        assert set(entry.json()) == {"error"}
        assert set(entry.json()["error"]) == {"kind", "message"}
    assert output[0].json()["error"] == {
        "kind": "not_found",
        "message": "rank 7 is not there; ask for another",
    }
    assert "secret" not in output[3].text
    assert "a secret detail" in audited(tmp_path)[-1]["failed"]


def test_no_token_is_ever_in_the_log(house: AppContext, reader: str, tmp_path: Path):
    secret = reader.split("_", 2)[2]
    answer(house, "GET", f"/nowhere/{reader}", token=reader)
    answer(house, "GET", f"/nowhere?t={reader}", headers={"Authorization": reader})
    answer(house, "POST", "/echo", token=reader[:-3])
    answer(house, "POST", "/echo", token=reader, headers={"User-Agent": reader})
    text = (tmp_path / "audit.jsonl").read_text()
    assert len(text.splitlines()) == 4
    assert secret[:20] not in text


def test_the_audit_log_is_for_its_owner_and_does_not_grow_for_ever(tmp_path: Path):
    log = AuditLog(tmp_path / "a.jsonl", max_bytes=2000, n_old=2)
    for number in range(200):
        log.info("request", number=number)
    log.close()
    files = sorted(tmp_path.glob("a.jsonl*"))
    assert len(files) == 3
    assert all(path.stat().st_size <= 2000 for path in files)
