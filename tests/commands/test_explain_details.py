"""`explain` with tables by process and container, chains of slow calls, and listed prices."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from stallscope.events import layout
from stallscope.events.names import Category, Op
from stallscope.store import node

from ..diagnose.builders import MS, START_NS, dp_trace, every
from ..diagnose.reports import SCHEMA

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    """Rank 2 sleeps; ranks 0 and 1 are in a container; one allocation of rank 3 took long, off the CPU."""
    trace = dp_trace(every(2, 7, 50 * MS))
    labels = layout.empty(layout.ANNOTATIONS, 2)
    labels["ts_ns"], labels["pid"], labels["label"], labels["value"] = (
        1,
        (1000, 1001),
        b"container",
        b"abcdef012345",
    )
    calls = layout.empty(layout.CALLS, 9)
    calls["ts_ns"] = START_NS + 10 * MS * (1 + np.arange(9))
    calls["duration_ns"], calls["pid"], calls["tid"], calls["op"], calls["symbol"] = (
        1 * MS,
        1003,
        1003,
        Op.ALLOC,
        1,
    )
    calls["duration_ns"][8] = 40 * MS
    away = layout.empty(layout.OFFCPU, 1)
    away["ts_ns"], away["duration_ns"], away["pid"], away["tid"] = calls["ts_ns"][8] + MS, 30 * MS, 1003, 1003
    away["category"], away["by_comm"], away["by_pid"] = Category.PREEMPTED, b"hog", 7
    whole = replace(
        trace,
        annotations=labels,
        calls=calls,
        offcpu=away,
        symbols=("", "cudaMalloc"),
        facts={"gpu": "NVIDIA L4"},
    )
    path = tmp_path_factory.mktemp("details") / "trace.db"
    node.write(path, whole)
    return path


def test_the_tables_are_as_they_were_when_they_were_looked_at(run, db):
    code, out, err = run("explain", "--db", db, "--per-process", "--per-container", "--chains")
    assert (code, err) == (20, "")
    assert out == (GOLDEN / "explain_details.txt").read_text()


def test_json_has_the_detail_tables_next_to_the_verdicts(run, db):
    data = json.loads(run("explain", "--db", db, "--json", "--per-process", "--per-container", "--chains")[1])
    jsonschema.validate(data, SCHEMA)
    by_rank = {row["rank"]: row for row in data["processes"]}
    assert [by_rank[rank]["part"] for rank in range(4)] == ["victim", "victim", "culprit", "victim"]
    assert by_rank[2]["worst_ms"] == pytest.approx(50, abs=0.5)
    assert [(row["container"], row["ranks"]) for row in data["containers"]] == [
        ("", [2, 3]),
        ("abcdef012345", [0, 1]),
    ]
    (chain,) = data["chains"]
    assert chain["held_by"] == [{"category": "preempted", "share": 0.75, "by": "hog"}]


def test_detail_tables_are_added_only_on_request(run, db):
    data = json.loads(run("explain", "--db", db, "--json")[1])
    assert not {"processes", "containers", "chains"} & set(data)


def test_the_cost_uses_the_list_price_of_the_traced_gpu(run, db):
    data = json.loads(run("explain", "--db", db, "--json", "--provider", "aws")[1])
    price, cost = data["price"], data["verdicts"][0]["cost"]
    assert (price["gpu"], price["provider"]) == ("L4", "aws")
    assert cost["usd"] == pytest.approx(cost["gpu_seconds"] / 3600 * price["usd_per_hour"], abs=1e-4)
    assert (
        "Price: 0.81 USD per GPU hour, the list price of L4 (aws)"
        in run("explain", "--db", db, "--provider", "aws")[1]
    )


def test_a_given_price_or_gpu_overrides_the_traced_gpu(run, db):
    assert "price" not in json.loads(run("explain", "--db", db, "--json", "--usd-per-gpu-hour", "2")[1])
    assert json.loads(run("explain", "--db", db, "--json", "--gpu", "H100")[1])["price"]["gpu"] == "H100"
    code, out, err = run("explain", "--db", db, "--gpu", "Voodoo 2")
    assert (code, out) == (3, "")
    assert "Voodoo 2" in err


def test_a_custom_price_table_replaces_the_shipped_table(run, db, tmp_path):
    own = tmp_path / "rates.yaml"
    own.write_text("as_of: 2026-01-01\nproviders: {ours: []}\nrates: {ours: {L4: 0.25}, any: {L4: 0.5}}\n")
    data = json.loads(run("explain", "--db", db, "--json", "--rates", own, "--provider", "ours")[1])
    assert data["price"]["usd_per_hour"] == 0.25
    assert json.loads(run("explain", "--db", db, "--json", "--rates", own)[1])["price"]["usd_per_hour"] == 0.5


def test_rates_are_shown_filtered_and_checked(run, tmp_path):
    code, out, _ = run("rates", "--provider", "ec2")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()[1:-1]} == {"aws"}
    assert re.search(r"as of \d{4}-\d\d-\d\d", out)
    data = json.loads(run("rates", "--gpu", "NVIDIA H100 80GB HBM3", "--provider", "aws", "--json")[1])
    assert (data["gpu"], data["how"]) == ("H100", "provider")
    assert run("rates", "--gpu", "Voodoo 2")[0] == 3
    assert run("rates", "--provider", "nobody")[0] == 3
    (tmp_path / "bad.yaml").write_text("as_of: 2026-01-01\nrates: {aws: {L4: -1}}\n")
    code, out, err = run("rates", "--validate", tmp_path / "bad.yaml")
    assert (code, out) == (2, "")
    assert "bad.yaml" in err
    (tmp_path / "good.yaml").write_text("as_of: 2026-01-01\nproviders: {aws: []}\nrates: {aws: {L4: 1}}\n")
    assert "valid, 1 prices" in run("rates", "--validate", tmp_path / "good.yaml")[1]


@pytest.mark.parametrize("words", [("a.db", "b.db"), ("a.db", "--db", "b.db")])
def test_two_traces_are_to_be_merged_first(run, words):
    code, _, output = run("explain", *words)
    assert code == 2
    assert (
        output
        == "stallscope: explain reads one trace, not 2; first run `stallscope merge a.db b.db -o ALL.db`\n"
    )
