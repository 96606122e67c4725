"""A statement's bounds include every row that its WHERE clause accepts, and exclude rows where they can."""

import json
import time

import duckdb
import pytest

from stallscope.store.hub.row_bounds import ALL_ROWS, RowBounds
from stallscope.store.hub.statement_bounds import TREE, statement_bounds

NOW_NS = time.time_ns()
HOUR_NS = 3600 * 10**9
PARAMS = {
    "from_ns": NOW_NS - 3 * HOUR_NS,
    "to_ns": NOW_NS - HOUR_NS,
    "none": None,
    "cluster": "b",
    "one": 1.5,
}
BOUNDED = [
    "ts_ns >= $from_ns AND ts_ns < $to_ns",
    "$from_ns::BIGINT <= x.ts_ns AND x.ts_ns <= $to_ns",
    "($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns) AND ($none::BIGINT IS NULL OR ts_ns < $none)",
    "ts_ns > epoch_ns(now()) - 3600e9",
    "ts_ns > epoch_ns(now() - INTERVAL 2 HOUR) AND rank > 1",
    "ts_ns < epoch_ns(current_timestamp) - 7200 * 1000000000::BIGINT",
    "ts_ns BETWEEN $from_ns AND $to_ns OR ts_ns = $to_ns + 5",
    f"ts_ns IN ({NOW_NS - HOUR_NS}, {NOW_NS - 2 * HOUR_NS})",
    f"ts_ns < {NOW_NS - HOUR_NS}.5",
    "cluster_id = 'a'",
    "cluster_id IN ('a', $cluster) AND ts_ns > $from_ns",
    "($cluster::VARCHAR IS NULL OR cluster_id = $cluster)",
    "(cluster_id = 'a' AND ts_ns < $from_ns) OR (cluster_id = 'b' AND ts_ns > $to_ns)",
]
UNBOUNDED = [
    "NOT (ts_ns > $from_ns)",
    "ts_ns > $from_ns OR rank = 1",
    "ts_ns > rank",
    "ts_ns > $none OR cluster_id = $none OR true",
    "cluster_id LIKE 'a%'",
    "cluster_id <> 'a'",
    "cluster_id >= 'a'",
    "ts_ns // 1000000000 > 5",
    "ts_ns > (SELECT min(ts_ns) FROM events)",
    "coalesce(ts_ns, 0) > $from_ns",
]


def bounds_of(text: str, **more: object) -> dict[str, RowBounds]:
    tree = json.loads(duckdb.execute(TREE, [text]).fetchone()[0])
    assert not tree["error"], tree
    return statement_bounds(tree, PARAMS | more, now_ns=time.time_ns(), within_s=10)


@pytest.fixture(scope="module")
def rows() -> duckdb.DuckDBPyConnection:
    """Rows every 20 minutes of 6 hours around now, and rows without a time or a cluster."""
    db = duckdb.connect()
    db.execute(
        f"CREATE TABLE events AS SELECT {NOW_NS} + (i - 15) * {HOUR_NS // 3} AS ts_ns, i % 4 AS rank,"
        " CASE i % 3 WHEN 0 THEN 'a' WHEN 1 THEN 'b' ELSE 'c' END AS cluster_id FROM range(18) r(i)"
        f" UNION ALL VALUES (NULL, 1, 'a'), ({NOW_NS}, 1, NULL), (NULL, NULL, NULL)"
    )
    return db


@pytest.mark.parametrize("condition", [*BOUNDED, *UNBOUNDED])
def test_each_accepted_row_is_within_the_bounds(rows: duckdb.DuckDBPyConnection, condition: str):
    text = f"SELECT x.ts_ns, x.cluster_id FROM events x WHERE {condition}"
    named = rows.extract_statements(text)[0].named_parameters
    accepted = rows.execute(text, {name: PARAMS[name] for name in named}).fetchall()
    bounds = bounds_of(text)["events"]
    assert accepted
    for ts_ns, cluster in accepted:
        assert ts_ns is None or bounds.from_ns <= ts_ns <= bounds.to_ns
        assert bounds.clusters is None or cluster in bounds.clusters
    assert (bounds == ALL_ROWS) == (condition in UNBOUNDED)


def test_bounds_are_not_much_wider_than_the_condition():
    bounds = bounds_of("SELECT * FROM events WHERE ts_ns >= $from_ns AND ts_ns < $to_ns AND cluster_id = 'a'")
    second_ns = 10**9
    assert PARAMS["from_ns"] - second_ns < bounds["events"].from_ns <= PARAMS["from_ns"]
    assert PARAMS["to_ns"] <= bounds["events"].to_ns < PARAMS["to_ns"] + second_ns
    assert bounds["events"].clusters == {"a"}


@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM events JOIN calls USING (pid) WHERE events.ts_ns > $from_ns AND calls.ts_ns > $from_ns",
        "SELECT * FROM events e, calls WHERE ts_ns > $from_ns",
        "SELECT * FROM events AS e(ts_ns, node_id) WHERE ts_ns > $from_ns",
        "SELECT rank AS ts_ns FROM events WHERE ts_ns > $from_ns",
        "SELECT * FROM (SELECT * FROM events) WHERE ts_ns > $from_ns",
        "SELECT * FROM events WHERE ts_ns > $from_ns UNION ALL SELECT * FROM events",
        "SELECT * FROM events WHERE ts_ns > $from_ns AND rank > (SELECT min(rank) FROM events)",
        "WITH events AS (SELECT * FROM events) SELECT * FROM events WHERE ts_ns > $from_ns",
        "SELECT (SELECT count(*) FROM events WHERE calls.ts_ns > $from_ns) FROM calls",
        "FROM events QUALIFY ts_ns > $from_ns",
    ],
)
def test_a_table_that_is_read_without_a_condition_has_no_bounds(text: str):
    assert bounds_of(text)["events"] == ALL_ROWS


def test_each_part_of_a_union_adds_its_rows():
    text = (
        "SELECT 1 FROM events WHERE cluster_id = 'a' UNION SELECT 1 FROM main.events WHERE cluster_id = 'b'"
    )
    assert bounds_of(text)["events"].clusters == {"a", "b"}


def test_values_beyond_int64_and_odd_values_are_no_error():
    text = "SELECT 1 FROM events WHERE ts_ns > $x"
    for value in (10**40, -(10**40), 1e300, float("inf"), float("nan"), True, "5", [1]):
        bounds = bounds_of(text, x=value)["events"]
        assert -(2**63) <= bounds.from_ns <= 2**63 - 1
    huge = f"SELECT 1 FROM events WHERE ts_ns < {'9' * 25} * {'9' * 25} * {'9' * 25}"
    assert bounds_of(huge)["events"] == ALL_ROWS
    deep = "SELECT 1 FROM events WHERE ts_ns > " + "+".join(["1"] * 250)
    assert set(bounds_of(deep).get("events", ALL_ROWS).as_json()) == {"clusters", "from_ns", "to_ns"}


def test_bounds_pass_through_json():
    for bounds in (ALL_ROWS, RowBounds(clusters=frozenset({"a", ""}), from_ns=-5)):
        assert RowBounds.of_json(json.loads(json.dumps(bounds.as_json()))) == bounds
