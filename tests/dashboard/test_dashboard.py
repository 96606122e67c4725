"""`stallscope dashboard` and `explain --html`: the page over the trace of one machine."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from stallscope.commands.report import diagnosed
from stallscope.dashboard.html_file import write_html
from stallscope.dashboard.local_server import Options, serve
from stallscope.dashboard.trace_jobs import is_of, report_batch
from stallscope.dashboard.trace_rows import last_ns
from stallscope.dashboard.trace_store import TENANT, TraceStore, opened
from stallscope.demo.recorded_job import recorded
from stallscope.diagnose import Member, diagnose
from stallscope.errors import BadInput, NotFound
from stallscope.events import layout
from stallscope.events.names import Category
from stallscope.events.trace import Trace
from stallscope.page import assets
from stallscope.settings import Settings
from stallscope.store import node

from ..diagnose.builders import MS, dp_trace, every

PATIENCE_S = 60.0


def slow_job() -> Trace:
    """A data-parallel job in which rank 2 waits for a disk in every seventh step."""
    return replace(dp_trace(every(2, 7, 50 * MS, category=Category.IO)), nodes=("host-a",))


def test_a_verdict_is_of_the_job_whose_process_it_names_on_that_machine():
    """Two machines whose processes have the same numbers."""
    verdict = diagnose(slow_job()).verdicts[0]
    members = (Member(verdict.nodes[0], verdict.pids[0], 2),)
    assert is_of(verdict, members)
    assert not is_of(verdict, (Member("host-b", verdict.pids[0], 2),))
    assert is_of(replace(verdict, pids=[]), (Member("host-b", 1, 0),))


def test_the_job_of_a_trace_has_the_owner_of_its_processes(tmp_path: Path):
    trace = slow_job()
    owners = layout.empty(layout.OWNERS, len(trace.processes))
    owners["node"], owners["pid"] = trace.processes["node"], trace.processes["pid"]
    owners["owner_user"], owners["owner_job"] = b"ann", np.arange(len(owners)).astype("S4")
    batch = report_batch(replace(trace, owners=owners), diagnose(trace), "c", is_over=True)
    (job,) = batch.tables["jobs"].to_pylist()
    assert (job["owner_user"], job["owner_job"]) == ("ann", None)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "job.db"
    node.write(path, slow_job())
    return path


@contextmanager
def served(db: Path) -> Iterator[str]:
    """A running dashboard; gives its one-time link."""
    links: list[str] = []
    is_ready, stop = threading.Event(), threading.Event()

    def announce(link: str) -> None:
        links.append(link)
        is_ready.set()

    options = Options(db=db, settings=Settings(db=db))
    thread = threading.Thread(
        target=serve,
        args=(options, lambda trace: diagnosed(trace, options.settings)),
        kwargs={"announce": announce, "stop": stop},
    )
    thread.start()
    try:
        assert is_ready.wait(PATIENCE_S)
        yield links[0]
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def test_the_dashboard_answers_as_explain_and_its_link_works_once(db: Path):
    (wanted,) = diagnose(node.read(db)).verdicts
    with served(db) as link, httpx.Client(base_url=link.partition("/open/")[0]) as client:
        assert client.get("/api/v1/page/jobs").status_code == 401
        opened = client.get(link)
        assert (opened.status_code, opened.headers["location"]) == (303, "/ui")
        assert httpx.get(link).status_code == 401
        (row,) = client.get("/api/v1/page/jobs").json()["rows"]
        assert (row["state"], row["rank"], row["cause"], row["cluster"]) == (
            "straggler",
            2,
            "block_io",
            "job",
        )
        assert row["late_ms"] == pytest.approx(wanted.late_ms["median"]) and row["summary"] == wanted.summary
        facts = client.get("/api/v1/page/evidence", params={"job": row["job"], "rank": 2}).json()
        assert facts["late_step"]["rows"][0]["category"] == "io"
        health = client.get("/api/v1/page/jobs").json()["health"]
        assert (health["trace"], health["is_live"]) == ("job.db", True)  # the file has just been written
        assert facts["late_step"]["rows"][0]["excess_ms"] == pytest.approx(50, rel=0.1)
        question = {"sql": "SELECT count(*) FROM collectives"}
        same_origin = {"Sec-Fetch-Site": "same-origin"}
        answer = client.post("/api/v1/sql", json=question, headers=same_origin).json()
        assert "rows" in answer, answer
        assert answer["rows"] == [[len(node.read(db).collectives)]]


@pytest.mark.parametrize("trace_of", [slow_job, recorded], ids=["simulated", "recorded"])
def test_every_number_of_the_page_is_the_answer_of_explain_and_of_the_tools(
    tmp_path: Path, trace_of: Callable[[], Trace]
):
    db = tmp_path / "job.db"
    node.write(db, trace_of())
    report = diagnose(node.read(db))
    (wanted,) = report.verdicts
    with served(db) as link, httpx.Client(base_url=link.partition("/open/")[0]) as client:
        client.get(link)
        (row,) = client.get("/api/v1/page/jobs").json()["rows"]
        rank = wanted.ranks[0]
        facts = client.get("/api/v1/page/evidence", params={"job": row["job"], "rank": rank}).json()
        job = client.get("/api/v1/page/job", params={"job": row["job"]}).json()
        tool = {
            name: client.post(
                f"/api/v1/tools/fleet.cluster.{name}",
                json=arguments,
                headers={"Sec-Fetch-Site": "same-origin"},
            ).json()
            for name, arguments in (("explain_rank", {"rank": rank}), ("verdicts", {}))
        }
    shares = {part["category"]: part["share"] for part in facts["budget"]}
    assert shares == {name: share for name, share in report.budget.shares.items() if share >= 0.001}
    assert facts["ledger"] == tool["explain_rank"]["rows"] and facts["ledger"]
    assert facts["n_rounds"] == tool["explain_rank"]["rounds"]["n_rounds"]
    for name in ("off_cpu", "slow_calls"):
        assert [part["ms"] for part in facts[name]] == [
            part["duration_ms"] for part in tool["explain_rank"][name]
        ]
    (stored,) = tool["verdicts"]["rows"]
    for name in ("late_ms", "summary", "cause", "confidence", "period_steps", "n_late_rounds", "severity"):
        assert job["verdict"][name] == stored[name]
    lost = (stored["gpu_seconds"], stored["at_most_gpu_seconds"] or stored["gpu_seconds"])
    assert row["gpu_seconds_lost"] == [round(seconds, 2) for seconds in lost]
    assert row["n_ranks"] == tool["verdicts"]["jobs"][0]["n_ranks"] == report.examined["n_ranks"]


def test_a_recording_is_over_and_a_growing_trace_is_live(tmp_path: Path):
    with opened("job") as trace_store:
        trace = slow_job()
        trace_store.load(trace, diagnose(trace), is_live=True)
        (running,) = job_table(trace_store)
        trace_store.end()
        (ended,) = job_table(trace_store)
    assert running["ended_ns"] is None and ended["ended_ns"] == ended["last_ns"] == last_ns(trace)
    assert (ended["answer"], ended["n_ranks"]) == ("found", len(np.unique(trace.collectives["pid"])))


def test_a_verdict_that_a_later_reading_no_longer_reports_is_closed(tmp_path: Path):
    with opened("job") as trace_store:
        trace = slow_job()
        report = diagnose(trace)
        trace_store.load(trace, report, is_live=True)
        trace_store.load(trace, replace(report, verdicts=[]), is_live=True)
        rows = trace_store.store.snapshot(TENANT, tables=("verdicts",)).hot["verdicts"].to_pylist()
    assert [row["state"] for row in rows] == ["closed"]


def job_table(trace_store: TraceStore) -> list[dict[str, Any]]:
    return trace_store.store.snapshot(TENANT, tables=("jobs",)).hot["jobs"].to_pylist()


def test_a_dashboard_listens_on_this_machine_only(db: Path):
    options = Options(db=db, listen="0.0.0.0:0", settings=Settings(db=db))
    with pytest.raises(BadInput, match="reachable from other machines"):
        serve(options, diagnose, announce=lambda link: None)


def test_the_html_file_contains_the_verdict_and_permits_only_its_own_script(tmp_path: Path):
    try:
        assets.index()
    except NotFound as error:
        pytest.skip(f"page: {error}")
    trace = slow_job()
    report = diagnose(trace)
    write_html(tmp_path / "job.html", trace, report, name="job")
    html = (tmp_path / "job.html").read_text()
    data = json.loads(re.search(r'id="snapshot">(.*?)</script>', html, re.S)[1])
    assert data["rows"][0]["summary"] == report.verdicts[0].summary and data["matrix"]
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert not re.search(r'(src|href)="', html)
