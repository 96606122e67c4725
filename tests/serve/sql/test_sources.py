"""A query sees all rows that are not in a file yet, or the answer states the missing rows."""

from contextlib import closing

import pyarrow as pa
import pytest

from stallscope import rates
from stallscope.diagnose.report.verdict import wall_text
from stallscope.serve.sql.sources import of_store
from stallscope.serve.sql.workers import QueryLimits, Workers
from stallscope.store.hub.store import Batch, HubStore

from ...store.hub.rows import STILL

ALL = "SELECT count(*) AS n, min(rank) AS first FROM events"


@pytest.fixture
def store(tmp_path):
    """Five commits of two events each; the rank is the number of the commit.

    No maintenance runs: it would delete a file with rows of 1970.
    """
    with closing(HubStore.open(tmp_path, STILL)) as result:
        for commit in range(5):
            row = {"node_id": "n0", "rank": commit, "ts_ns": commit, "name": "beat"}
            rows = pa.Table.from_pylist([row, row])
            result.append(Batch(f"batch {commit}", "a", {"events": rows})).result(timeout=30)
        yield result


def answered(store, max_hot_rows, sql=ALL):
    limits = QueryLimits(timeout_s=20, max_hot_rows=max_hot_rows)
    data = of_store(store, rates.load(), max_hot_rows=max_hot_rows)
    with closing(Workers(data, n=1, limits=limits)) as workers:
        return workers.query(sql, tenant="a")


def test_omitted_rows_are_reported_with_their_table_and_times(store):
    result = answered(store, 4)
    assert (result.rows, result.truncated) == ([[4, 3]], True)
    times = store.snapshot("a").hot["events"]["received_at"].cast("int64").to_pylist()
    first, last = (wall_text(us * 1000) for us in (times[0], times[5]))
    assert result.note.startswith(
        f"events: this answer omits 6 rows that the hub received from {first} to {last}"
    )


def test_an_answer_over_all_rows_has_no_note(store):
    result = answered(store, 10)
    assert (result.rows, result.truncated, result.note) == ([[10, 0]], False, "")


def test_omitted_rows_of_other_tables_are_not_reported(store):
    assert answered(store, 4, "SELECT count(*) FROM nodes").note == ""


def test_rows_in_files_are_never_omitted(store):
    store.seal_all()
    result = answered(store, 1)
    assert (result.rows, result.note) == ([[10, 0]], "")
