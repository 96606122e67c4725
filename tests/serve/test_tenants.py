"""A tenant never sees a row of another: hundreds of random queries and calls, on data that is marked."""

import json
import random

import pytest
from tests.serve.tools import cluster

from stallscope.errors import StallscopeError
from stallscope.serve import tools
from stallscope.serve.tools.tenant_context import TenantContext
from stallscope.serve.tools.tool_registry import answer, collected
from stallscope.store.hub import schema

N_CALLS = 300
MARK = "beta"
"""Stands in every name of the other tenant's data."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with cluster.hub_in(tmp_path_factory.mktemp("store"), n_workers=3) as result:
        cluster.fill(result.store, "a", "alpha")
        cluster.fill(result.store, "b", MARK)
        yield result


SHAPES = (
    "SELECT * FROM {table} LIMIT 50",
    "SELECT * FROM {table} WHERE cluster_id = 'beta'",
    "SELECT DISTINCT tenant FROM {table}",
    "SELECT tenant, count(*) FROM {table} GROUP BY ALL",
    "SELECT * FROM {table} WHERE tenant = 'b' OR true LIMIT 20",
    "SELECT a.* FROM {table} a, {other} b WHERE a.tenant <> b.tenant LIMIT 5",
    "WITH x AS (SELECT * FROM {table}) SELECT * FROM x WHERE tenant IS NOT NULL LIMIT 9",
    "SELECT (SELECT max(tenant) FROM {table}), (SELECT min(tenant) FROM {other})",
    "SELECT tenant FROM {table} UNION SELECT tenant FROM {other}",
    "SELECT COLUMNS('.*_id') FROM {table} LIMIT 30",
    "SUMMARIZE {table}",
    "SELECT * FROM main.{table} LIMIT 3",
    "EXPLAIN SELECT * FROM {table}",
    "SELECT list(DISTINCT tenant), string_agg(DISTINCT tenant) FROM {table}",
    "FROM {table} SELECT tenant WHERE tenant LIKE '%b%'",
    "SELECT * FROM read_parquet('{folder}/**/*.parquet')",
    "SELECT * FROM '{folder}/{table}.parquet'",
    "SELECT * FROM {table} e SEMI JOIN {other} n ON e.tenant <> n.tenant",
    "SELECT * FROM hot_{table}",
    "SELECT * FROM b.{table}",
)
VALUES = ("alpha", "beta", "beta-node-0", "beta-1", "chain-1", "*", "%", "' OR '1'='1", "alpha\x00beta", None)


def call(rng, hub):
    """A random call of a random tool, as (name, arguments)."""
    if rng.random() < 0.4:
        names = sorted(schema.TABLES)
        sql = rng.choice(SHAPES).format(
            table=rng.choice(names), other=rng.choice(names), folder=hub.store.folder
        )
        return "fleet.cluster.run_analysis", {"sql": sql, "limit": rng.choice([1, 10, 100])}
    name = rng.choice([each for each in collected(tools) if each != "fleet.cluster.run_analysis"])
    fields = collected(tools)[name].input_schema["properties"]
    arguments = {}
    for field in fields:
        if rng.random() < 0.4:
            text = {"metric": rng.choice(["health.score", "all_reduce"]), "cursor": "8000000000000000000.0"}
            number = {"rank": rng.randrange(9), "limit": rng.randrange(1, 100)}
            arguments[field] = text.get(field, number.get(field, rng.choice(VALUES)))
    if "rank" in collected(tools)[name].input_schema.get("required", ()):
        arguments.setdefault("rank", 5)
    return name, arguments


def test_random_questions_never_show_a_row_of_another_tenant(hub):
    rng = random.Random(20261128)
    known = collected(tools)
    n_answers = 0
    for _ in range(N_CALLS):
        name, arguments = call(rng, hub)
        try:
            output = answer(known[name], TenantContext(hub, "a"), arguments)
        except StallscopeError:
            continue  # refused: it shows nothing but the words of the question
        n_answers += 1
        shown = json.dumps({key: value for key, value in output.items() if key != "columns"})
        assert MARK not in shown, (name, arguments)
        if "sql" in arguments and "tenant" in arguments["sql"] and "EXPLAIN" not in arguments["sql"]:
            assert not any(value in ("b", ["b"], ["a", "b"]) for row in output["rows"] for value in row)
    assert n_answers > N_CALLS // 4


def test_the_other_tenant_sees_its_own(hub):
    output = answer(collected(tools)["fleet.cluster.summary"], TenantContext(hub, "b"), {})
    assert [row["cluster"] for row in output["rows"]] == [MARK]
    nobody = answer(collected(tools)["fleet.cluster.summary"], TenantContext(hub, "c"), {})
    assert nobody["rows"] == []
