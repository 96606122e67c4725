"""Each named question, and SQL on each table, has the same answer on a folder and on hubs that share their data."""

import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib.resources import files
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from tests.serve.tools import cluster
from tests.shared_servers import PostgresServer, S3Server
from tests.store.hub.rows import sql
from tests.store.shared.hubs import STILL, Started, settled, stored

from stallscope.store.hub import schema, views
from stallscope.store.hub.batches import Batch
from stallscope.store.hub.statement_bounds import TREE, statement_bounds
from stallscope.store.hub.store import HubStore
from stallscope.store.shared.shared_store import SharedStore

CLUSTERS = ("alpha", "beta", "gamma", "delta")
T0_NS = cluster.T0_NS
OF_FILES = {"sealed_lateness", "sealed_ledgers"}
"""Questions over single files, for the sums that lateness and rank_ledgers use."""
QUESTIONS = sorted(
    path.name.removesuffix(".sql")
    for path in files("stallscope.store").joinpath("sql", "hub").iterdir()
    if path.name.endswith(".sql") and path.name.removesuffix(".sql") not in OF_FILES
)
BY_HUB = {"first_seen", "last_seen", "received_at"}
"""Columns with the time of the commit."""
ANY_OF_EQUALS = {"page_matrix": {"comm_hash", "seq"}, "verdicts_exist": {"verdict_id"}}
"""Columns that may differ where several rows are equally right."""
PARAMS: dict[str, Any] = {
    "comm": "00112233aabbccdd",
    "first_seq": 3,
    "last_seq": 20,
    "ranks": list(range(8)),
    "pids": [
        f"{name}-node-{node} {1000 + rank}" for name in CLUSTERS for node in (0, 1) for rank in range(8)
    ],
    "from_ns": None,
    "to_ns": None,
    "max_rows": 10_000,
    "min_late_ns": 1_000_000,
    "bucket_ns": 10**9,
    "edge_ns": 0,
    "newest_ns": 1 << 62,
    "n_skipped": 0,
    "fresh_ns": 0,
    "now_ns": T0_NS + 10**12,
    "since_ns": 0,
    "also": [],
    "key": "alpha:job 4",
    "metric": "health.score",
}
WINDOW = {"from_ns": T0_NS, "to_ns": T0_NS + 4 * 10**9}
CONDITIONS = (
    "cluster_id = 'beta'",
    f"ts_ns BETWEEN {T0_NS} AND {T0_NS + 10**9}",
    f"cluster_id IN ('alpha', 'delta') AND ts_ns > {T0_NS + 2 * 10**9} OR cluster_id = 'gamma'",
    "cluster_id = 'unknown' OR ts_ns < 0",
)
TEXTS = {
    "cluster_id": CLUSTERS,
    "node_id": ("n0", "n1"),
    "op": ("all_reduce", "copy"),
    "name": ("a", "b"),
    "gpu_uuid": ("GPU-0", "GPU-1"),
    "state": ("open", "closed"),
}
TIMES = ("ts_ns", "begin_ns", "last_ns", "ended_ns", "since_ns", "until_ns", "wait_enter_ns", "wait_leave_ns")
INTEGERS = {"n": 9, "is_idle": 1, "n_ranks": 9, "n_open": 3}


@pytest.fixture(scope="module")
def stores(
    postgres_server: PostgresServer, s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[HubStore, tuple[SharedStore, SharedStore]]]:
    """The same batches in a folder, and in two hubs by turns; half of the rows are sealed."""
    folder = tmp_path_factory.mktemp("same")
    with ExitStack() as stack:
        start = Started(postgres_server.new_database(), s3_server.bucket("same"), folder, stack)
        one, two = start("hub-a"), start("hub-b")
        settled(one, two)
        alone = stack.enter_context(closing(HubStore.open(folder / "alone", STILL)))
        rng = random.Random(1)
        for half in range(2):
            for number, batch in enumerate(batches(rng, half)):
                assert not stored(alone, batch)
                assert not stored((one, two)[number % 2], batch)
            if half == 0:
                for each in (alone, *one.membership.stores(), *two.membership.stores()):
                    each.seal_all()
        yield alone, (one, two)


def batches(rng: random.Random, half: int) -> Iterator[Batch]:
    for name in CLUSTERS:
        tables = {"collectives": cluster.collectives(name)} | cluster.details(name)
        if half:
            tables |= {"verdicts": cluster.verdict(name), "nodes": cluster.machines(name)}
        yield Batch(f"{name} {half}", "a", tables)
    for table in schema.TABLES.values():
        if table.name != "gpu_rates":
            yield Batch(f"{table.name} {half}", "a", {table.name: varied(rng, table, half)})
    yield Batch(f"other {half}", "b", {"events": varied(rng, schema.EVENTS, half)})


def varied(rng: random.Random, table: schema.HubTable, half: int) -> pa.Table:
    """Rows with values in every column that a sender fills."""
    rows = [
        {
            column.name: value(rng, column, 20 * half + n)
            for column in table.columns
            if column.name != "tenant"
        }
        for n in range(20)
    ]
    for n, row in enumerate(rows):  # a key belongs to one cluster, and a round has one row of a rank
        row["cluster_id"] = CLUSTERS[n % len(CLUSTERS)]
        keys = ("verdict_id", "causal_chain_id", "job", "node_id") if table.key else ("causal_chain_id",)
        row |= {name: f"{name} {20 * half + n}" for name in keys if name in row}
        if table is schema.COLLECTIVES:
            row |= {"comm_hash": f"{n % 4:016x}", "seq": 20 * half + n}
    return cluster.table(table.name, [{k: v for k, v in row.items() if k in names_of(table)} for row in rows])


def names_of(table: schema.HubTable) -> set[str]:
    left_out = schema.GIVEN_BY_HUB if table.name in schema.SENT else ("tenant",)
    return set(table.names) - set(left_out)


def value(rng: random.Random, column: schema.Column, n: int) -> Any:
    if column.kind == "text":
        return rng.choice(TEXTS[column.name]) if column.name in TEXTS else "[]"
    if column.kind == "time":
        return (T0_NS + n * 10**8) // 1000
    if column.kind == "bool":
        return bool(rng.getrandbits(1))
    if column.kind == "double":
        return float(rng.randrange(1000))
    if column.name in TIMES:
        return T0_NS + n * 10**8 + rng.randrange(10**7)
    if column.name in ("pid", "tid"):  # a process has one rank, and one row
        return 1000 + n
    if column.name in ("rank", "comm_rank"):
        return n % 8
    return rng.randint(1, INTEGERS.get(column.name, 50))


def answer(store: HubStore | SharedStore, question: str, params: dict[str, Any]) -> list[str]:
    rows, omitted = store.ask(question, tenant="a", params=params).to_pylist(), BY_HUB
    omitted = omitted | ANY_OF_EQUALS.get(question, set())
    return sorted(repr({k: plain(v) for k, v in row.items() if k not in omitted}) for row in rows)


def plain(value: Any) -> Any:
    """Sums of floats depend on the order of the rows."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    return sorted(map(repr, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_has_the_same_answer(stores, question: str):
    alone, hubs = stores
    text = files("stallscope.store").joinpath("sql", "hub", f"{question}.sql").read_text()
    names = set(re.findall(r"\$(\w+)", text))
    n_rows = 0
    of_process = {"node": "alpha-node-1", "pid": 1005}
    of_cluster = {"cluster": "beta"}
    for chosen in (
        {},
        of_cluster,
        WINDOW,
        of_cluster | WINDOW,
        {"rank": 5},
        of_process,
        {"node": "n0", "pid": 1001},
    ):
        params = {name: (PARAMS | chosen).get(name) for name in names}
        if question == "page_matrix":
            params = {"bucket_ns": 10**9, **WINDOW}
        wanted = answer(alone, question, params)
        n_rows += len(wanted)
        for hub in hubs:
            assert answer(hub, question, params) == wanted
    assert n_rows, "the question finds no row at all"


@pytest.mark.parametrize("table", sorted(set(schema.TABLES) - {"gpu_rates"}))
def test_sql_on_a_table_has_the_same_answer(stores, table: str):
    alone, hubs = stores
    view = "stored_events" if table == "events" else table
    given = sorted(BY_HUB & set(schema.TABLES[table].names))
    excluded = f" EXCLUDE ({', '.join(given)})" if given else ""
    text = f"SELECT *{excluded} FROM {view}"
    for tenant in ("a", "b"):
        wanted = sorted(map(repr, sql(alone, text, tenant)))
        assert wanted or tenant == "b"
        for hub in hubs:
            assert sorted(map(repr, sql(hub, text, tenant))) == wanted


@pytest.mark.parametrize("table", ["collectives", "events", "offcpu"])
def test_conditions_have_the_same_answer_with_only_the_files_that_they_need(stores, table: str):
    alone, hubs = stores
    given = ", ".join(sorted(BY_HUB & set(schema.TABLES[table].names)))
    for condition in CONDITIONS:
        text = f"SELECT * EXCLUDE ({given}) FROM {table} WHERE {condition}"
        tree = json.loads(duckdb.execute(TREE, [text]).fetchall()[0][0])
        bounds = views.bounds_behind(statement_bounds(tree, {}, now_ns=time.time_ns(), within_s=60))
        wanted = sorted(map(repr, sql(alone, text)))
        assert bool(wanted) == ("unknown" not in condition)
        for store in (alone, *hubs):
            assert sorted(map(repr, sql(store, text, bounds=bounds))) == wanted
