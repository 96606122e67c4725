"""Verdicts that machines have made: from the agent's rows to the hub's rows."""

import json
from types import SimpleNamespace

import pytest
from tests.serve.tools import cluster

from stallscope.continuous.machine_incidents import stated
from stallscope.exporters.node_verdicts import NodeVerdicts

S = 1_000_000_000


def line(change: str = "opened", kind: str = "latency", **more: object) -> dict[str, object]:
    return {
        "kind": kind,
        "incident": "0123456789abcdef",
        "change": change,
        "state": "closed" if change == "closed" else "open",
        "reason": "the trace has ended" if change == "closed" else "",
        "summary": "5 of 50 requests are late",
        "begin_ns": 10 * S,
        "end_ns": 12 * S,
        "attributes": {"stallscope.kind": kind, "stallscope.severity": "high", "stallscope.pids": [7]},
        "verdict": {"kind": kind, "evidence": {"line": "app.py:3 f"}},
        **more,
    }


def sent(rows, node: str = "node-0"):
    """The rows as the hub stores them."""
    values = [
        {"node_id": node, **{name: row[name].decode() for name in ("incident", "change", "verdict")}}
        for row in rows
    ]
    return cluster.table("node_verdicts", values)


def test_a_change_of_an_incident_becomes_a_verdict_of_its_machine():
    output = NodeVerdicts()
    output.take(line())
    ((row, chain),) = stated(sent(output.rows(20 * S)), "alpha", now_us=5)
    assert (row["kind"], row["state"], row["node_id"], row["since_ns"]) == (
        "latency",
        "open",
        "node-0",
        10 * S,
    )
    assert (row["severity"], json.loads(row["pids"]), row["summary"]) == (
        "high",
        [7],
        "5 of 50 requests are late",
    )
    assert json.loads(row["verdict"])["evidence"]["line"] == "app.py:3 f"
    assert chain["causal_chain_id"] == row["verdict_id"]
    output.take(line("closed"))
    ((closed, _),) = stated(sent(output.rows(21 * S)), "alpha", now_us=9)
    assert (closed["verdict_id"], closed["state"], closed["closed_at"]) == (row["verdict_id"], "closed", 9)


def test_the_same_incident_of_two_machines_is_two_incidents():
    output = NodeVerdicts()
    output.take(line())
    rows = output.rows(20 * S)
    ids = {row["verdict_id"] for node in ("a", "b") for row, _ in stated(sent(rows, node), "alpha", now_us=5)}
    assert len(ids) == 2


def test_open_incidents_are_repeated_every_minute():
    output = NodeVerdicts()
    output.take(line())
    assert [len(output.rows(at_s * S)) for at_s in (100, 101, 159, 160, 161)] == [1, 0, 0, 1, 0]
    output.take(line("closed"))
    assert [len(output.rows(at_s * S)) for at_s in (162, 300)] == [1, 0]


def test_other_kinds_stay_on_the_machine():
    output = NodeVerdicts()
    output.take(line(kind="straggler"))
    assert len(output.rows(S)) == 0


def test_a_long_verdict_loses_its_details():
    output = NodeVerdicts()
    output.take(line(verdict={"evidence": {"stack": ["frame"] * 5000}}))
    ((row, _),) = stated(sent(output.rows(S)), "alpha", now_us=5)
    assert (row["kind"], row["verdict"]) == ("latency", "{}")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"row": {"kind": "straggler"}, "verdict": {}, "reason": ""}', '{"row": 1}']
)
def test_rows_that_are_not_verdicts_are_left_out(text):
    rows = [SimpleNamespace(incident=b"1", change=b"opened", verdict=text.encode())]
    assert list(stated(sent([vars(row) for row in rows]), "alpha", now_us=5)) == []
