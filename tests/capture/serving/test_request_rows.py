"""Rows of requests, tokens and servers from records of the kernel side."""

import json

import numpy as np

from stallscope.capture.serving.engines import Engine
from stallscope.capture.serving.requests import histogram, request_rows, server_rows, token_rows
from stallscope.events import kernel
from stallscope.events.layout import UNKNOWN, Array

ENGINES = {7: Engine(7, "triton", "models", 7)}


def connection(path: bytes, **values: int) -> Array:
    rows = np.zeros(1, kernel.CONNECTION)
    rows["request"]["path"], rows["request"]["pid"] = path, 7
    for name, value in values.items():
        target = rows if name in kernel.CONNECTION.names else rows["request"]
        target[name] = value
    return rows


def test_a_request_without_an_answer_has_unknown_times():
    events = np.zeros(1, kernel.REQUEST)
    events["ts_ns"], events["read_ns"], events["end_ns"], events["pid"] = 100, 110, 500, 7
    row = request_rows(events, ENGINES, node=3)[0]
    assert [int(row[name]) for name in ("node", "ts_ns", "read_ns", "end_ns")] == [3, 100, 110, 500]
    assert [int(row[name]) for name in ("answer_ns", "first_ns", "complete_ns", "status")] == [UNKNOWN] * 4


def test_the_model_comes_from_the_path_before_the_command_line():
    events = np.zeros(2, kernel.REQUEST)
    events["pid"], events["path"] = 7, (b"/v2/models/resnet/infer", b"/v1/completions")
    rows = request_rows(events, ENGINES, node=0)
    assert rows["model"].tolist() == [b"resnet", b"models"]


def test_an_edge_of_the_histogram_is_at_most_9_percent_above_each_length():
    lengths_ns = np.geomspace(1e5, 1e9, 500).astype(np.int64)
    counts = {int(edge): n for edge, n in json.loads(histogram(lengths_ns)).items()}
    assert sum(counts.values()) == 500
    for length_us in lengths_ns / 1e3:
        edge = min(each for each in counts if each >= length_us)
        assert edge <= 1.1 * length_us + 1


def test_the_text_of_a_wide_histogram_fits_its_column():
    assert len(histogram(np.geomspace(1e3, 1e12, 100_000).astype(np.int64))) <= 2048


def test_tokens_are_summed_by_path():
    events = np.zeros(3, kernel.TOKEN)
    events["pid"], events["path_hash"], events["gap_ns"] = 7, (1, 2, 1), (10_000, 20_000, 30_000)
    rows = token_rows(events, {(7, 1): b"/a", (7, 2): b"/b"}, 9, node=0)
    assert rows[["path", "n", "total_ns", "max_ns"]].tolist() == [
        (b"/a", 2, 40_000, 30_000),
        (b"/b", 1, 20_000, 20_000),
    ]


def test_the_oldest_open_request_does_not_wait_for_its_client():
    connections = np.concatenate(
        [
            connection(b"/slow", ts_ns=100, last_ns=150, full_since_ns=160),
            connection(b"/old", ts_ns=200, last_ns=300),
            connection(b"/new", ts_ns=250),
            connection(b"/ended", ts_ns=0, last_ns=900),
        ]
    )
    row = server_rows(connections, ENGINES, 1000, node=0)[0]
    assert (int(row["n_open"]), int(row["n_full"])) == (3, 1)
    assert (row["oldest_path"], int(row["oldest_ns"]), int(row["oldest_progress_ns"])) == (b"/old", 200, 300)
    assert row["progress_ns"] == 300
