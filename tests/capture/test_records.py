"""Records of the kernel become rows of the tables."""

import numpy as np

from stallscope.capture.rows import records
from stallscope.events import kernel
from stallscope.events.kernel import Kind
from stallscope.events.names import Datatype


def test_bytes_are_elements_times_size_and_unknown_stays_unknown():
    arrivals = np.zeros(4, kernel.ARRIVAL)
    arrivals["count"] = [10, 10, -1, 10]
    arrivals["datatype"] = [Datatype.FLOAT32, Datatype.NONE, Datatype.FLOAT32, 200]
    rows = records.collectives(arrivals, node=3)
    assert rows["count_bytes"].tolist() == [40, -1, -1, -1]
    assert rows["datatype"].tolist() == [Datatype.FLOAT32, 0, Datatype.FLOAT32, 0]
    assert (rows["node"] == 3).all() and (rows["gpu_start_ns"] == -1).all()


def test_events_of_one_ring_are_split_by_kind():
    events = np.zeros(3, kernel.EVENT)
    events["kind"] = [Kind.CALL, Kind.OFF_CPU, Kind.ON]
    tables = records.tables(np.zeros(0, kernel.ARRIVAL), events, node=0)
    assert {name: len(rows) for name, rows in tables.items()} == {
        "collectives": 0,
        "calls": 1,
        "offcpu": 1,
        "communicators": 0,
        "call_arguments": 0,
    }
    assert len(records.raw(events)) == 1
