"""Rows that wait for a hub: they survive the agent, stay below the limit, and are never half a batch."""

from pathlib import Path

import numpy as np
import pytest

from stallscope.errors import StorageFailed
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.exporters.hub_batches import TABLES
from stallscope.exporters.spool import Spool, read


def rows(n: int, first: int = 0) -> Array:
    made = np.zeros(n, layout.dtype(TABLES["collectives"]))
    made["seq"] = np.arange(first, first + n)
    return made


def test_a_batch_is_there_for_the_next_agent_with_its_id_and_values(tmp_path: Path):
    first = Spool(tmp_path / "s", max_bytes=10**9)
    first.put({"collectives": rows(5), "losses": np.zeros(0, layout.dtype(TABLES["losses"]))})
    first.put({"collectives": rows(3, 5)})
    before = first.batches()
    again = Spool(tmp_path / "s", max_bytes=10**9)
    assert again.batches() == before
    assert len({batch.batch_id for batch in before}) == 2
    assert [batch.n_rows for batch in before] == [5, 3]
    tables = read(before[0])
    assert set(tables) == {"collectives"}
    assert np.array_equal(tables["collectives"], rows(5))
    again.put({"collectives": rows(1)})
    assert [batch.number for batch in again.batches()] == [1, 2, 3]


def test_batches_that_wait_behind_many_batches_are_compressed_and_keep_their_values(tmp_path: Path):
    spool = Spool(tmp_path / "s", max_bytes=10**9)
    for number in range(10):
        spool.put({"collectives": rows(1_000, number)})
    first, *_, last = spool.batches()
    assert last.n_bytes < first.n_bytes / 10
    assert np.array_equal(read(last)["collectives"], rows(1_000, 9))
    last.path.write_bytes(last.path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=last.path.name):
        read(last)


def test_beyond_the_limit_the_oldest_go_and_are_counted(tmp_path: Path):
    spool = Spool(tmp_path / "s", max_bytes=10**9)
    for number in range(10):
        spool.put({"collectives": rows(100, number)})
    size = spool.batches()[0].n_bytes
    spool = Spool(tmp_path / "s", max_bytes=3 * size)
    assert [batch.number for batch in spool.batches()] == [8, 9, 10]
    assert spool.n_dropped == 700
    spool.put({"collectives": rows(100)})
    assert [batch.number for batch in spool.batches()] == [9, 10, 11]
    assert spool.n_dropped == 800
    assert len(list((tmp_path / "s").iterdir())) == 3


def test_a_partially_written_batch_is_discarded_on_restart(tmp_path: Path):
    spool = Spool(tmp_path / "s", max_bytes=10**9)
    spool.put({"collectives": rows(5)})
    whole = spool.batches()[0].path
    whole.with_name("000000000002-" + "a" * 32 + "-5.batch.part").write_bytes(whole.read_bytes()[:100])
    again = Spool(tmp_path / "s", max_bytes=10**9)
    assert [batch.number for batch in again.batches()] == [1]
    assert len(list((tmp_path / "s").iterdir())) == 1


def test_a_damaged_batch_raises_an_error_with_its_file_name(tmp_path: Path):
    spool = Spool(tmp_path / "s", max_bytes=10**9)
    spool.put({"collectives": rows(50)})
    batch = spool.batches()[0]
    for content in (b"", b"nonsense", batch.path.read_bytes()[:-700]):
        batch.path.write_bytes(content)
        with pytest.raises(ValueError, match=batch.path.name):
            read(batch)
    batch.path.unlink()
    with pytest.raises(ValueError, match=batch.path.name):
        read(batch)
    spool.drop(batch)
    assert spool.n_dropped == 50


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="cannot store batches for the hub"):
        Spool(tmp_path / "file" / "s", max_bytes=10**9)


def test_a_disk_that_refuses_costs_rows_and_not_the_agent(tmp_path: Path):
    spool = Spool(tmp_path / "s", max_bytes=10**9)
    (tmp_path / "s").rmdir()
    spool.put({"collectives": rows(5)})
    assert spool.n_dropped == 5
    assert not spool.batches()
