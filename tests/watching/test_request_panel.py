"""The requests to inference engines on the page of a running trace: open requests, rates, percentiles."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from stallscope.events import layout
from stallscope.events.trace import Trace
from stallscope.live.page_view import Panel, View
from stallscope.live.request_lines import RequestState
from stallscope.live.terminal_page import Page, drawn

SECOND, MS = 10**9, 10**6
EMPTY = Page(title="trace", job="1 process", system="2 CPUs", ranks=[], operations=[])


def requests(n: int, *, begin_ns: int = 100 * SECOND):
    rows = layout.empty(layout.REQUESTS, n)
    rows["ts_ns"] = begin_ns + 100 * MS * np.arange(n)
    rows["pid"], rows["engine"], rows["model"], rows["path"] = 7, b"vllm", b"llama-8b", b"/v1/completions"
    rows["first_ns"] = rows["ts_ns"] + 20 * MS
    rows["end_ns"] = rows["ts_ns"] + 90 * MS
    return rows


def server(ts_ns: int, n_open: int, *, oldest_ns: int = -1, progress_ns: int = -1, n_full: int = 0):
    row = layout.empty(layout.SERVERS, 1)
    row["ts_ns"], row["pid"], row["group_pid"], row["engine"], row["n_open"] = ts_ns, 7, 7, b"vllm", n_open
    row["oldest_ns"], row["oldest_progress_ns"], row["n_full"] = oldest_ns, progress_ns, n_full
    row["oldest_path"] = b"/v1/completions"
    return row


def state(*batches: Trace) -> RequestState:
    out = RequestState()
    for batch in batches:
        out.feed(batch)
    return out


def screen(known: RequestState, view: View = View(), width: int = 120) -> str:
    page = replace(EMPTY, endpoints=known.endpoints(), open_requests=known.open_requests())
    console = Console(file=io.StringIO(), width=width, height=30, color_system=None)
    console.print(drawn(page, width, 30, view))
    return console.file.getvalue()


def test_an_endpoint_has_its_rate_and_percentiles():
    text = screen(state(replace(Trace(), requests=requests(120))))
    line = next(line for line in text.splitlines() if "llama-8b /v1/completions" in line)
    assert line.split()[2:] == ["2.0", "20", "20", "20", "90", "90", "90"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_titles_of_the_columns_are_whole_next_to_a_long_path(width):
    rows = requests(120)
    rows["path"] = b"/v2/models/meta-llama-8b/generate_stream"
    text = screen(state(replace(Trace(), requests=rows)), width=width)
    words = text[: text.index("llama-8b")].split()
    assert {"per", "s", "first", "token", "between", "p99"} <= set(words)
    assert max(map(len, text.splitlines())) <= width


def test_the_oldest_open_request_has_its_age_and_location():
    now_ns = 200 * SECOND
    row = server(now_ns, 3, oldest_ns=now_ns - 7 * SECOND, progress_ns=now_ns - 7 * SECOND)
    text = screen(state(replace(Trace(), requests=requests(5), servers=row)))
    assert (
        "vllm 7: 3 requests open; the oldest, /v1/completions, is 7 s old and waits for its first token since 7 s"
        in text
    )


def test_a_request_that_has_tokens_waits_for_the_next_token():
    now_ns = 200 * SECOND
    row = server(now_ns, 1, oldest_ns=now_ns - 9 * SECOND, progress_ns=now_ns - SECOND)
    assert "9 s old and waits for its next token since 1 s" in screen(state(replace(Trace(), servers=row)))


def test_requests_that_ended_are_not_open():
    first = replace(Trace(), servers=server(100 * SECOND, 2, oldest_ns=99 * SECOND, progress_ns=99 * SECOND))
    later = replace(Trace(), requests=requests(1, begin_ns=110 * SECOND))
    assert state(first, later).open_requests() == []


def test_a_client_that_takes_no_data_is_stated():
    assert "2 with a client that does not read" in screen(
        state(replace(Trace(), servers=server(100 * SECOND, 2, n_full=2)))
    )


def test_rows_older_than_a_minute_are_dropped():
    old = replace(Trace(), requests=requests(50))
    new = replace(Trace(), requests=requests(20, begin_ns=300 * SECOND))
    assert [each.n for each in state(old, new).endpoints()] == [20]


def test_the_key_opens_the_requests_of_a_training_job_too():
    view = View().after("r", [], 1)
    assert view.panel is Panel.REQUESTS
    assert "no requests to an inference engine" in screen(RequestState(), view)
    assert view.after("r", [], 1).panel is Panel.RANKS


def test_a_narrow_terminal_has_the_worst_percentiles():
    text = screen(state(replace(Trace(), requests=requests(120))), width=60)
    assert "p99.9" not in text
    assert all(len(line) <= 60 for line in text.splitlines())
