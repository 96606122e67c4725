"""A statement asked of three nodes answers what one trace of all three would."""

import math
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from stallscope.errors import BadInput, OverLimits, RefusedQuery, Unreachable
from stallscope.query import fanout
from stallscope.query.distributed_sql import split
from stallscope.query.sql import Answer, Limits, ask

from .fleet import Fleet, fleet, job_trace

pytestmark = pytest.mark.live

EVERYTHING = Limits(max_rows=10_000)

LIKE_ONE_TRACE = [
    "SELECT count(*) FROM collectives",
    "SELECT count(*), sum(count_bytes), min(ts_ns), max(ts_ns), avg(count_bytes) FROM collectives",
    "SELECT op_name(op) AS what, count(*) AS n, avg(count_bytes) FROM collectives GROUP BY 1 ORDER BY n DESC, 1",
    "SELECT node_name(node) AS machine, rank_of(node, pid) AS r, count(*) FROM collectives GROUP BY 1, 2 ORDER BY r",
    "SELECT rank_of(node, pid) AS r, max(sleep_ns) / 1000000 FROM snapshots GROUP BY r HAVING max(sleep_ns) > 1e8",
    "SELECT rank_of(node, pid) AS r, ts_ns, seq FROM collectives ORDER BY seq DESC, r LIMIT 17 OFFSET 5",
    "SELECT rank_of(node, pid) AS r FROM collectives ORDER BY wait_leave_ns, ts_ns, r LIMIT 9",
    "SELECT seq FROM collectives WHERE op = 1 ORDER BY ts_ns LIMIT 3",
    "SELECT count(DISTINCT seq), median(count_bytes), quantile_cont(count_bytes, 0.95) FROM collectives",
    "SELECT DISTINCT op, count_bytes FROM collectives ORDER BY op, count_bytes DESC",
    "SELECT seq, count(*) FILTER (WHERE count_bytes > 100) AS big FROM collectives GROUP BY seq ORDER BY seq LIMIT 5",
    "SELECT rank_of(node, pid) AS r, seq, row_number() OVER (PARTITION BY seq, comm_hash"
    " ORDER BY rank_of(node, pid)) AS place FROM collectives WHERE seq < 4 ORDER BY seq, r, comm_hash",
    "SELECT sum(c.count_bytes) / count(*), p.local_rank FROM collectives c JOIN processes p"
    " ON p.node = c.node AND p.pid = c.pid GROUP BY p.local_rank ORDER BY 2",
    "SELECT count(*) FROM collectives WHERE pid IN (SELECT pid FROM processes WHERE local_rank = 1)",
    "WITH late AS (SELECT node, pid, seq FROM collectives WHERE seq > 20) SELECT count(*), max(seq) FROM late",
    "SELECT sum(count_bytes), avg(seq), max(seq), count(seq) FROM collectives WHERE seq < 0",
    "SELECT seq FROM collectives WHERE seq < 0 ORDER BY seq",
    "SELECT count(*) + 1, -sum(seq), round(avg(seq), 3), CASE WHEN max(seq) > 5 THEN 'many' ELSE 'few' END"
    " FROM collectives",
]
"""Statements whose answer does not depend on how a trace numbers its nodes; with a complete order, or one row."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("fleet"), job_trace()) as running:
        yield running


def asked(nodes: Fleet, statement: str, limits: Limits = EVERYTHING) -> Answer:
    rows = fanout.query(statement, nodes.addresses, nodes.access(), limits=limits)
    assert not rows.failures
    return rows.answer


def as_one(nodes: Fleet, statement: str) -> Answer:
    return ask(nodes.whole, statement, limits=EVERYTHING)


def same(value: object, other: object) -> bool:
    if isinstance(value, float) or isinstance(other, float):
        return value == other or math.isclose(value, other, rel_tol=1e-12)
    return value == other


@pytest.mark.parametrize("statement", LIKE_ONE_TRACE)
def test_the_answer_is_that_of_one_trace(nodes: Fleet, statement: str):
    result, wanted = asked(nodes, statement), as_one(nodes, statement)
    assert len(result.rows) == len(wanted.rows)
    rows = [row[1:] if result.columns[0] == "node" else row for row in result.rows]
    for row, other in zip(rows, wanted.rows, strict=True):
        assert all(same(a, b) for a, b in zip(row, other, strict=True)), (row, other)
    assert result.columns[-len(wanted.columns) :] == wanted.columns


def test_rows_of_all_nodes_with_the_node_once(nodes: Fleet):
    result = asked(nodes, "SELECT pid, seq FROM collectives WHERE seq = 3")
    assert result.columns == ("node", "pid", "seq")
    wanted = as_one(nodes, "SELECT node_name(node), pid, seq FROM collectives WHERE seq = 3")
    assert sorted(result.rows) == sorted(wanted.rows)
    whole = asked(nodes, "SELECT * FROM collectives WHERE seq = 3")
    assert whole.columns.count("node") == 1
    assert {row[whole.columns.index("node")] for row in whole.rows} == {"node0000", "node0001", "node0002"}


def test_a_node_is_named_in_conditions_and_groups(nodes: Fleet):
    result = asked(nodes, "SELECT count(*) FROM collectives WHERE node = 'node0001'")
    assert (
        result.rows
        == as_one(nodes, "SELECT count(*) FROM collectives WHERE node_name(node) = 'node0001'").rows
    )
    result = asked(nodes, "SELECT node, count(*) FROM collectives GROUP BY node ORDER BY node")
    assert result.columns == ("node", "count(*)")
    assert [row[0] for row in result.rows] == ["node0000", "node0001", "node0002"]


@pytest.mark.pure
def test_aggregates_are_computed_on_the_nodes_where_possible():
    assert split("SELECT op, count(*), avg(seq) FROM collectives GROUP BY op").kind == "groups"
    sorted_ = split("SELECT seq FROM collectives ORDER BY ts_ns LIMIT 5 OFFSET 2")
    assert (sorted_.kind, "LIMIT 7" in sorted_.node_sql) == ("sorted", True)
    assert split("SELECT median(seq) FROM collectives").kind == "all"


@pytest.mark.pure
@pytest.mark.parametrize(
    ("statement", "error", "says"),
    [
        (
            "SELECT seq FROM collectives WHERE ts_ns > (SELECT avg(ts_ns) FROM collectives)",
            RefusedQuery,
            "merge",
        ),
        ("SELECT n FROM (SELECT count(*) AS n FROM calls GROUP BY pid)", RefusedQuery, "inner query"),
        ("SELECT seq FROM collectives UNION SELECT ts_ns FROM calls", RefusedQuery, "UNION"),
        ("SELECT *, count(*) FROM collectives GROUP BY pid", RefusedQuery, "name the columns"),
        ("SELECT pid, count(*) FROM collectives", RefusedQuery, "pid must be in GROUP BY"),
        ("SELECT seq FROM collectives LIMIT (SELECT 3)", RefusedQuery, "LIMIT"),
        ("DELETE FROM collectives", RefusedQuery, "only read"),
        ("SELECT sq FROM collectives", BadInput, "did you mean seq"),
        ("SELECT seq FROM collective", BadInput, "did you mean collectives"),
        ("SELECT 1; SELECT 2", BadInput, "more than one"),
    ],
)
def test_statements_without_a_correct_distributed_answer_are_refused(
    nodes: Fleet, statement: str, error: type, says: str
):
    with pytest.raises(error, match=says):
        asked(nodes, statement)


def test_the_limit_is_that_of_the_whole_answer(nodes: Fleet):
    result = asked(nodes, "SELECT seq FROM collectives", Limits(max_rows=10))
    assert (len(result.rows), result.is_cut) == (10, True)
    result = asked(nodes, "SELECT seq FROM collectives ORDER BY ts_ns", Limits(max_rows=10))
    assert (len(result.rows), result.is_cut) == (10, True)


def test_rows_that_were_cut_off_are_never_computed_with(nodes: Fleet, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fanout, "MAX_NODE_ROWS", 100)
    with pytest.raises(OverLimits, match="more than 100 rows"):
        asked(nodes, "SELECT median(seq) FROM collectives")


def test_a_silent_node_is_named_and_the_other_nodes_answer(nodes: Fleet):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"127.0.0.1:{silent.getsockname()[1]}"
        access = nodes.access(timeout_s=2.0)
        rows = fanout.query(
            "SELECT count(*) FROM collectives", [dead, *nodes.addresses[:2]], access, limits=EVERYTHING
        )
    assert [(f.address, "2 s" in f.reason) for f in rows.failures] == [(dead, True)]
    wanted = "SELECT count(*) FROM collectives WHERE node_name(node) IN ('node0000', 'node0001')"
    assert rows.answer.rows == as_one(nodes, wanted).rows
    with pytest.raises(Unreachable, match="no node answered: localhost:1: Connection refused"):
        fanout.query("SELECT 1 FROM calls", ["localhost:1"], access, limits=EVERYTHING)


def test_nodes_with_the_same_name_are_distinguished_by_address(nodes: Fleet):
    """The same machine at two addresses represents two machines with the same name."""
    port = nodes.addresses[0].partition(":")[2]
    twins = [f"127.0.0.1:{port}", f"localhost:{port}"]
    rows = fanout.query(
        "SELECT node, count(*) FROM collectives GROUP BY node ORDER BY node",
        twins,
        nodes.access(),
        limits=EVERYTHING,
    )
    assert [row[0] for row in rows.answer.rows] == [f"node0000 ({address})" for address in twins]


def test_asking_does_not_change_the_traces(nodes: Fleet):
    before = [(db.read_bytes(), db.stat().st_mtime_ns) for db in nodes.dbs]
    asked(nodes, "SELECT count(*) FROM collectives")
    assert before == [(db.read_bytes(), db.stat().st_mtime_ns) for db in nodes.dbs]
    with closing(sqlite3.connect(nodes.dbs[0])) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
