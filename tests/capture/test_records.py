"""What the kernel emits becomes rows of the tables."""

import numpy as np

from stallscope.capture import records
from stallscope.events import kernel
from stallscope.events.kernel import Kind
from stallscope.events.names import Datatype, Op


def births(*members: tuple[int, int, int, int], parent_nranks: int) -> np.ndarray:
    """(parent rank, colour, key, hash) of the ranks that split one parent."""
    rows = np.zeros(len(members), kernel.LIFE)
    rows["kind"], rows["op"] = Kind.COMM_BORN, Op.COMM_SPLIT
    rows["comm_rank"], rows["nranks"], rows["parent_nranks"], rows["parent_hash"] = -1, -1, parent_nranks, 99
    for i, (parent_rank, color, key, comm_hash) in enumerate(members):
        rows[i]["pid"], rows[i]["parent_rank"], rows[i]["color"], rows[i]["key"] = (
            100 + i,
            parent_rank,
            color,
            key,
        )
        rows[i]["comm_hash"], rows[i]["comm"] = comm_hash, comm_hash
    return rows


def test_bytes_are_elements_times_size_and_unknown_stays_unknown():
    arrivals = np.zeros(4, kernel.ARRIVAL)
    arrivals["count"] = [10, 10, -1, 10]
    arrivals["datatype"] = [Datatype.FLOAT32, Datatype.NONE, Datatype.FLOAT32, 200]
    rows = records.collectives(arrivals, node=3)
    assert rows["count_bytes"].tolist() == [40, -1, -1, -1]
    assert rows["datatype"].tolist() == [Datatype.FLOAT32, 0, Datatype.FLOAT32, 0]
    assert (rows["node"] == 3).all() and (rows["gpu_start_ns"] == -1).all()


def test_ranks_of_a_split_follow_from_keys_once_all_have_told():
    split = births((0, 1, 5, 11), (1, 2, 0, 22), (2, 1, 4, 11), (3, -1, 0, 0), parent_nranks=4)
    rows = records.communicators(split, node=0)
    assert rows["pid"].tolist() == [100, 101, 102]
    assert rows["comm_rank"].tolist() == [1, 0, 0]
    assert rows["nranks"].tolist() == [2, 1, 2]


def test_ranks_of_a_split_stay_unknown_while_one_may_be_missing():
    rows = records.communicators(births((0, 1, 0, 11), (1, 1, 0, 11), parent_nranks=3), node=0)
    assert rows["comm_rank"].tolist() == [-1, -1] and rows["nranks"].tolist() == [-1, -1]


def test_events_of_one_ring_are_told_apart():
    events = np.zeros(3, kernel.EVENT)
    events["kind"] = [Kind.CALL, Kind.OFF_CPU, Kind.ON]
    found = records.tables(np.zeros(0, kernel.ARRIVAL), events, node=0)
    assert {name: len(rows) for name, rows in found.items()} == {
        "collectives": 0,
        "calls": 1,
        "offcpu": 1,
        "communicators": 0,
    }
    assert len(records.raw(events)) == 1
