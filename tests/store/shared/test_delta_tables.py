"""Delta tables name the sealed files in place: other engines read the same rows, while hubs merge and remove files."""

import threading
from contextlib import closing
from pathlib import Path

import pytest
from tests.shared_servers import KEY, SECRET
from tests.store.shared.hubs import Started, events, settled, slot_stores, stored

from stallscope.errors import Overloaded
from stallscope.store.hub import schema
from stallscope.store.hub.batches import Batch
from stallscope.store.hub.compactor import Compactor
from stallscope.store.shared import sweep
from stallscope.store.shared.postgres import Postgres
from stallscope.store.shared.shared_store import SharedStore

deltalake = pytest.importorskip("deltalake")

from stallscope.store.shared import delta_tables  # noqa: E402 (needs deltalake)

NONE: list[tuple[int, int]] = [(0, 0)]


def sealed(store: SharedStore, n: int, tenant: str = "a") -> None:
    """A file with one row, x<n>."""
    stored(store, Batch(f"b{n}", tenant, {"events": events("c", f"x{n}")}))
    for each in slot_stores(store):
        each.seal_all()


def compactor(store: SharedStore) -> Compactor:
    (slot_store,) = slot_stores(store)
    return slot_store._compactor


def published(store: SharedStore) -> list[tuple[int, int]]:
    """(files added, files removed) for each Delta table."""
    return [(t.n_added, t.n_removed) for t in delta_tables.publish(store.postgres, store.bucket)]


def table(store: SharedStore, tenant: str = "a") -> "deltalake.DeltaTable":
    return deltalake.DeltaTable(
        store.bucket.address(f"segments/{tenant}/events"),
        storage_options=store.bucket.options_of_object_store(),
    )


def read_with_deltalake(store: SharedStore, tenant: str = "a") -> list[str]:
    rows = (
        deltalake.QueryBuilder()
        .register("e", table(store, tenant))
        .execute("SELECT name FROM e ORDER BY name")
    )
    return [name.as_py() for name in rows.read_all()["name"]]


def read_with_duckdb(store: SharedStore, folder: Path, tenant: str = "a") -> list[str]:
    """DuckDB reads the listed objects: its extension for Delta is not there for this version."""
    import duckdb

    paths = []
    for uri in table(store, tenant).file_uris():
        key = uri.partition("/segments/")[2]
        path = folder / key.replace("/", "-")
        path.write_bytes(store.bucket.get(f"segments/{key}"))
        paths.append(str(path))
    with duckdb.connect() as db:
        return [
            name
            for (name,) in db.execute("SELECT name FROM read_parquet(?) ORDER BY name", [paths]).fetchall()
        ]


def test_delta_tables_follow_sealed_merged_and_removed_files(start: Started, tmp_path: Path):
    store = start("hub-a")
    settled(store)
    assert published(store) == []
    for n in range(8):
        sealed(store, n)
    assert published(store) == [(8, 0)]
    version = table(store).version()
    assert published(store) == NONE and table(store).version() == version  # nothing to change: no commit
    everything = [f"x{n}" for n in range(8)]
    assert read_with_deltalake(store) == read_with_duckdb(store, tmp_path) == everything

    compactor(store)._merge_small()
    sealed(store, 8)
    assert published(store) == [(2, 8)]
    assert read_with_deltalake(store) == read_with_duckdb(store, tmp_path) == [*everything, "x8"]
    fields = {field.name: field for field in table(store).schema().fields}
    assert list(fields) == schema.TABLES["events"].names

    compactor(store).expire()  # the rows are of 1970
    assert published(store) == [(0, 2)] and read_with_deltalake(store) == []
    sealed(store, 9)
    assert published(store) == [(1, 0)] and read_with_deltalake(store) == ["x9"]


def test_tenants_have_tables_of_their_own(start: Started):
    store = start("hub-a")
    settled(store)
    sealed(store, 1, "a")
    sealed(store, 2, "b")
    assert published(store) == [(1, 0), (1, 0)]
    assert (read_with_deltalake(store, "a"), read_with_deltalake(store, "b")) == (["x1"], ["x2"])


def test_objects_stay_until_the_delta_table_is_changed_and_its_log_always(start: Started, monkeypatch):
    store = start("hub-a")
    settled(store)
    for n in range(8):
        sealed(store, n)
    published(store)
    slots = store.membership.owned_slots()
    compactor(store)._merge_small()
    assert sweep.remove_dropped(store.postgres, store.bucket, slots, grace_s=-1) == 0
    assert read_with_deltalake(store) == [f"x{n}" for n in range(8)]
    published(store)
    assert (
        sweep.remove_dropped(store.postgres, store.bucket, slots, grace_s=3600) == 0
    )  # readers of the last version
    assert sweep.remove_dropped(store.postgres, store.bucket, slots, grace_s=-1) == 8
    assert sweep.remove_unlisted(store.postgres, store.bucket, older_s=-5) == 0
    assert sweep.check(store.postgres, store.bucket, store._cache).n_unlisted == 0
    assert read_with_deltalake(store) == [f"x{n}" for n in range(8)]

    compactor(store).expire()
    monkeypatch.setattr(sweep, "PUBLISHED_S", -1.0)  # as if no `hub publish` had run for a day
    assert sweep.remove_dropped(store.postgres, store.bucket, slots, grace_s=-1) == 1


def test_runs_at_the_same_time_and_with_an_old_list_change_nothing_twice(start: Started, monkeypatch):
    store = start("hub-a")
    settled(store)
    sealed(store, 0)
    with (
        closing(Postgres(start.dsn, name="other")) as other,
        delta_tables._alone(other),
        pytest.raises(Overloaded, match="is running"),
    ):
        delta_tables.publish(store.postgres, store.bucket)
    old = delta_tables._listed
    published(store)
    listed = old(store.postgres)
    sealed(store, 1)
    published(store)
    monkeypatch.setattr(
        delta_tables, "_listed", lambda _: listed
    )  # a run that stopped after it read the list
    with pytest.raises(Overloaded, match="newer list"):
        delta_tables.publish(store.postgres, store.bucket)
    assert read_with_deltalake(store) == ["x0", "x1"]


def test_a_table_of_an_older_version_gets_the_new_columns(start: Started, monkeypatch):
    store = start("hub-a")
    settled(store)
    sealed(store, 0)
    whole = schema.arrow_schema
    monkeypatch.setattr(schema, "arrow_schema", lambda t: whole(t).remove(whole(t).get_field_index("attrs")))
    published(store)
    assert "attrs" not in {field.name for field in table(store).schema().fields}
    monkeypatch.undo()
    sealed(store, 1)
    assert published(store) == [(1, 0)]
    assert "attrs" in {field.name for field in table(store).schema().fields}
    assert read_with_deltalake(store) == ["x0", "x1"]


def test_each_change_during_a_run_is_complete_after_the_next_run(start: Started):
    store = start("hub-a")
    settled(store)
    failures: list[BaseException] = []
    has_ended = threading.Event()

    def publish_always() -> None:
        try:
            while not has_ended.is_set():
                published(store)
                seen = read_with_deltalake(store)
                assert len(seen) == len(set(seen)), "a row is there twice"
        except BaseException as error:  # noqa: BLE001 (reported by the test)
            failures.append(error)

    sealed(store, 0)
    published(store)
    thread = threading.Thread(target=publish_always)
    thread.start()
    for n in range(1, 10):
        sealed(store, n)
        if n % 4 == 3:
            compactor(store)._merge_small()
    has_ended.set()
    thread.join()
    assert not failures, failures
    published(store)
    assert read_with_deltalake(store) == sorted(f"x{n}" for n in range(10))


def test_the_command_publishes_and_names_what_is_missing(start: Started, run, monkeypatch):
    store = start("hub-a")
    settled(store)
    sealed(store, 0)
    code, _, err = run("hub", "publish")
    assert code == 2 and "needs --shared and --bucket" in err
    monkeypatch.setenv("STALLSCOPE_HUB_SHARED", start.dsn)
    monkeypatch.setenv("STALLSCOPE_HUB_BUCKET", start.bucket)
    code, out, err = run("hub", "publish")
    assert code == 0, err
    assert "segments/a/events  version 1  1 added, 0 removed, 1 files" in out
    assert KEY not in out and SECRET not in out


@pytest.mark.prove
def test_clickhouse_reads_the_files_in_place(start: Started):
    """chdb is ClickHouse in a process, 900 MB when installed: pip install chdb."""
    chdb = pytest.importorskip("chdb")
    store = start("hub-a")
    settled(store)
    for n in range(8):
        sealed(store, n)
    published(store)
    compactor(store)._merge_small()
    sealed(store, 8)
    published(store)
    options = store.bucket.options_of_object_store()
    address = store.bucket.address("segments/a/events").removeprefix("s3://")
    source = f"deltaLake('{options['endpoint']}/{address}/', '{KEY}', '{SECRET}')"
    answer = chdb.query(f"SELECT count(), count(DISTINCT name), max(ts) FROM {source}", "CSV")
    assert str(answer).strip() == '9,9,"1970-01-01 00:00:00.000000"', answer
