"""Refused requests: the first of a minute are written, the rest is summed up, and a valid token is not affected."""

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from mcp.server import Server

from stallscope.serve.app import AppContext
from stallscope.serve.audit import AuditLog
from stallscope.serve.mcp_transport import PATH, mounted
from stallscope.serve.plain_text import visible, without_paths
from stallscope.serve.refusals import Refusals, network

from .house import audited, client_of, house_in
from .test_app import PARTS

FORGED = "sst_0123456789ab_" + "x" * 43


def test_a_stranger_cannot_flush_the_audit_log_and_a_valid_token_still_passes(tmp_path: Path):
    with house_in(tmp_path) as plain, closing(Refusals(plain.audit, per_minute=5)) as refusals:
        house = replace(plain, refusals=refusals)
        good = house.tokens.create(["read"], "a")

        async def ask(token: str, n: int) -> list[int]:
            async with client_of(house, *PARTS, token=token) as client:
                return [(await client.post("/echo")).status_code for _ in range(n)]

        assert asyncio.run(ask(FORGED, 50)) == [401] * 5 + [429] * 45
        assert asyncio.run(ask(good, 3)) == [200] * 3
    lines = audited(tmp_path)
    assert [line["event"] for line in lines] == ["refused"] * 5 + ["request"] * 3 + ["refused_summary"]
    assert lines[-1]["n"] == 45 and lines[-1]["client"] == "127.0.0.1"


def test_a_summary_is_written_once_for_each_address_and_minute(tmp_path: Path):
    now_s = 100.0
    with closing(AuditLog(tmp_path / "audit.jsonl")) as audit:
        refusals = Refusals(audit, per_minute=1, clock_s=lambda: now_s)
        for client in ("10.0.0.1", "10.0.0.2", "10.0.0.1", "2001:db8::1", "2001:db8::2"):
            refusals.add(client, None, "status 401")
        refusals.summarise()
        assert audited(tmp_path) == []
        now_s += 60
        refusals.summarise()
        refusals.close()
    assert [(line["client"], line["n"]) for line in audited(tmp_path)] == [
        ("10.0.0.1", 1),
        ("2001:db8::/64", 1),
    ]


def test_two_lengths_end_the_connection(tmp_path: Path):
    with house_in(tmp_path) as house:
        token = house.tokens.create(["read"], "a")

        async def ask() -> tuple[int, str]:
            async with client_of(house, *PARTS, token=token) as client:
                headers = {"Content-Length": "3", "Transfer-Encoding": "chunked"}
                response = await client.post("/echo", content=b"abc", headers=headers)
                return response.status_code, response.headers["connection"]

        assert asyncio.run(ask()) == (400, "close")


@pytest.mark.parametrize("damage", ["{", json.dumps({"format": 1, "tokens": [3]}), "mode"])
def test_damaged_tokens_are_a_503_and_one_line_in_the_log(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
):
    with house_in(tmp_path) as house:
        token = house.tokens.create(["read"], "a")
        if damage == "mode":
            house.tokens.path.chmod(0o644)
        else:
            house.tokens.path.write_text(damage)

        async def ask(house: AppContext) -> list[tuple[int, str]]:
            async with client_of(house, *PARTS, token=token) as client:
                responses = [await client.post("/echo") for _ in range(3)]
                return [(each.status_code, each.json()["error"]["message"]) for each in responses]

        for status, message in asyncio.run(ask(house)):
            assert status == 503 and str(tmp_path) not in message
    assert len([record for record in caplog.records if "every token is refused" in record.message]) == 1


def test_invisible_characters_and_paths_leave_answers():
    tags = "".join(chr(0xE0000 + ord(letter)) for letter in "obey")
    hidden = f"rank\u200b 3{tags}\u202e\ufeff"
    assert visible({hidden: [hidden, 3, None]}) == {"rank 3": ["rank 3", 3, None]}
    assert without_paths("cannot read /var/lib/stallscope/hub/x.parquet: see GET /api/v1/tools/list") == (
        "cannot read <path>: see GET /api/v1/tools/list"
    )
    assert without_paths("5/6 of https://host:8081/api/v1/sql, km/h") == (
        "5/6 of https://host:8081/api/v1/sql, km/h"
    )


def test_addresses_of_one_network_count_together():
    assert network("::ffff:10.0.0.1") == network("10.0.0.1") == "10.0.0.1"
    assert network("2001:db8::1") == network("2001:db8::9")
    assert network("") == ""


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://127.0.0.1:8081", 200),
        ("http://[::1]:8081", 200),
        ("https://localhost", 200),
        ("http://elsewhere.example", 403),
        ("http://localhost.elsewhere.example", 403),
        ("http://127.0.0.1@elsewhere.example", 403),
        ("http://127.0.0.1.", 403),
        ("http://[::1", 403),
        ("null", 403),
        ("", 403),
    ],
)
def test_a_web_page_of_another_origin_cannot_use_the_tools(tmp_path: Path, origin: str | None, status: int):
    """A browser that was led to this address by another name sends the page's origin, and the token it may hold."""
    route, lifespan = mounted(Server("test"))
    headers = {"Accept": "application/json, text/event-stream"} | (
        {"Origin": origin} if origin is not None else {}
    )
    about = {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "page", "version": "1"},
    }
    question = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
    with house_in(tmp_path) as house:
        token = house.tokens.create(["read"], "a")

        async def ask() -> int:
            async with lifespan(None), client_of(house, route, token=token) as client:
                return (await client.post(PATH, json=question, headers=headers)).status_code

        assert asyncio.run(ask()) == status
