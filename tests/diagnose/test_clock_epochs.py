"""The answer does not depend on the zero point of a clock: boot, 1970, or any other moment."""

from dataclasses import replace

import pytest

from stallscope.diagnose import diagnose
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Category
from stallscope.exporters.hub_batches import ON_MONOTONIC

from .builders import MS, Gone, Job, data_parallel, dp_trace, every, trace_of
from .test_slow_gpu import slow_gpu

SINCE_1970_NS = 1_795_985_333_000_000_000
TRACES = {
    "late rank": lambda: dp_trace(every(2, 7, 50 * MS, category=Category.IO), n_ranks=8),
    "slow GPU": lambda: slow_gpu(lambda step: 4 * MS),
    "hang": lambda: trace_of(Job(data_parallel(4), gone=(Gone(3, 20),), quiet_ns=60_000 * MS)),
    "healthy": dp_trace,
}


def moved(trace, by_ns):
    """The trace with the hosts' monotonic clocks moved."""
    tables = {}
    for table in layout.TABLES:
        rows = getattr(trace, table.name).copy()
        for name in ON_MONOTONIC & set(rows.dtype.names):
            rows[name][rows[name] != UNKNOWN] += by_ns
        tables[table.name] = rows
    clocks = tuple(replace(clock, monotonic_ns=clock.monotonic_ns + by_ns) for clock in trace.clocks)
    ends = tuple(end if end == UNKNOWN else end + by_ns for end in trace.ends_ns)
    return replace(trace, **tables, clocks=clocks, ends_ns=ends)


def essence(trace):
    return [
        (
            verdict.kind,
            verdict.ranks,
            verdict.victims,
            verdict.cost and pytest.approx(verdict.cost.gpu_seconds, abs=0.002),
        )
        for verdict in diagnose(trace).verdicts
    ]


@pytest.mark.parametrize("name", TRACES)
def test_the_answer_does_not_depend_on_the_zero_point_of_the_clocks(name):
    trace = TRACES[name]()
    expected = essence(trace)
    assert bool(expected) == (name != "healthy")
    assert essence(moved(trace, SINCE_1970_NS)) == expected
