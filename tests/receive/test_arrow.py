"""Batches that the Arrow endpoint refuses, so that all stored rows can be read again."""

import json
import sys

import numpy as np
import pyarrow as pa
import pytest

from stallscope.errors import BadInput
from stallscope.receive import arrow
from stallscope.store.hub import schema

from .requests import NOW_NS

NO_TEXT = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\x80a")]
)


def request(symbol: pa.Array, **head: object) -> bytes:
    """One row of `calls`."""
    rows = pa.table({"ts_ns": [NOW_NS], "symbol": symbol})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    stream = sink.getvalue().to_pybytes()
    head |= {"tables": [{"name": "calls", "n_bytes": len(stream)}]}
    return json.dumps(head).encode() + b"\n" + stream


@pytest.mark.parametrize(
    "symbol",
    [
        NO_TEXT,
        pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), NO_TEXT, safe=False),
        pa.DictionaryArray.from_arrays(pa.array([7], pa.int8()), pa.array(["word"]), safe=False),
    ],
)
def test_text_that_is_none_is_refused(symbol: pa.Array):
    with pytest.raises(BadInput, match=r"the rows for table calls are not a valid Arrow stream: .*Invalid"):
        arrow.decode(request(symbol), "a", limit=1 << 20)


@pytest.mark.parametrize(
    "head", [{"batch_id": "\ud800"}, {"node": "\ud800"}, {"node": "n", "about": {"gpu_model": "\ud800"}}]
)
def test_halves_of_characters_in_the_head_are_refused(head: dict[str, object]):
    assert (
        arrow.decode(request(pa.array(["word"]), node="n"), "a", limit=1 << 20).tables["calls"].num_rows == 1
    )
    with pytest.raises(BadInput, match="the first line of an Arrow request is not valid JSON"):
        arrow.decode(request(pa.array(["word"]), **head), "a", limit=1 << 20)


def test_an_unknown_rank_is_null():
    rows = pa.table({"ts_ns": pa.array([NOW_NS, NOW_NS]), "rank": pa.array([-1, 3], pa.int32())})
    stored = arrow.in_our_form(rows, "collectives")
    assert stored["rank"].to_pylist() == [None, 3]


@pytest.mark.parametrize("n_gpus", ["1e400", "1" + "0" * 30, "-5", "9999999999", '"x"'])
def test_a_number_of_gpus_that_cannot_be_stored_is_refused(n_gpus: str):
    body = request(pa.array(["word"]), node="n", about={"n_gpus": "N"}).replace(b'"N"', n_gpus.encode())
    with pytest.raises(BadInput, match="n_gpus in an Arrow request"):
        arrow.decode(body, "a", limit=1 << 20)


def test_no_request_searches_for_a_module(monkeypatch: pytest.MonkeyPatch):
    """pyarrow searches for dateutil to infer a type, which takes longer than decoding a column."""
    body = request(pa.array(["word"]), node="n", about={"n_gpus": 8})
    arrow.decode(body, "a", limit=1 << 20)
    searches: list[str] = []

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            searches.append(name)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    schema.conformed("calls", arrow.decode(body, "a", limit=1 << 20).tables["calls"])
    assert searches == []
