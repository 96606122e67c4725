"""Processes for SQL: their permissions and limits, and the result of a killed process."""

import os
import signal
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from stallscope.errors import BadInput, Busy, OverLimits, RefusedQuery, TookTooLong
from stallscope.serve.sql.workers import QueryLimits, Sources, Workers
from stallscope.store.hub import schema
from stallscope.store.hub.memory_size import process_memory
from stallscope.store.hub.row_bounds import ALL_ROWS

from ...patience import until

FOREVER = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t"


def rows(tenant, ranks):
    fields = [{"tenant": tenant, "node_id": f"{tenant}-node", "rank": rank} for rank in ranks]
    return pa.Table.from_pylist(fields, schema=schema.arrow_schema(schema.EVENTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sealed segments of two tenants."""
    top = tmp_path_factory.mktemp("segments")
    for tenant in ("a", "b"):
        (top / tenant / "events").mkdir(parents=True)
        sealed = rows(tenant, range(3))  # noqa: F841 (the engine finds it by its name)
        duckdb.sql(f"COPY sealed TO '{top / tenant / 'events' / '1.parquet'}'")
    return top


@pytest.fixture(scope="module")
def data(folder):
    def found(tenant, bounds, /):
        sealed = {"events": [folder / tenant / "events" / "1.parquet"]} if "events" in bounds else {}
        return Sources(folder / tenant, sealed, {"events": rows(tenant, [7])})

    return found


@pytest.fixture
def workers(data):
    """Their queries end only when a test ends them."""
    with closing(Workers(data, n=2, limits=QueryLimits(timeout_s=240, max_rows=1000))) as result:
        yield result


def pids(workers):
    return [worker._process.pid for worker in workers._all]


def test_sealed_and_hot_rows_of_the_tenant_are_there(workers):
    asked = "SELECT tenant, list(rank ORDER BY rank) FROM events GROUP BY tenant"
    assert workers.query(asked, tenant="a").rows == [["a", [0, 1, 2, 7]]]
    assert workers.query(asked, tenant="b").rows == [["b", [0, 1, 2, 7]]]


def test_a_query_without_data_fails_alone(folder, data):
    """The store of several hubs has no data while PostgreSQL or the bucket does not answer."""
    is_away = True

    def found(tenant, bounds, /):
        if is_away:
            raise Busy("the bucket does not answer")
        return data(tenant, bounds)

    with closing(Workers(found, n=1, limits=QueryLimits(timeout_s=240))) as workers:
        for _ in range(2):
            with pytest.raises(Busy, match="the bucket does not answer"):
                workers.query("SELECT count(*) FROM events", tenant="a")
        process = pids(workers)
        is_away = False
        assert workers.query("SELECT count(*) FROM events", tenant="a").rows == [[4]]
        assert pids(workers) == process


def test_a_worker_can_read_its_tenants_folder_only(folder, data):
    """The second line of defence: even a statement that got through the gate finds nothing else."""
    from stallscope.serve.sql.worker import _engine

    sources = data("a", {"events": ALL_ROWS})
    header = {
        "folder": str(sources.folder),
        "sealed": {"events": [str(path) for path in sources.sealed["events"]]},
        "hot": [],
    }
    engine = _engine(header, [], limits={"memory_bytes": 200_000_000})
    with closing(engine):
        assert engine.execute("SELECT count(*) FROM events").fetchone() == (3,)
        for wrong in (
            f"SELECT * FROM read_parquet('{folder}/b/events/1.parquet')",
            f"SELECT * FROM read_parquet('{folder}/a/../b/events/1.parquet')",
            "SELECT * FROM read_text('/etc/passwd')",
            f"COPY (SELECT 1) TO '{folder}/b/x.csv'",
            "ATTACH '/tmp/x.duckdb' AS x",
            "INSTALL httpfs",
            "LOAD httpfs",
            "SET enable_external_access = true",
            "SET allowed_directories = ['/']",
            "SET lock_configuration = false",
            "SET memory_limit = '100GB'",
        ):
            with pytest.raises(duckdb.Error):
                engine.execute(wrong).fetchall()


def test_a_query_is_killed_at_its_deadline_and_the_next_one_is_answered(workers):
    patient = workers.limits
    workers.limits = replace(patient, timeout_s=3)
    workers.start()
    before = pids(workers)
    with pytest.raises(TookTooLong, match="time limit of 3 s"):
        workers.query(FOREVER, tenant="a")
    workers.limits = patient
    assert workers.query("SELECT 1", tenant="a").rows == [[1]]
    gone = set(before) - set(pids(workers))
    assert len(gone) == 1
    assert not Path(f"/proc/{gone.pop()}").exists()


def test_a_worker_killed_during_a_query_is_reported_and_replaced(workers):
    workers.start()
    outcome = []
    started_s = {pid: _cpu_s(pid) for pid in pids(workers)}

    def ask():
        try:
            workers.query(FOREVER, tenant="a")
        except OverLimits as error:
            outcome.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    (computing,) = until(lambda: [pid for pid in pids(workers) if _cpu_s(pid) > started_s[pid] + 0.3])
    os.kill(computing, signal.SIGKILL)
    asking.join()
    assert outcome == ["the query exceeded its memory limit; select less"]
    assert workers.query("SELECT 2", tenant="a").rows == [[2]]


def _cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_one_tenant_never_has_all_workers(workers):
    workers.start()
    before = pids(workers)

    def ask():
        with pytest.raises(OverLimits):
            workers.query(FOREVER, tenant="a")

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: "a" in workers._by_tenant)
    with pytest.raises(Busy):
        workers.query("SELECT 1", tenant="a")
    assert workers.query("SELECT 1", tenant="b").rows == [[1]]
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    asking.join()


def test_workers_end_with_their_hub(data):
    workers = Workers(data, n=2)
    workers.start()
    started = pids(workers)
    workers.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)
    with pytest.raises(Busy, match="shutting down"):
        workers.query("SELECT 1", tenant="a")


def test_rows_and_bytes_are_limited(workers):
    result = workers.query("SELECT * FROM range(1000000000000)", tenant="a")
    assert (len(result.rows), result.truncated) == (1000, True)
    assert not workers.query("SELECT * FROM range(10)", tenant="a", max_rows=10).truncated
    assert workers.query("SELECT * FROM range(11)", tenant="a", max_rows=10).truncated
    wide = workers.query("SELECT repeat('x', 10000) FROM range(1000)", tenant="a")
    assert wide.truncated and 300 < len(wide.rows) < 450
    with pytest.raises(OverLimits, match="one row is larger"):
        workers.query("SELECT list(repeat('x', 10000)) FROM range(1000)", tenant="a")


def test_values_are_converted_to_portable_json(workers):
    result = workers.query(
        "SELECT TIMESTAMPTZ '2026-01-31 12:00:00+01', DATE '2026-01-31', 'nan'::DOUBLE, 1.5::DECIMAL(5, 2),"
        " sum(range), 'ab'::BLOB, {'a': [1, NULL]}, MAP {'k': 'v'}, INTERVAL 90 SECOND, 'x' || chr(27) || chr(8238),"
        " '0fbfda76-d9ca-4d8c-89b9-29a267589934'::UUID, NULL FROM range(4)",
        tenant="a",
    )
    assert result.rows == [
        [
            *("2026-01-31T11:00:00Z", "2026-01-31", None, 1.5, 6, "6162", {"a": [1, None]}, {"k": "v"}, 90.0),
            *("x", "0fbfda76-d9ca-4d8c-89b9-29a267589934", None),
        ]
    ]


def test_parameters_are_values_and_never_sql(workers):
    asked = {"v": "'; DROP TABLE events; --"}
    assert workers.query("SELECT $v", tenant="a", params=asked).rows == [[asked["v"]]]
    assert workers.query("SELECT rank FROM events WHERE rank = $r", tenant="a", params={"r": 7}).rows == [[7]]
    for sql, params, output in (
        ("SELECT $a", {}, r"no value for \$a"),
        ("SELECT 1", {"a": 1}, r"no \$a"),
        ("SELECT ?", {"1": 1}, "by name"),
    ):
        with pytest.raises(BadInput, match=output):
            workers.query(sql, tenant="a", params=params)
    with pytest.raises(RefusedQuery):
        workers.query("SELECT * FROM query_table($t)", tenant="a", params={"t": "events"})


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (QueryLimits(resident_bytes=10_000_000), "the query exceeded its memory limit"),
        (QueryLimits(all_bytes=10_000_000), "the hub has reached its memory limit"),
    ],
)
def test_a_query_is_stopped_for_the_memory_of_its_process_and_of_the_hub(data, limits, message):
    process_memory.cache_clear()
    with closing(Workers(data, n=1, limits=limits)) as workers:
        with pytest.raises(OverLimits, match=message):
            workers.query(FOREVER, tenant="a")
        assert not pids(workers), "its process has ended"


def test_limits_of_queries_follow_the_memory_of_the_hub():
    small, large = QueryLimits.within(1_000_000_000), QueryLimits.within(64_000_000_000)
    assert 2 * small.resident_bytes <= 1_000_000_000
    assert (large.memory_bytes, large.max_hot_rows) == (QueryLimits.memory_bytes, QueryLimits.max_hot_rows)
