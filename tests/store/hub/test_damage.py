"""Damage is contained: a bad file costs its own rows, lost commits are reported, and a copy brings everything back."""

import os
import random
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from stallscope.errors import BadInput, StallscopeError, StorageFailed
from stallscope.store.hub import schema, upkeep
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import Batch, HubStore

from .rows import appended, collectives, events, files, maintained, sql

STILL = Limits(maintenance_s=3600, settle_s=0)
COUNT = "SELECT count(*) FROM stored_events"


def two_files(folder: Path) -> list[Path]:
    """A closed hub with 5 rows in one sealed file and 7 in another; the paths, in that order."""
    with closing(HubStore.open(folder, STILL)) as store:
        for n in (5, 7):
            appended(store, events=events([f"e{i}" for i in range(n)]))
            store.seal_all()
        return files(store)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("harm", [truncate, empty, zero, replace_by_folder, replace_by_loop, replace_by_pipe])
@pytest.mark.parametrize("name", ["hub.duckdb", "hub.position", "gaps.jsonl"])
def test_each_unusable_file_of_a_folder_is_one_clear_error_or_set_aside(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
):
    two_files(tmp_path)
    (tmp_path / "gaps.jsonl").touch()
    harm(tmp_path / name)
    for use in (lambda: HubStore.open(tmp_path, STILL).close(), lambda: upkeep.check(tmp_path)):
        with suppress(StallscopeError):
            use()
    assert len(list(tmp_path.rglob("*.parquet"))) == 2


@pytest.mark.parametrize("harm", [truncate, empty, overwrite, Path.unlink])
def test_a_damaged_file_is_set_aside_at_the_start_and_the_rest_is_served(tmp_path: Path, harm):
    first, _ = two_files(tmp_path)
    whole = first.read_bytes()
    harm(first)
    with closing(HubStore.open(tmp_path, STILL)) as store:
        assert sql(store, COUNT) == [(7,)]
        (bad,) = store.damage.unreadable("a")
        assert bad.segment.n_rows == 5 and store.damage.unreadable("b") == []
        assert "5 rows" in store.damage.warning("a") and store.damage.warning("b") == ""
    first.write_bytes(whole)
    with closing(HubStore.open(tmp_path, STILL)) as store:
        assert sql(store, COUNT) == [(12,)]


@pytest.mark.parametrize("harm", [truncate, empty, overwrite])
def test_a_file_damaged_while_the_hub_runs_is_storage_failed_and_then_set_aside(tmp_path: Path, harm):
    with closing(HubStore.open(tmp_path, STILL)) as store:
        for seqs in ([1, 2], [3, 4, 5]):
            appended(store, collectives=collectives(seqs))
            store.seal_all()
        harm(files(store)[0])
        params = {"cluster": None}
        with pytest.raises(StorageFailed):
            store.ask("cluster_summary", tenant="a", params=params)
        assert store.ask("cluster_summary", tenant="a", params=params).num_rows == 1
        assert sql(store, "SELECT count(*) FROM collectives") == [(3,)]


@pytest.mark.parametrize("table", sorted(schema.SENT))
def test_files_older_than_a_column_are_read_with_newer_files(tmp_path: Path, table: str):
    last = schema.TABLES[table].names[-1]
    rows = events(["x"]).select(["ts_ns"])
    with closing(HubStore.open(tmp_path, STILL)) as store:
        appended(store, **{table: rows})
        store.seal_all()
        (current,) = store.snapshot("a").segments[table]
        older = replace(current, path=str(Path(current.path).with_name("1-0.parquet")))
        duckdb.execute(
            f"COPY (SELECT * EXCLUDE ({last}) FROM read_parquet('{tmp_path / current.path}'))"
            f" TO '{tmp_path / older.path}' (FORMAT parquet)"
        )
        store._compactor._replace([current], [older])
        appended(store, **{table: rows})
        store.seal_all()
        appended(store, **{table: rows})
        view = "stored_events" if table == "events" else table
        assert sql(store, f"SELECT count(*), count({last}) FROM {view}") == [(3, 0)]


def test_setting_the_clock_forward_and_back_leaves_no_row_unsealed(tmp_path: Path, monkeypatch):
    limits = Limits(maintenance_s=3600, settle_s=0, seal_after_s=0.05)
    real_ns = time.time_ns
    with closing(HubStore.open(tmp_path, limits)) as store:
        for shift_s in (0, 7200, 0):
            monkeypatch.setattr(time, "time_ns", lambda shift_s=shift_s: real_ns() + shift_s * 10**9)
            appended(store, events=events([f"at {shift_s}"]))
        time.sleep(0.1)
        maintained(store)
        assert "events" not in store.snapshot("a").hot and sql(store, COUNT) == [(3,)]


def test_a_hub_whose_last_commit_replaced_rows_has_lost_nothing(tmp_path: Path):
    job = {"cluster_id": "c", "job": "aa", "answer": "healthy", "n_ranks": 1, "updated_at": 1}
    columns = schema.arrow_schema(schema.JOBS, without=schema.GIVEN_BY_HUB)
    with closing(HubStore.open(tmp_path, STILL)) as store:
        appended(store, events=events(["kept"]))
        store.append(Batch("", "a", {"jobs": pa.Table.from_pylist([job], schema=columns)})).result(30)
    assert upkeep.check(tmp_path).problems == []
    with closing(HubStore.open(tmp_path, STILL)) as again:
        assert again.damage.warning("a") == ""


def test_a_log_that_lost_its_tail_is_reported_and_remembered(tmp_path: Path):
    copy, folder = tmp_path / "copy", tmp_path / "hub"
    store = HubStore.open(folder, STILL)
    appended(store, events=events(["kept"]))
    upkeep.back_up(folder, copy)
    appended(store, events=events(["lost"]))
    store.close()
    (copy / "hub.position").write_bytes((folder / "hub.position").read_bytes())
    assert any("lost its tail" in problem for problem in upkeep.check(copy).problems)
    for _ in range(2):
        with closing(HubStore.open(copy, STILL)) as again:
            assert len(again.damage.gaps) >= 1 and "lost commits" in again.damage.warning("a")
            assert sql(again, "SELECT name FROM stored_events") == [("kept",)]


def test_check_names_the_damage_and_repair_keeps_the_rest(tmp_path: Path):
    first, _ = two_files(tmp_path)
    assert upkeep.check(tmp_path) == upkeep.FolderProblems(n_segments=2, n_rows=12)
    truncate(first)
    findings = upkeep.check(tmp_path)
    assert (findings.n_rows, len(findings.problems), findings.n_repaired) == (7, 1, 0)
    assert first.name in findings.problems[0]
    assert upkeep.check(tmp_path, repair=True).n_repaired == 1
    assert upkeep.check(tmp_path) == upkeep.FolderProblems(n_segments=1, n_rows=7)
    with pytest.raises(BadInput, match="is not a hub"):
        upkeep.check(tmp_path / "segments")


def test_repair_ends_whichever_byte_of_a_file_is_damaged(tmp_path: Path):
    first, _ = two_files(tmp_path)
    whole = first.read_bytes()
    for at in range(4, len(whole) - 8, len(whole) // 12):
        first.write_bytes(whole[:at] + bytes(each ^ 0xFF for each in whole[at : at + 3]) + whole[at + 3 :])
        if upkeep.check(tmp_path).problems:
            assert upkeep.check(tmp_path, repair=True).n_rows >= 7
            break
    assert not upkeep.check(tmp_path).problems


def test_a_backup_of_a_running_hub_holds_every_acknowledged_row(tmp_path: Path):
    folder, copy, back = tmp_path / "hub", tmp_path / "copy", tmp_path / "back"
    with closing(HubStore.open(folder, STILL)) as store:
        appended(store, events=events(["sealed"]))
        store.seal_all()
        appended(store, events=events(["hot"]))
        assert upkeep.back_up(folder, copy).n_rows == 2
        appended(store, events=events(["later"]))
    with pytest.raises(BadInput, match="not empty"):
        upkeep.back_up(folder, copy)
    assert upkeep.restore(copy, back).n_rows == 2
    with closing(HubStore.open(back, STILL)) as again:
        assert sql(again, "SELECT name FROM stored_events ORDER BY name") == [("hot",), ("sealed",)]


@pytest.mark.parametrize("harm", [empty, Path.unlink])
def test_a_lost_list_costs_no_sealed_row(tmp_path: Path, harm):
    two_files(tmp_path)
    harm(tmp_path / "hub.duckdb")
    for _ in range(2):
        with pytest.raises(StorageFailed, match="2 sealed files"):
            HubStore.open(tmp_path, STILL)
        with pytest.raises(StorageFailed, match="2 sealed files"):
            upkeep.check(tmp_path)
    assert upkeep.check(tmp_path, repair=True).n_rows == 12
    with closing(HubStore.open(tmp_path, STILL)) as store:
        assert sql(store, COUNT) == [(12,)]
        assert store.damage.n_unlisted == 0


def test_an_older_list_costs_no_newer_file(tmp_path: Path):
    with closing(HubStore.open(tmp_path, STILL)) as store:
        appended(store, events=events(["old"]))
        store.seal_all()
    older = (tmp_path / "hub.duckdb").read_bytes()
    with closing(HubStore.open(tmp_path, STILL)) as store:
        appended(store, events=events(["new"] * 3))
        store.seal_all()
    (tmp_path / "hub.duckdb").write_bytes(older)
    with closing(HubStore.open(tmp_path, STILL)) as store:
        assert sql(store, COUNT) == [(1,)]
        assert store.damage.n_unlisted == 1 and "not listed" in store.damage.warning("a")
    assert any("newer than the list" in each for each in upkeep.check(tmp_path).problems)
    upkeep.check(tmp_path, repair=True)
    with closing(HubStore.open(tmp_path, STILL)) as store:
        assert sql(store, COUNT) == [(4,)]


def test_a_foreign_file_is_not_deleted(tmp_path: Path):
    first, _ = two_files(tmp_path)
    foreign = first.with_name("report.parquet")
    foreign.write_bytes(b"foreign")
    half_written = first.with_suffix(".part")
    half_written.write_bytes(b"half")
    with closing(HubStore.open(tmp_path, STILL)) as store:
        assert sql(store, COUNT) == [(12,)]
    assert foreign.exists() and not half_written.exists()
    upkeep.check(tmp_path, repair=True)
    moved = tmp_path / "damaged" / foreign.relative_to(tmp_path)
    assert moved.read_bytes() == b"foreign" and not foreign.exists()
    assert not upkeep.check(tmp_path).problems


@pytest.mark.parametrize("n_bytes", [0, 300_000], ids=["empty", "truncated"])
def test_a_file_of_the_hub_that_lost_its_content_is_described_as_such(tmp_path: Path, n_bytes: int):
    store = HubStore.open(tmp_path, STILL)
    for number in range(20):
        appended(store, events=events([f"{number} " + random.Random(number).randbytes(20_000).hex()]))
    store.close()
    file = tmp_path / "hub.duckdb"
    assert file.stat().st_size > n_bytes
    file.write_bytes(file.read_bytes()[:n_bytes])
    if n_bytes:
        with pytest.raises(
            StorageFailed, match=r"cannot (read|open|prepare) \S+hub\.duckdb: .*restore a copy"
        ):
            HubStore.open(tmp_path, STILL)
        return
    with closing(HubStore.open(tmp_path, STILL)) as again:
        assert "lost commits" in again.damage.warning("a")
    assert not any(" s are missing" in problem for problem in upkeep.check(tmp_path).problems)
