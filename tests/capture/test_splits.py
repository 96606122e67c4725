"""Ranks in communicators that were split off."""

import numpy as np

from stallscope.capture.process.comm_split import Splits
from stallscope.events import kernel, layout
from stallscope.events.kernel import Kind
from stallscope.events.names import Op


def births(*members: tuple[int, int, int, int], parent_nranks: int, first_pid: int = 100) -> np.ndarray:
    """(parent rank, colour, key, hash) of ranks that split one parent."""
    rows = np.zeros(len(members), kernel.LIFE)
    rows["kind"], rows["op"] = Kind.COMM_BORN, Op.COMM_SPLIT
    rows["comm_rank"], rows["nranks"], rows["parent_nranks"], rows["parent_hash"] = -1, -1, parent_nranks, 99
    for i, (parent_rank, color, key, comm_hash) in enumerate(members):
        rows[i]["pid"], rows[i]["parent_rank"] = first_pid + i, parent_rank
        rows[i]["color"], rows[i]["key"], rows[i]["comm_hash"], rows[i]["comm"] = (
            color,
            key,
            comm_hash,
            comm_hash,
        )
    return rows


def test_split_ranks_follow_from_the_keys_of_all_members():
    rows = Splits().resolve(
        births((0, 1, 5, 11), (1, 2, 0, 22), (2, 1, 4, 11), (3, -1, 0, 0), parent_nranks=4)
    )
    members = rows[rows["comm"] != 0]
    assert members["pid"].tolist() == [100, 101, 102]
    assert members["comm_rank"].tolist() == [1, 0, 0]
    assert members["nranks"].tolist() == [2, 1, 2]


def test_equal_keys_keep_the_order_of_the_parent():
    rows = Splits().resolve(births((2, 1, 0, 11), (0, 1, 0, 11), (1, 1, 0, 11), parent_nranks=3))
    assert rows["comm_rank"].tolist() == [2, 0, 1]


def test_a_split_that_comes_in_two_batches_is_held_back():
    splits = Splits()
    assert not len(splits.resolve(births((0, 1, 0, 11), parent_nranks=2)))
    rows = splits.resolve(births((1, 1, 0, 11), parent_nranks=2, first_pid=200))
    assert rows["pid"].tolist() == [100, 200] and rows["comm_rank"].tolist() == [0, 1]


def test_split_ranks_stay_unknown_if_a_member_is_missing():
    splits = Splits(n_patience=1)
    resolveds = [
        splits.resolve(batch) for batch in (births((0, 1, 0, 11), parent_nranks=2), births(parent_nranks=2))
    ]
    assert [len(rows) for rows in resolveds] == [0, 1]
    assert resolveds[1]["comm_rank"].tolist() == [-1]


def test_other_communicators_are_not_held_back():
    rows = births((0, 0, 0, 11), parent_nranks=0)
    rows["comm_rank"], rows["nranks"], rows["parent_hash"] = 3, 8, 0
    assert Splits().resolve(rows)["comm_rank"].tolist() == [3]


def test_collectives_are_given_the_rank():
    splits = Splits()
    splits.resolve(births((0, 1, 1, 11), (1, 1, 0, 11), parent_nranks=2))
    rows = layout.empty(layout.COLLECTIVES, 3)
    rows["pid"], rows["comm_hash"] = [100, 101, 101], [11, 11, 12]
    filled = splits.fill_ranks(rows)
    assert filled["comm_rank"].tolist() == [1, 0, -1]
    assert filled["nranks"].tolist() == [2, 2, -1]
