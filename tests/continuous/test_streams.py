"""The streams of one process: their number is bounded, in total and for each tenant, and the rows that they keep."""

import pyarrow as pa
import pytest

from stallscope.continuous import streams
from stallscope.diagnose import SKIPPED, Retention, Stream

from ..diagnose.builders import dp_trace, where
from .test_continuous_diagnosis import as_arrow

ROWS = Retention(all_rows=400, min_rows=100)


def test_the_clusters_of_one_tenant_cannot_take_all_streams(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "_MAX_STREAMS", 4)
    made = streams.Streams(Stream)
    assert [made.feed(("a", f"c{number}"), {}) for number in range(5)] == [[], [], [], None, None]
    assert [made.feed(("b", f"c{number}"), {}) for number in range(2)] == [[], None]
    made.forget([("a", "c0")])
    assert made.feed(("b", "c1"), {}) == []


def test_rows_that_wait_for_a_silent_rank_are_bounded_and_kept_in_whole_rounds():
    trace = dp_trace(n_ranks=4, n_steps=600)
    waiting = where(trace, trace.collectives["pid"] != trace.collectives["pid"].max())
    made, key = streams.Streams(lambda: Stream(retention=ROWS)), ("a", "c1")
    made.feed(key, as_arrow(waiting, "b1").tables)
    (kept,) = (job.rows.tables["collectives"] for job in made._streams[key]._jobs.values() if job.rows.n)
    assert 0 < len(kept) <= ROWS.all_rows
    advance = made.tick()[key]
    assert advance.n_left_out == len(waiting.collectives) - len(kept)
    assert advance.every > 1 and (kept["seq"] % advance.every == 0).all()
    assert made.tick()[key].n_left_out == 0, "each row is reported once"


@pytest.mark.parametrize("column", ["ts_ns", "wait_leave_ns", "sleep_ns", "seq"])
@pytest.mark.parametrize("value", [2**63 - 1, -(2**63)])
def test_a_row_with_a_number_too_large_to_compute_with_is_left_out_and_stated(column: str, value: int):
    """Once each later tick failed, so the cluster had no verdict again."""
    trace = dp_trace(n_ranks=4, n_steps=60)
    tables = dict(as_arrow(trace, "b1").tables)
    rows = tables["collectives"]
    numbers = rows[column].to_pylist()
    numbers[-7] = value
    odd = rows.set_column(rows.column_names.index(column), column, pa.array(numbers, pa.int64()))
    made, key = streams.Streams(Stream), ("a", "c1")
    made.feed(key, tables | {"collectives": odd.slice(0, len(odd) // 2)})
    made.feed(key, {"collectives": odd.slice(len(odd) // 2)})
    advance = made.tick()[key]
    assert advance.failure == ""
    (job,) = made._streams[key]._jobs.values()
    assert job.lost == {SKIPPED: 1}


def test_rows_of_jobs_that_have_ended_do_not_count():
    now_ns = [0]
    made = streams.Streams(lambda: Stream(retention=ROWS, clock=lambda: now_ns[0]))
    for number in range(8):
        made.feed(("a", f"ended{number}"), as_arrow(dp_trace(n_steps=12), f"b{number}").tables)
    now_ns[0] = 3600 * 10**9
    made.tick()
    assert sum(stream.n_rows for stream in made._streams.values()) == 0
    made.feed(("a", "new"), as_arrow(dp_trace(n_steps=24), "new").tables)
    assert made.tick()["a", "new"].n_left_out == 0


def test_the_largest_stream_gives_its_rows_up_first():
    made = streams.Streams(lambda: Stream(retention=ROWS))
    small, large = (dp_trace(n_steps=n_steps) for n_steps in (12, 600))
    for cluster, trace in (("small", small), ("large", large)):
        made.feed(("a", cluster), as_arrow(trace, cluster).tables)
    advances = made.tick()
    assert advances["a", "small"].n_left_out == 0 < advances["a", "large"].n_left_out
    assert made._streams["a", "large"].n_rows <= ROWS.all_rows
