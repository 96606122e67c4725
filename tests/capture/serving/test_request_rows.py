"""Rows of requests, tokens and servers from records of the kernel side."""

import numpy as np

from stallscope.capture.serving.engines import Engine
from stallscope.capture.serving.requests import (
    iteration_rows,
    request_rows,
    server_rows,
    still_since_ns,
    token_rows,
)
from stallscope.events import kernel
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.request_clients import key_numbers

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


def test_a_client_has_the_number_of_the_key_of_its_hash():
    events = np.zeros(3, kernel.REQUEST)
    events["client"] = (0, 1, 2**32 - 1)  # 0: a Unix socket
    rows = request_rows(events, ENGINES, node=0, client_key_number=2**20 - 1)
    assert rows["client"][0] == UNKNOWN
    assert key_numbers(rows["client"][1:]).tolist() == [2**20 - 1] * 2
    assert (rows["client"][1:] % 2**32).tolist() == [1, 2**32 - 1]


def test_the_model_comes_from_the_path_before_the_command_line():
    events = np.zeros(2, kernel.REQUEST)
    events["pid"], events["path"] = 7, (b"/v2/models/resnet/infer", b"/v1/completions")
    rows = request_rows(events, ENGINES, node=0)
    assert rows["model"].tolist() == [b"resnet", b"models"]


def test_tokens_are_summed_by_path():
    events = np.zeros(3, kernel.TOKEN)
    events["pid"], events["path_hash"], events["gap_ns"] = 7, (1, 2, 1), (10_000, 20_000, 30_000)
    rows = token_rows(events, {(7, 1): b"/a", (7, 2): b"/b"}, 9, node=0)
    assert rows[["path", "n", "total_ns", "max_ns"]].tolist() == [
        (b"/a", 2, 40_000, 30_000),
        (b"/b", 1, 20_000, 20_000),
    ]


def test_an_iteration_has_at_most_one_token_of_a_response():
    # two responses, with a token each every 10 us; the second response pauses in the third iteration
    sent_us = [(100, 10), (101, 10), (110, 10), (111, 10), (150, 40), (160, 10), (161, 50)]
    events = np.zeros(len(sent_us), kernel.TOKEN)
    events["ts_ns"], events["gap_ns"] = 1000 * np.array(sent_us).T
    events["pid"] = 7
    row = iteration_rows(events, 9, node=3)[0]
    assert (int(row["n"]), int(row["n_tokens"]), int(row["max_tokens"])) == (4, 7, 2)
    assert (int(row["total_ns"]), int(row["max_ns"]), int(row["max_at_ns"])) == (60_000, 40_000, 110_000)


def test_the_oldest_open_request_does_not_wait_for_its_client():
    connections = np.concatenate(
        [
            connection(b"/slow", ts_ns=100, first_ns=150, last_ns=150, full_since_ns=160),
            connection(b"/old", ts_ns=200, first_ns=250, last_ns=300),
            connection(b"/new", ts_ns=250),
            connection(b"/ended", ts_ns=0, last_ns=900),
        ]
    )
    row = server_rows(connections, ENGINES, 1000, node=0)[0]
    assert (int(row["n_open"]), int(row["n_full"])) == (3, 1)
    assert (row["oldest_path"], int(row["oldest_ns"]), int(row["oldest_progress_ns"])) == (b"/old", 200, 300)
    assert row["progress_ns"] == 300


def test_the_header_of_a_response_is_no_progress():
    row = server_rows(connection(b"/a", ts_ns=200, answer_ns=210, last_ns=210), ENGINES, 1000, node=0)[0]
    assert (int(row["oldest_progress_ns"]), int(row["progress_ns"])) == (200, UNKNOWN)


def waiting_since(ns: int) -> Array:
    return server_rows(connection(b"/a", ts_ns=ns), ENGINES, ns, node=0)


def test_a_client_that_tries_again_does_not_end_the_wait():
    nothing = np.zeros(0, kernel.REQUEST), np.zeros(0, kernel.TOKEN)
    first = still_since_ns(waiting_since(100), {}, *nothing)
    assert first == {7: 100}
    assert still_since_ns(waiting_since(500), first, *nothing) == {7: 100}
    answered = np.zeros(1, kernel.REQUEST)
    answered["path"], answered["first_ns"] = b"/a", 400
    assert still_since_ns(waiting_since(500), first, answered, nothing[1]) == {7: 500}
    assert still_since_ns(waiting_since(500)[:0], first, *nothing) == {}
