"""Rows that were packed for the journal come back unchanged, with any content."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.store.hub.packing import packed, unpacked

LEAST, MOST = -(1 << 63), (1 << 63) - 1
COLUMNS = {
    "int64": (pa.int64(), st.one_of(st.integers(0, 9), st.integers(LEAST, MOST))),
    "int32": (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    "double": (pa.float64(), st.floats(allow_nan=False)),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.sampled_from(["", "a", "ab", "ü\x00"])),
    "time": (pa.timestamp("us", "UTC"), st.integers(0, 1 << 50)),
}


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Rows with columns of every type, some of them the same in all rows, with NULLs, or empty; in pieces, or cut."""
    n = draw(st.integers(0, 12))
    columns = {}
    for name, (kind, values) in COLUMNS.items():
        entry = draw(st.sampled_from(["any", "same", "with nulls", "nothing"]))
        if entry == "same":
            listed = [draw(values)] * n
        elif entry == "nothing":
            listed = [None] * n
        else:
            maybe = values if entry == "any" else st.one_of(values, st.none())
            listed = draw(st.lists(maybe, min_size=n, max_size=n))
        columns[name] = pa.array(listed, kind)
    whole = pa.table(columns)
    begin = draw(st.integers(0, n))
    return draw(st.sampled_from([whole, whole.slice(begin), pa.concat_tables([whole, whole.slice(begin)])]))


@settings(max_examples=150)
@given(rows=tables())
def test_packed_rows_are_unpacked_unchanged(rows):
    result = unpacked(packed(rows))
    assert len(result) == len(rows)
    for name in rows.column_names:
        there = result.column(name) if name in result.column_names else pa.nulls(len(rows), rows[name].type)
        assert there.type == rows[name].type and there.to_pylist() == rows[name].to_pylist()


def test_increasing_and_constant_columns_are_packed_compactly():
    n = 5_000
    begin_ns = 1_795_000_000 * 10**9
    steps = np.random.default_rng(1).integers(0, 1 << 15, n)
    rows = pa.table(
        {
            "ts_ns": begin_ns + np.arange(n) * 1000,
            "sum_ns": np.cumsum(steps),
            "attrs": pa.array(['{"otel.resource":{"host.name":"n1"}}'] * n),
        }
    )
    assert len(packed(rows.select(["ts_ns"]))) < n
    assert len(packed(rows.select(["attrs"]))) < n
    assert len(packed(rows.select(["sum_ns"]))) < 5 * n


@pytest.mark.parametrize("kind", [pa.int64(), pa.timestamp("us", "UTC")])
def test_a_difference_beyond_64_bits_is_none(kind):
    rows = pa.table({"a": pa.array([LEAST, MOST, LEAST, 0], pa.int64()).view(kind)})
    assert unpacked(packed(rows)).equals(rows)


def test_rows_that_an_earlier_version_packed_come_back():
    rows = pa.table({"ts_ns": [5, 7], "op": ["a", "a"], "rank": pa.array([1, None], pa.int32())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    assert unpacked(sink.getvalue().to_pybytes()).equals(rows)
