"""`stallscope report job`: the post-mortem of a job of a hub, and of a node trace."""

import json
import re
from pathlib import Path

import pytest
from tests.diagnose.builders import MS, dp_trace, every
from tests.serve.answering import answering
from tests.serve.tools import cluster

from stallscope.commands import job_page, job_report
from stallscope.store import node
from stallscope.store.hub.store import Batch

JOB = "00112233aabbccdd"
REASON = {"reason": "2 of 10 ranks are not in this trace", "action": "Trace them as well."}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    """Words for the command: the hub's address and a token. The job has two incidents."""
    folder = tmp_path_factory.mktemp("hub")
    with cluster.hub_in(folder / "store") as made:
        verdict = cluster.verdict("alpha").to_pylist()[0] | {"job": JOB}
        verdict |= {"verdict_id": "small", "gpu_seconds": 5.0, "advice": '["Move the logs."]', "usd": None}
        whole = {
            "evidence": {"n_steps": 7, "stack": ["train.py:12"]},
            "closed_because": "on time for 40 steps",
        }
        whole |= {"recommendation": {"action": "look", "because": "the cause is in the job"}, "causes": []}
        large = verdict | {
            "verdict_id": "large",
            "gpu_seconds": 900.0,
            "summary": "Rank 3 stalls.",
            "state": "closed",
        }
        large |= {"verdict": json.dumps(whole), "advice": '["Replace the disk.", "Move the logs."]'}
        job = {
            "cluster_id": "alpha",
            "job": JOB,
            "begin_ns": cluster.T0_NS,
            "last_ns": cluster.T0_NS + 10**11,
        }
        job |= {"ended_ns": cluster.T0_NS + 10**11, "n_ranks": 8, "members": '[["alpha-node-0", 1003, 3]]'}
        job |= {"answer": "found", "reasons": json.dumps([REASON]), "evidence": json.dumps({"n_steps": 40})}
        rows = {"verdicts": cluster.table("verdicts", [verdict, large]), "jobs": cluster.table("jobs", [job])}
        for name, table in (rows | {"collectives": cluster.collectives("alpha")}).items():
            made.store.append(Batch("", "a", {name: table})).result(30)
        with answering(made, folder) as result:
            token = folder / "token"
            token.write_text(result.token(("read",), "a"))
            yield ["--hub", result.url, "--token-file", token]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "job.db"
    node.write(path, dp_trace(every(2, 7, 50 * MS)))
    return path


def test_job_of_a_hub_has_timeline_incidents_and_changes_by_cost(run, hub):
    code, out, _ = run("report", "job", JOB, *hub, "--format", "json")
    report = json.loads(out)
    assert (code, report["answer"], report["n_ranks"]) == (0, "found", 8)
    assert [each["verdict_id"] for each in report["incidents"]] == ["large", "small"]
    assert report["cost"]["gpu_seconds"] == 905.0
    events = [each["event"] for each in report["timeline"]]
    assert (events[0], events[-1], "over" in events) == ("begin", "end", True)
    assert [each["change"] for each in report["changes"]] == [
        "Move the logs.",
        "Replace the disk.",
        REASON["action"],
    ]


def test_text_and_page_hold_the_same_facts(run, hub):
    text = run("report", "job", JOB, *hub)[1]
    page = run("report", "job", JOB, *hub, "--format", "html")[1]
    for words in (
        "Rank 3 stalls.",
        "at train.py:12",
        "on time for 40 steps",
        "look: the cause",
        REASON["reason"],
    ):
        assert words in text
        assert words in page
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)


def test_unknown_job_is_one_line(run, hub):
    code, _, errors = run("report", "job", "none", *hub)
    assert (code, errors.count("\n")) == (3, 1)
    assert "no job 'none'" in errors


def test_trace_has_the_same_report(run, trace, tmp_path):
    text = run("report", "job", "--trace", trace)[1]
    report = json.loads(run("report", "job", "--trace", trace, "--format", "json")[1])
    explained = json.loads(run("explain", trace, "--json")[1])
    assert report["summary"] == explained["verdicts"][0]["summary"]
    assert report["cost"]["gpu_seconds"] == explained["verdicts"][0]["cost"]["gpu_seconds"]
    assert report["summary"] in text
    assert explained["verdicts"][0]["advice"][0] in text


def test_summary_at_the_end_of_a_trace_fits_a_screen(trace, run):
    explained = json.loads(run("explain", trace, "--json")[1])
    verdicts = [explained["verdicts"][0] | {"summary": f"Rank {n} is late."} for n in range(50)]
    screen = job_report.as_screen(job_report.of_report(explained | {"verdicts": verdicts}, "job.db"))
    assert screen.count("\n") < 20
    assert "(49 more incidents)" in screen


def test_inconclusive_trace_is_not_healthy(run, trace):
    explained = json.loads(run("explain", trace, "--json")[1])
    made = job_report.of_report(
        explained | {"answer": "inconclusive", "verdicts": [], "gaps": [REASON]}, "job.db"
    )
    assert made["summary"] == f"Inconclusive: {REASON['reason']}."
    assert made["changes"][0]["change"] == REASON["action"]


def test_names_are_escaped(run, trace):
    explained = json.loads(run("explain", trace, "--json")[1])
    verdict = explained["verdicts"][0] | {"summary": "<img onerror=x>", "advice": ["<b>"]}
    page = job_page.as_html(job_report.of_report(explained | {"verdicts": [verdict]}, "<job>"))
    assert not re.search("<img|<b>|<job>", page)


@pytest.mark.parametrize("words", [[], ["x", "--trace", "y"], ["x", "--format", "pdf"]])
def test_wrong_words_are_one_line(run, words):
    code, _, errors = run("report", "job", *words)
    assert (code, errors.count("\n")) == (2, 1)
