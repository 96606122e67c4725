"""Damaged files, full disks, places that cannot be written: one clear error each, and nothing stored is lost."""

import errno
import random
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stallscope.errors import BadTrace, StallscopeError, StorageFailed
from stallscope.events import layout
from stallscope.events.layout import COLLECTIVES
from stallscope.store import node
from stallscope.store.node import NodeTrace

from ..diagnose.builders import dp_trace
from ..memory_disk import memory_disk


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "trace.db"
    node.write(path, dp_trace(n_steps=20))
    return path.read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    with memory_disk(tmp_path / "small") as folder:
        yield folder


def rows(n: int, first: int = 0) -> np.ndarray:
    result = layout.empty(COLLECTIVES, n)
    result["ts_ns"], result["node"] = np.arange(first, first + n), 1
    return result


def spoilt(data: bytes, seed: int) -> bytes:
    """The file cut, overwritten in many places, with a page of noise, or with one bit changed."""
    rng = random.Random(seed)
    out = bytearray(data)
    match seed % 4:
        case 0:
            return bytes(out[: rng.randrange(len(out))])
        case 1:
            for _ in range(200):
                out[rng.randrange(len(out))] = rng.randrange(256)
        case 2:
            at = rng.randrange(len(out) - 4096)
            out[at : at + 4096] = rng.randbytes(4096)
        case _:
            out[rng.randrange(100, len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def test_a_damaged_trace_is_read_or_refused_in_one_line(tmp_path, whole):
    n_refused = 0
    for seed in range(120):
        path = tmp_path / f"{seed}.db"
        path.write_bytes(spoilt(whole, seed))
        try:
            node.read(path)
        except StallscopeError as error:
            n_refused += 1
            assert str(path) in str(error)
            assert "\n" not in str(error)
    assert n_refused > 50


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 20_000])
def test_a_truncated_trace_is_refused(tmp_path, whole, size):
    path = tmp_path / "cut.db"
    path.write_bytes(whole[:size])
    with pytest.raises(BadTrace):
        node.read(path)


@pytest.mark.parametrize("text", ["", "hello\n", "SQLite format 3\0" + 200 * "x"])
def test_a_file_that_is_not_a_trace_is_refused_and_unchanged(tmp_path, text):
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(BadTrace, match=r"not a stallscope trace|damaged|cannot"):
        node.read(path)
    assert path.read_text() == text


def test_another_programs_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("CREATE TABLE mine (x)")
    before = path.read_bytes()
    for use in (node.read, NodeTrace):
        with pytest.raises(BadTrace):
            use(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE collectives SET op='x' WHERE id=3",
        "UPDATE collectives SET count=1e300 WHERE id=3",
        "UPDATE collectives SET tid=-7 WHERE id=3",
        "UPDATE collectives SET node=77",
        "UPDATE sessions SET facts='{'",
        "DROP TABLE losses",
        "DELETE FROM schema_version",
    ],
)
def test_values_that_cannot_be_are_damage(tmp_path, whole, statement):
    path = tmp_path / "odd.db"
    path.write_bytes(whole)
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute(statement)
    with pytest.raises(BadTrace):
        node.read(path)


def test_a_full_disk_keeps_committed_rows(small_disk):
    path = small_disk / "trace.db"
    store = NodeTrace(path)
    store.node("here")
    n_kept = 0
    with pytest.raises(StorageFailed, match="the data stored before is unharmed"):
        for i in range(10_000):
            store.append(COLLECTIVES, rows(100, first=100 * i))
            store.commit()
            n_kept += 100
    store.close()
    assert n_kept >= 500
    ts_ns = node.read(path).collectives["ts_ns"]
    np.testing.assert_array_equal(ts_ns, np.arange(n_kept))


def test_an_import_onto_a_full_disk_leaves_no_partial_files(small_disk):
    (small_disk / "precious").write_text("stays")
    with pytest.raises(StorageFailed) as refused:
        node.write(small_disk / "trace.db", dp_trace(n_steps=4000, n_ranks=2))
    assert "\n" not in str(refused.value)
    assert [path.name for path in small_disk.iterdir()] == ["precious"]
    assert (small_disk / "precious").read_text() == "stays"


def test_a_folder_that_cannot_be_written_is_one_clear_error(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StorageFailed, match="permissions"):
        node.write(small_disk / "trace.db", dp_trace(n_steps=3))


def test_a_name_that_cannot_be_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "trace.db", tmp_path / ("n" * 300)):
        with pytest.raises(StorageFailed) as refused:
            NodeTrace(path)
        assert "\n" not in str(refused.value)


def test_the_small_disk_is_small(small_disk):
    with pytest.raises(OSError) as refused:
        (small_disk / "large").write_bytes(b"x" * 2_000_000)
    assert refused.value.errno == errno.ENOSPC
