"""Recordings that are none, broken, or hold nonsense: one clear line, and no trace is made of them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stallscope.errors import BadTrace, NotFound
from stallscope.importers import importer_for
from stallscope.store import node

from ..diagnose.reports import report_of
from .recordings import COLUMNS, column, two_ranks, with_column


@pytest.fixture
def folder(tmp_path):
    """A whole recording of two ranks."""
    return two_ranks(8).write(tmp_path / "recording", truth={"rank_pids": [11, 12]})


def refused(folder, *words):
    """The error message for a folder."""
    with pytest.raises(BadTrace) as caught:
        importer_for(folder).read(folder)
    output = str(caught.value)
    assert "\n" not in output
    assert len(output) < 500
    for word in (folder.name, *words):
        assert word in output
    return output


def test_no_such_path(tmp_path):
    with pytest.raises(NotFound, match="check the path"):
        importer_for(tmp_path / "none")


def test_a_folder_without_a_recording_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadTrace, match="contains no file that can be imported") as caught:
        importer_for(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_file_of_another_kind(tmp_path):
    for name, content in {"a.txt": b"hello", "empty": b"", "b.parquet": b"PAR1", "c.json": b"{}"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadTrace):
            importer_for(tmp_path / name).read(tmp_path / name)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_truncated_parquet(folder, share):
    path = folder / "events.parquet"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    refused(folder, "events.parquet", "not a readable Parquet file")


def test_bits_that_changed(folder):
    path = folder / "events.parquet"
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(40):
        spoilt = bytearray(whole)
        for at in rng.integers(0, len(whole), 20):
            spoilt[at] = int(rng.integers(256))
        path.write_bytes(spoilt)
        try:
            importer_for(folder).read(folder)
        except BadTrace as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("name", COLUMNS)
def test_missing_columns(folder, name):
    with_column(folder, name, None)
    refused(folder, f"no column {name}")


def test_all_missing_columns_are_listed_in_one_error(folder):
    for name in ("tid", "a5"):
        with_column(folder, name, None)
    refused(folder, "tid, a5")


def test_no_rows(folder):
    table = pq.read_table(folder / "events.parquet")
    pq.write_table(table.slice(0, 0), folder / "events.parquet")
    refused(folder, "contains no events")


def test_no_collectives(folder):
    with_column(folder, "symbol", ["cudaFree"] * len(column(folder, "pid")))
    refused(folder, "no NCCL collective")


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("value", [None, 0.5, float("nan"), [1], b"\xff\xfe"], ids=repr)
def test_columns_of_another_type(folder, name, value):
    if (name, value) == ("comm", None):
        return  # names of tasks may be missing
    with_column(folder, name, [value] * len(column(folder, "a6")))
    output = refused(folder)
    assert name in output or "no NCCL collective" in output


@pytest.mark.parametrize("name", ["ts_ns", "pid", "tid", "a0"])
def test_text_in_a_numeric_column_is_refused(folder, name):
    with_column(folder, name, ["x"] * len(column(folder, "a6")))
    refused(folder, name)


@pytest.mark.parametrize("seed", range(15))
def test_arguments_that_make_no_sense_are_taken_as_unknown(folder, tmp_path, seed):
    rng = np.random.default_rng(seed)
    for i in range(7):
        words = column(folder, f"a{i}").copy()
        hit = rng.random(len(words)) < 0.2
        words[hit] = rng.integers(0, 1 << 64, hit.sum(), dtype=np.uint64)
        with_column(folder, f"a{i}", words)
    trace = importer_for(folder).read(folder)
    node.write(tmp_path / "trace.db", trace)
    report_of(trace)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", '"x"', '{"clock": 5}', '{"clock": {"monotonic_ns": 1}}', "[" * 100_000),
        *('{"rank_pids": "x"}', '{"rank_pids": null}', '{"rank_pids": {"a": 1}}', '{"rank_pids": [1e400]}'),
        '{"clock": {"monotonic_ns": "x", "realtime_ns": 1}}',
        '{"clock": {"monotonic_ns": 1e300, "realtime_ns": 1}}',
        '{"clock": {"monotonic_ns": 1180591620717411303424, "realtime_ns": 1}}',
    ],
    ids=lambda text: text[:40] or "empty",
)
def test_a_truth_that_is_not_as_documented(folder, text):
    (folder / "truth.json").write_text(text)
    refused(folder, "truth.json", "restore it, or remove it")


def test_a_truth_file_with_invalid_utf8_is_refused(folder):
    (folder / "truth.json").write_bytes(b"\xff\xfe\x00")
    refused(folder, "truth.json")


def test_without_a_truth_the_recording_is_read_all_the_same(folder):
    (folder / "truth.json").unlink()
    trace = importer_for(folder).read(folder)
    assert (trace.clocks, trace.facts, len(trace.collectives)) == ((), {}, 16)


def test_facts_stay_on_one_line(folder):
    (folder / "truth.json").write_text(json.dumps({"hardware": "one\nbox\r\n  with lines"}))
    assert "one box with lines" in importer_for(folder).read(folder).source


def test_a_profiler_file_that_is_none(folder):
    (folder / "nccl_profiler.parquet").write_text("x")
    refused(folder, "nccl_profiler.parquet")
    pq.write_table(pa.table({"pid": [1]}), folder / "nccl_profiler.parquet")
    refused(folder, "nccl_profiler.parquet", "gpu_start_ns")


def test_a_claim_of_too_many_rows_is_refused(folder, monkeypatch):
    from stallscope.importers import parquet

    with pytest.raises(BadTrace, match="at most 10 rows can be read"):
        parquet.table(folder / "events.parquet", ("ts_ns",), max_rows=10)
