"""The tools of one machine as a real MCP client sees them: over standard streams, and over HTTPS."""

import json
import os
import re
import ssl
import sys
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from stallscope import rates
from stallscope.assistant import mcp_server
from stallscope.assistant.node_context import Node
from stallscope.events import layout
from stallscope.events.names import Category
from stallscope.serve import node_api as api
from stallscope.serve.node_files import NodeFiles
from stallscope.settings import Settings
from stallscope.store import node as store

from ..diagnose.builders import MS, Gone, Job, data_parallel, trace_of
from ..diagnose.slack import VICTIM as LATE_IN_SLACK
from ..diagnose.slack import slack_trace
from ..query.fleet import VICTIM, Fleet, fleet, job_trace, served

TOOLS = {
    "get_causal_chains",
    "get_check",
    "get_stacks",
    "get_trace_stats",
    "graph_frequency",
    "graph_lifecycle",
    "latency",
    "query_fleet",
    "run_demo",
    "run_analysis",
    "verdicts",
}


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "trace.db"
    store.write(path, job_trace())
    return path


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("fleet"), job_trace()) as running:
        yield running


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STALLSCOPE_")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@asynccontextmanager
async def over_streams(db: Path):
    """A client of `stallscope mcp`, started as an assistant starts it."""
    parameters = StdioServerParameters(
        command=sys.executable,
        args=["-c", "from stallscope.cli import main; main()", "mcp", "--db", str(db)],
        env=environment(),
    )
    async with Client(stdio_client(parameters)) as client:
        yield client


@asynccontextmanager
async def in_this_process(db: Path, **more: Any):
    """A client of the same server, without a process between them."""
    async with Client(mcp_server.made(Node(Settings(db=db), **more))) as client:
        yield client


@asynccontextmanager
async def over_https(db: Path, folder: Path):
    """A client of /mcp of `stallscope serve`, with its token."""
    files = NodeFiles(folder / "api")
    options = api.Options(db=db, listen="127.0.0.1:0", node="here", files=files.folder)
    routes, lifespan = mcp_server.parts(Node(Settings(db=db)))
    with served(options, parts=routes, lifespan=lifespan) as address:
        trusted = ssl.create_default_context(cafile=files.ca)
        headers = {"Authorization": f"Bearer {files.token.read_text().strip()}"}
        async with (
            httpx2.AsyncClient(headers=headers, verify=trusted, timeout=60) as http_client,
            Client(streamable_http_client(f"https://{address}/mcp", http_client=http_client)) as client,
        ):
            yield client


async def called(client: Client, name: str, **arguments: Any) -> dict[str, Any]:
    """The answer of a tool; its text is the same data."""
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    assert json.loads(result.content[0].text) == result.structured_content
    return result.structured_content


@pytest.mark.parametrize("way", ["streams", "https"])
def test_an_investigation_with_several_tools_finds_the_culprit(db: Path, tmp_path: Path, way: str):
    async def investigate() -> None:
        opened = over_streams(db) if way == "streams" else over_https(db, tmp_path)
        async with opened as client:
            listed = (await client.list_tools()).tools
            assert {tool.name for tool in listed} == TOOLS
            prompt = await client.get_prompt("investigate", {"symptom": "steps take twice as long"})
            text = prompt.messages[0].content.text
            assert "twice as long" in text
            assert all(name in TOOLS for name in re.findall(r"\b(?:get|explain|run|query)_\w+", text))
            assert "verdicts without a rank" in text

            stats = await called(client, "get_trace_stats", since_s=1000)
            assert stats["n_ranks"] == 12
            matches = await called(client, "verdicts")
            (verdict,) = matches["rows"]
            assert (verdict["ranks"], verdict["cause"]) == ([VICTIM], "host_sleep")
            assert verdict["full"] is None
            assert len(json.dumps(matches)) < 2000
            whole = await called(client, "verdicts", rank=VICTIM, detail="full")
            assert whole["summary"].startswith("It is the culprit")
            assert whole["rows"][0]["full"]["evidence"]
            other = await called(client, "verdicts", rank=0)
            assert other["summary"].startswith("It waits for other ranks")
            rows = await called(client, "run_analysis", sql="SELECT count(*) AS n FROM collectives")
            assert (rows["columns"], rows["rows"]) == (["n"], [[len(store.read(db).collectives)]])

    anyio.run(investigate)


def test_the_listed_price_of_the_gpu_is_used_unless_one_is_given(tmp_path: Path):
    db = tmp_path / "trace.db"
    store.write(db, replace(job_trace(), facts={"gpu": "NVIDIA H100 80GB HBM3"}))

    async def cost(**settings: Any) -> tuple[float, float | None]:
        async with Client(mcp_server.made(Node(Settings(db=db, **settings)))) as client:
            (verdict,) = (await called(client, "verdicts"))["rows"]
            assert (verdict["at_most_gpu_seconds"], verdict["at_most_usd"]) == (None, None)
            return verdict["gpu_seconds"], verdict["usd"]

    async def ask() -> None:
        seconds, usd = await cost()
        by_hour = rates.lookup(rates.load(), gpu="NVIDIA H100 80GB HBM3").rate.usd_per_hour
        assert usd == pytest.approx(seconds / 3600 * by_hour, rel=0.01)
        assert (await cost(usd_per_gpu_hour=360.0))[1] == pytest.approx(seconds / 10, rel=0.01)

    anyio.run(ask)


COSTS = ("gpu_seconds", "usd", "at_most_gpu_seconds", "at_most_usd")


def test_both_bounds_of_a_cost_are_returned_for_a_node_and_a_fleet(tmp_path: Path):
    trace = slack_trace(ranks_per_node=4)
    db = tmp_path / "trace.db"
    store.write(db, trace)

    async def ask(agents: Fleet) -> None:
        context = Node(Settings(db=db, usd_per_gpu_hour=3600.0), agents.addresses, agents.access())
        async with Client(mcp_server.made(context)) as client:
            verdict = (await called(client, "verdicts", detail="full"))["rows"][0]
            assert verdict["ranks"] == [LATE_IN_SLACK]
            least, usd, most, max_usd = (verdict[name] for name in COSTS)
            assert 0 <= least < most == pytest.approx(max_usd, abs=0.001) and usd < max_usd
            cost = verdict["full"]["cost"]
            assert (cost["gpu_seconds"], cost["at_most_gpu_seconds"]) == (least, most)
            chains = await called(client, "query_fleet", action="chains", since_s=None)
            assert set(COSTS) < set(chains["columns"])
            row = dict(zip(chains["columns"], chains["rows"][0], strict=True))
            assert row["ranks"] == [LATE_IN_SLACK]
            assert row["gpu_seconds"] < row["at_most_gpu_seconds"]
            assert row["at_most_usd"] == pytest.approx(row["at_most_gpu_seconds"], abs=0.001)

    with fleet(tmp_path, trace) as agents:
        anyio.run(ask, agents)


def test_every_other_tool_answers(db: Path):
    async def ask() -> None:
        async with in_this_process(db) as client:
            assert (await called(client, "get_check"))["summary"].endswith(("pass", "not"))
            for name in ("get_causal_chains", "get_stacks", "graph_lifecycle", "graph_frequency"):
                assert (await called(client, name))["summary"]
            demo = await called(client, "run_demo", scenario="hang")
            assert "rank 2 has not entered" in demo["answer"]

    anyio.run(ask)


def test_the_stacks_of_a_hang_show_the_frame_of_the_missing_rank(tmp_path: Path):
    loader, waits = ("/app/train.py:88 load_batch", "/app/train.py:10 main"), ("/app/gpu.py:5 synchronize",)
    trace = trace_of(Job(data_parallel(), gone=(Gone(2, 30, 1, Category.IO),), quiet_ns=30_000 * MS))
    positions = layout.empty(layout.POSITIONS, 2 * len(trace.processes) + 1)
    silent_ns = int(trace.collectives["ts_ns"].max()) + 10**10
    examined = [(process, silent_ns + n * 10**9) for n in (0, 1) for process in trace.processes]
    for row, (process, ts_ns) in zip(positions, examined, strict=False):
        row["ts_ns"], row["pid"], row["tid"] = ts_ns, process["pid"], process["pid"]
        row["stack"] = 1 if process["rank"] == 2 else 2
    positions[-1] = positions[0]
    positions[-1]["tid"] += 1000
    path = tmp_path / "trace.db"
    store.write(path, replace(trace, positions=positions, stacks={1: loader, 2: waits}))

    async def ask() -> None:
        async with in_this_process(path) as client:
            output = await called(client, "get_stacks", since_s=1000, limit=10)
            assert output["summary"] == "rank 2 was last seen at /app/train.py:88 load_batch"
            first, *others, helper = output["positions"]
            assert (first["rank"], first["n_looks"], first["frames"]) == (2, 2, list(loader))
            assert [other["frames"] for other in others] == [list(waits)] * 3
            assert (helper["tid"], helper["n_looks"]) == (int(positions[-1]["tid"]), 1)
            matches = await called(client, "verdicts", detail="full")
            (verdict,) = matches["rows"]
            assert verdict["kind"] == "hang" and verdict["ranks"] == [2]
            assert "/app/train.py:88 load_batch" in json.dumps(verdict)
            assert "py-spy" not in json.dumps(verdict)
            other = await called(client, "get_stacks", since_s=1000, pid=first["pid"], frames=1)
            assert [row["frames"] for row in other["positions"]] == [list(loader[:1])]

    anyio.run(ask)


def test_invalid_calls_return_errors_and_change_no_data(db: Path):
    async def ask() -> None:
        async with in_this_process(db) as client:
            for name, arguments, says in (
                ("run_analysis", {"sql": "DELETE FROM collectives"}, "may only read"),
                ("run_sql", {"sql": "SELECT sq FROM collectives"}, "did you mean seq"),
                ("explain_rank", {"rnk": 1}, "rnk: unknown argument"),
                ("verdicts", {"detail": "all"}, "detail"),
                ("query_fleet", {}, "no other machines are known"),
            ):
                result = await client.call_tool(name, arguments)
                assert result.is_error
                assert says in result.content[0].text

    before = db.read_bytes()
    anyio.run(ask)
    assert db.read_bytes() == before


def test_the_error_for_a_missing_trace_names_the_trace_command(tmp_path: Path):
    async def ask() -> None:
        async with in_this_process(tmp_path / "none.db") as client:
            result = await client.call_tool("verdicts", {})
            assert result.is_error
            assert "stallscope trace --db" in result.content[0].text

    anyio.run(ask)


def test_the_fleet_is_asked(nodes: Fleet, db: Path):
    others = [*nodes.addresses, "127.0.0.1:1"]

    async def ask() -> None:
        async with in_this_process(db, nodes=others, access=nodes.access()) as client:
            overview = await called(client, "query_fleet", since_s=None)
            assert [row[0] for row in overview["rows"]] == ["node0000", "node0001", "node0002"]
            assert overview["missing"] == [{"node": "127.0.0.1:1", "reason": "Connection refused"}]
            chains = await called(client, "query_fleet", action="chains", since_s=None)
            (row,) = (dict(zip(chains["columns"], values, strict=True)) for values in chains["rows"])
            assert (row["ranks"], row["nodes"], row["cause"]) == ([VICTIM], ["node0001"], "host_sleep")
            assert row["gpu_seconds"] > 0 and row["at_most_gpu_seconds"] is None
            sql = "SELECT count(*) FROM collectives"
            rows = await called(client, "query_fleet", action="sql", sql=sql, since_s=None)
            assert rows["rows"] == [[len(store.read(db).collectives)]]
            assert (await called(client, "query_fleet", action="ops", since_s=None))["columns"][0] == "node"

    anyio.run(ask)


def test_the_lateness_threshold_comes_from_the_settings(db):
    from stallscope.assistant.tools.trace_verdicts import VerdictsParams, verdicts

    strict, patient = Settings(db=db), Settings(db=db, min_late_ms=1e6)
    assert [row["ranks"] for row in verdicts(Node(strict), VerdictsParams()).rows] == [[VICTIM]]
    assert verdicts(Node(patient), VerdictsParams()).rows == []
