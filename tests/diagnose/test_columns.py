"""A trace whose collectives are held column by column is diagnosed as the same trace in rows is."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.engine import diagnose
from stallscope.diagnose.report.verdict import as_json
from stallscope.diagnose.timeline.node_rounds import _by_row, meetings
from stallscope.diagnose.timeline.releases import host_until_release_ns
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events.columns import Columns, is_one_value
from stallscope.events.layout import COLLECTIVES, Array
from stallscope.events.trace import Trace
from stallscope.synth import HostStall, Job, Schedule, simulate

JOBS = (
    Job(dp=8, steps=40, ranks_per_node=4),
    Job(dp=4, tp=2, pp=2, ranks_per_node=4, steps=30),
)
NAMES = tuple(field.name for field in COLLECTIVES.fields)


@pytest.fixture(scope="module", params=JOBS)
def trace(request: pytest.FixtureRequest) -> Trace:
    stall = HostStall(
        cause="host_sleep", ranks=(3,), delay_ns=80_000_000, schedule=Schedule(first=8, every=5)
    )
    return simulate(request.param, [stall], seed=3, has_twin=False)[0]


def by_column(rows: Array) -> Columns:
    held: dict[str, Array | tuple[Array, ...]] = {}
    for name in NAMES:
        column = np.ascontiguousarray(rows[name])
        if column.ndim == 2:
            held[name] = tuple(np.ascontiguousarray(part) for part in column.T)
        else:
            is_same = (column == column[0]).all()
            held[name] = np.broadcast_to(column[0], column.shape) if is_same else column
    return Columns(COLLECTIVES, len(rows), held)


def by_process(rows: Array) -> Array:
    return rows[np.lexsort((rows["ts_ns"], rows["pid"], rows["node"]))]


def test_columns_are_diagnosed_as_rows_are(trace: Trace) -> None:
    expected = as_json(diagnose(trace))
    assert expected["verdicts"]
    for rows in (trace.collectives, by_process(trace.collectives)):
        assert as_json(diagnose(replace(trace, collectives=by_column(rows)))) == expected


def test_columns_give_the_rows_back(trace: Trace) -> None:
    rows = trace.collectives
    columns = by_column(rows)
    assert is_one_value(columns["datatype"]) and not is_one_value(columns["ts_ns"])
    some = np.array([5, 0, 17])
    assert (columns[some] == rows[some]).all()
    assert columns[7] == rows[7]
    assert (columns[rows["seq"] > 3] == rows[rows["seq"] > 3]).all()
    assert (columns["ledger_ns"] == rows["ledger_ns"]).all()
    assert (columns.element("ledger_ns", 2) == rows["ledger_ns"][:, 2]).all()


def test_a_field_without_a_column_is_unknown_everywhere() -> None:
    columns = Columns(COLLECTIVES, 3, {"ts_ns": np.arange(3)})
    assert columns["gpu_start_ns"].tolist() == [-1, -1, -1]
    assert columns["flags"].tolist() == [0, 0, 0]
    with pytest.raises(ValueError):
        columns["no_such_field"]


def test_rounds_folded_as_tables_are_those_matched_row_by_row(trace: Trace) -> None:
    timeline = timeline_of(trace)
    result = meetings(timeline)
    rows = np.flatnonzero(np.isin(timeline.round, result.round))
    release, is_last = timeline.releases
    host = host_until_release_ns(timeline.ts_ns, timeline.rows["wait_leave_ns"], timeline.wait_ns, is_last)
    expected = _by_row(timeline, rows, release, host, is_last)
    assert len(np.unique(timeline.node)) == 1 or len(result.round)
    for name in ("round", "comm", "node", "arrival_ns", "release_ns", "host_ns", "is_last", "waits", "holds"):
        assert (getattr(result, name) == getattr(expected, name)).all(), name
