"""`stallscope report cost` against a hub that is served."""

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.serve.answering import answering
from tests.serve.tools import cluster


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    """Words for the command: the hub's address and a token."""
    folder = tmp_path_factory.mktemp("hub")
    with cluster.hub_in(folder / "store") as made:
        cluster.fill(made.store, "a", "alpha")
        with answering(made, folder) as result:
            token = folder / "token"
            token.write_text(result.token(("read",), "a"))
            yield ["--hub", result.url, "--token-file", token, "--since", "20000d"]


def test_formats_hold_the_same_rows(run, hub):
    groups = ["--by", "cluster,rank"]
    code, out, _ = run("report", "cost", *hub, *groups, "--format", "json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert {row["by"] for row in rows} == {"cluster", "rank"}
    read = list(csv.DictReader(io.StringIO(run("report", "cost", *hub, *groups, "--format", "csv")[1])))
    assert [row["group"] for row in read] == [row["group"] for row in rows]
    assert [float(row["gpu_seconds"]) for row in read] == [row["gpu_seconds"] for row in rows]
    text = run("report", "cost", *hub, *groups)[1]
    assert all(row["group"][:31] in text for row in rows)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.n_rows = 0

    def handle_starttag(self, tag, attrs):
        self.n_rows += tag == "tr"
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_loads_no_resources(run, hub, tmp_path: Path):
    path = tmp_path / "cost.html"
    assert run("report", "cost", *hub, "--format", "html", "-o", path)[0] == 0
    page = path.read_text()
    tags = Tags()
    tags.feed(page.replace("<rect", "<rect").replace("/>", ">"))
    assert tags.open == []
    assert tags.n_rows >= 2
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)


@pytest.mark.parametrize(
    ("words", "message"), [(["--by", "moon"], "--by moon"), (["--format", "pdf"], "--format pdf")]
)
def test_wrong_words_are_one_line(run, hub, words, message):
    code, _, errors = run("report", "cost", *hub, *words)
    assert code == 2
    assert message in errors
    assert errors.count("\n") == 1


def test_names_are_escaped():
    from stallscope.commands.cost_page import as_html

    row = {"cluster": "<img onerror=x>", "n_incidents": 1, "gpu_seconds": 1.0, "at_most_gpu_seconds": None}
    row |= {"usd": None, "at_most_usd": None, "usd_per_hour": None}
    page = as_html({"cluster": {"summary": "1 incident.", "rows": [row]}}, "t")
    assert "<img" not in page
    assert "no price" in page


@pytest.mark.parametrize("report", ["cost", "goodput"])
def test_a_report_on_an_owner_without_a_job_is_empty(run, hub, report):
    words = ["report", report, *hub, "--format", "json"]
    assert json.loads(run(*words)[1])["rows"]
    assert json.loads(run(*words, "--owner", "nobody", "--namespace", "vision")[1])["rows"] == []
    code, _, errors = run(*words, "--job", "9999")
    assert code != 0
    assert "no job '9999'" in errors


@pytest.mark.parametrize("by", ["job", "user"])
def test_goodput_has_the_same_rows_in_each_format(run, hub, by):
    words = ["report", "goodput", *hub, "--by", by, "--per-day"]
    code, out, _ = run(*words, "--format", "json")
    assert code == 0
    rows = json.loads(out)["rows"]
    read = list(csv.DictReader(io.StringIO(run(*words, "--format", "csv")[1])))
    assert [float(row["gpu_hours"]) for row in read] == [row["gpu_hours"] for row in rows]
    assert json.loads(out)["summary"] in run(*words)[1]
    assert run(*words, "--format", "pdf")[0] == 2
