"""The store in a folder: one hub alone opens it, older files are migrated, newer and damaged files are refused."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from stallscope.errors import NewerSchema, StorageFailed
from stallscope.store.hub.migrations import SCHEMA_VERSION
from stallscope.store.hub.store import HubStore

from .rows import STILL, appended, events, files, sql
from .test_store import n_rows


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HubStore]:
    with closing(HubStore.open(tmp_path, STILL)) as made:
        yield made


def test_a_second_hub_on_the_folder_fails_loudly(store: HubStore, tmp_path: Path):
    with pytest.raises(StorageFailed, match="another stallscope hub uses"):
        HubStore.open(tmp_path)


def test_a_newer_schema_is_refused(store: HubStore, tmp_path: Path):
    store.close()
    with duckdb.connect(str(tmp_path / "hub.duckdb")) as db:
        db.execute("INSERT INTO schema_version VALUES (99, 0)")
    with pytest.raises(NewerSchema, match="upgrade"):
        HubStore.open(tmp_path)
    with duckdb.connect(str(tmp_path / "hub.duckdb")) as db:
        db.execute("DELETE FROM schema_version WHERE version = 99")
    HubStore.open(tmp_path).close()


def test_a_migration_that_was_cut_off_is_done_again(store: HubStore, tmp_path: Path):
    appended(store, events=events(["x"]))
    store.close()
    with duckdb.connect(str(tmp_path / "hub.duckdb")) as db:
        db.execute("DELETE FROM schema_version")
        db.execute("DROP TABLE gpu_rates")
    with closing(HubStore.open(tmp_path, STILL)) as again:
        assert n_rows(again) == 1
        assert sql(again, "SELECT count(*) FROM gpu_rates") == [(0,)]


VERDICTS_2 = (
    "CREATE TABLE verdicts (tenant VARCHAR, cluster_id VARCHAR, verdict_id VARCHAR, state VARCHAR, kind VARCHAR,"
    " summary VARCHAR, opened_at TIMESTAMPTZ, updated_at TIMESTAMPTZ, closed_at TIMESTAMPTZ, since_ns BIGINT,"
    " until_ns BIGINT, node_id VARCHAR, rank INTEGER, ranks VARCHAR, nodes VARCHAR, comm_hash VARCHAR, cause VARCHAR,"
    " cause_share DOUBLE, confidence DOUBLE, late_ms DOUBLE, n_late_rounds BIGINT, gpu_seconds DOUBLE, usd DOUBLE,"
    " is_lower_bound BOOLEAN, verdict VARCHAR, PRIMARY KEY (tenant, verdict_id))"
)
"""The table in schema 2, without the upper end of a cost."""


def test_a_hub_of_schema_2_keeps_its_verdicts_and_takes_ranges(store: HubStore, tmp_path: Path):
    store.close()
    with duckdb.connect(str(tmp_path / "hub.duckdb")) as db:
        db.execute("DROP TABLE verdicts")
        db.execute(VERDICTS_2)
        for name in ("kept", "replaced"):
            db.execute(
                "INSERT INTO verdicts (tenant, verdict_id, state, gpu_seconds, is_lower_bound, verdict)"
                " VALUES ('a', ?, 'open', 5, true, '{}')",
                [name],
            )
        db.execute("DELETE FROM schema_version WHERE version > 2")
    question = (
        "SELECT verdict_id, state, gpu_seconds, is_lower_bound, at_most_gpu_seconds, at_most_usd, verdict"
        " FROM verdicts ORDER BY 1"
    )
    kept = ("kept", "open", 5.0, True, None, None, "{}")
    with closing(HubStore.open(tmp_path, STILL)) as again:
        assert sql(again, question) == [kept, ("replaced", *kept[1:])]
        message = {"gpu_seconds": [6.0], "is_lower_bound": [True], "at_most_gpu_seconds": [9.0]}
        output = {
            "verdict_id": ["replaced"],
            "state": ["closed"],
            "at_most_usd": [1.5],
            "verdict": ["{}"],
            **message,
        }
        appended(again, verdicts=pa.table(output))
        now = sql(again, question)
        assert now == [kept, ("replaced", "closed", 6.0, True, 9.0, 1.5, "{}")]
    with closing(HubStore.open(tmp_path, STILL)) as again:
        assert sql(again, question) == now
    with duckdb.connect(str(tmp_path / "hub.duckdb")) as db:
        versions = db.execute("SELECT version FROM schema_version ORDER BY 1").fetchall()
        assert versions == [(n,) for n in range(1, SCHEMA_VERSION + 1)]


def test_a_hub_of_schema_5_keeps_its_jobs_and_takes_owners(store: HubStore, tmp_path: Path):
    store.close()
    with duckdb.connect(str(tmp_path / "hub.duckdb")) as db:
        for table in ("jobs", "verdicts"):
            columns = [row[0] for row in db.execute(f"DESCRIBE {table}").fetchall()]
            for name in (name for name in columns if name.startswith("owner_")):
                db.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
        db.execute("INSERT INTO jobs (tenant, cluster_id, job, members) VALUES ('a', 'c', 'old', '[]')")
        db.execute("DELETE FROM schema_version WHERE version > 5")
    with closing(HubStore.open(tmp_path, STILL)) as again:
        appended(again, jobs=pa.table({"cluster_id": ["c"], "job": ["new"], "owner_user": ["ann"]}))
        rows = sql(again, "SELECT job, owner_user FROM jobs ORDER BY job DESC")
        assert rows == [("old", None), ("new", "ann")]


@pytest.mark.parametrize("content", [b"", b"not a database" * 1000], ids=["empty", "garbage"])
def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "hub.duckdb").write_bytes(content)
    if not content:
        HubStore.open(tmp_path).close()
        return
    with pytest.raises(StorageFailed, match="cannot open"):
        HubStore.open(tmp_path)


def test_files_of_a_seal_that_was_cut_off_are_removed(store: HubStore, tmp_path: Path):
    appended(store, events=events(["x"]))
    store.seal_all()
    (segment,) = files(store)
    orphan, part = segment.with_name("1-0.parquet"), segment.with_name("2-0.part")
    orphan.write_bytes(segment.read_bytes())
    part.write_bytes(b"half")
    store.close()
    again = HubStore.open(tmp_path, STILL)
    with closing(again):
        assert not orphan.exists() and not part.exists() and segment.exists()
        assert n_rows(again) == 1


def test_a_missing_file_is_reported_and_served_again_once_restored(store: HubStore, tmp_path: Path):
    appended(store, events=events(["x"]))
    store.seal_all()
    (segment,) = files(store)
    store.close()
    segment.rename(tmp_path / "aside")
    with closing(HubStore.open(tmp_path)) as without:
        assert len(without.damage.unreadable("a")) == 1 and n_rows(without) == 0
    (tmp_path / "aside").rename(segment)
    with closing(HubStore.open(tmp_path)) as again:
        assert n_rows(again) == 1


def test_stored_rows_are_readable_by_the_owner_only(tmp_path: Path):
    folder = tmp_path / "hub"
    folder.mkdir(mode=0o755)
    with closing(HubStore.open(folder, STILL)) as store:
        appended(store, events=events(["x"]))
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "hub.duckdb").stat().st_mode & 0o777 == 0o600


def test_the_permissions_of_a_shared_folder_are_not_changed(tmp_path: Path):
    tmp_path.chmod(0o755)
    (tmp_path / "theirs").touch()
    with closing(HubStore.open(tmp_path, STILL)):
        assert tmp_path.stat().st_mode & 0o777 == 0o755
        assert (tmp_path / "hub.duckdb").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["hub.duckdb", "hub.duckdb.wal"])
def test_rows_are_not_acknowledged_once_the_file_was_deleted(store: HubStore, tmp_path: Path, name: str):
    """The open file would accept them, and a hub started later would not find them."""
    appended(store, events=events(["x"]))
    (tmp_path / name).unlink()
    with pytest.raises(StorageFailed, match=f"{name} was deleted"):
        appended(store, events=events(["y"]))


def test_rows_are_not_acknowledged_once_the_file_was_replaced(store: HubStore, tmp_path: Path):
    appended(store, events=events(["x"]))
    (tmp_path / "copy").write_bytes((tmp_path / "hub.duckdb").read_bytes())
    (tmp_path / "copy").rename(tmp_path / "hub.duckdb")
    with pytest.raises(StorageFailed, match="was deleted or replaced"):
        appended(store, events=events(["y"]))
