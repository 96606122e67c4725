"""Incidents of inference engines in a stream: they open while the fault lasts, and close after it."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from stallscope.diagnose import Stream
from stallscope.events import layout
from stallscope.events.names import Category
from stallscope.events.trace import Trace

sys.path.insert(0, str(Path(__file__).parent))
from engine_traces import LATE, MS, PID, SECOND, EngineTrace
from test_dead_servers import dead_engine

DELAY_NS = 300 * MS
CLOSES_AFTER_NS = 121 * SECOND


class Machine:
    """A stream that is fed the traces of a single machine; its clock follows the machine's."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.stream = Stream(clock=lambda: self.now_ns)

    def feed(self, trace: Trace, until_ns: int):
        self.now_ns = until_ns
        batch = replace(trace, ends_ns=(until_ns,))
        return [*self.stream.feed(batch), *self.stream.tick()]


def late_engine() -> Trace:
    engine = EngineTrace()
    stack = engine.stack("/srv/app.py:12 write_slowly")
    for i in LATE:
        engine.off(*engine.late_gap(i, DELAY_NS), Category.SLEEP, stack=stack)
    return engine.trace()


def test_late_requests_open_an_incident_with_its_line_that_closes_after_them():
    machine, trace = Machine(), late_engine()
    end_ns = int(trace.requests["end_ns"].max())
    opened = machine.feed(trace, end_ns)
    assert [(change.kind, change.verdict.kind) for change in opened] == [("opened", "latency")]
    assert opened[0].verdict.evidence.line == "/srv/app.py:12 write_slowly"
    assert "write_slowly" in opened[0].verdict.summary
    empty = replace(Trace(), nodes=trace.nodes)
    assert machine.feed(empty, end_ns + SECOND) == []
    closed = machine.feed(empty, end_ns + CLOSES_AFTER_NS)
    assert [(change.kind, change.incident_id) for change in closed] == [("closed", opened[0].incident_id)]


def test_a_dead_engine_is_one_incident_until_it_answers():
    machine, trace = Machine(), dead_engine(Category.LOCK).trace()
    last_ns = int(trace.servers["ts_ns"].max())
    opened = machine.feed(trace, last_ns)
    assert [(change.kind, change.verdict.kind) for change in opened] == [("opened", "dead_server")]
    again = layout.empty(layout.SERVERS, 1)
    again[:] = trace.servers[-1:]
    again["ts_ns"], again["n_open"], again["oldest_ns"] = last_ns + SECOND, 0, layout.UNKNOWN
    closed = machine.feed(replace(Trace(), nodes=trace.nodes, servers=again), last_ns + SECOND)
    assert [change.kind for change in closed] == ["closed"]


def test_the_rows_of_an_ended_engine_are_dropped_and_its_incident_closes():
    machine, trace = Machine(), late_engine()
    end_ns = int(trace.requests["end_ns"].max())
    machine.feed(trace, end_ns)
    process = layout.empty(layout.PROCESSES, 1)
    process["pid"], process["ended_ns"] = PID, end_ns
    ended = replace(Trace(), nodes=trace.nodes, processes=process)
    assert [change.kind for change in machine.feed(ended, end_ns + 2 * SECOND)] == ["closed"]


def test_rows_of_a_process_without_rounds_are_bounded():
    machine = Machine()
    rows = layout.empty(layout.OFFCPU, 20_000)
    rows["pid"] = PID
    for second in range(1, 5):
        rows["ts_ns"] = second * SECOND + np.arange(len(rows))
        machine.feed(replace(Trace(), offcpu=rows), (second + 1) * SECOND)
    assert machine.stream.n_rows < 2 * len(rows)
