"""Turns of clusters: fair under a flood, many batches at once, bounded, with omitted rows counted."""

import pyarrow as pa
import pytest

from stallscope.continuous.backlog import Backlog, Bounds, Turn
from stallscope.store.hub import schema
from stallscope.store.hub.store import Batch

BOUNDS = Bounds(turn_rows=10, behind_s=2.0, most_rows=50, most_wait_s=20.0, kept_s=2.0, most_rows_in=1_000)


class Hand:
    """A clock that tests set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Hand:
    return Hand()


@pytest.fixture
def backlog(clock: Hand) -> Backlog:
    return Backlog(BOUNDS, clock_s=clock)


def batch(
    n: int, *clusters: str | None, tenant: str = "t", table: str = "collectives", first: int = 0
) -> Batch:
    """n rows of each cluster; seq counts from `first` on."""
    rows = {"ts_ns": [], "cluster_id": [], "seq" if table == "collectives" else "pid": []}
    for cluster in clusters:
        for column, values in zip(rows, ([1] * n, [cluster] * n, range(first, first + n)), strict=True):
            rows[column] += values
    return Batch("", tenant, {table: schema.conformed(table, pa.table(rows))})


def turns(backlog: Backlog) -> list[Turn]:
    found = []
    while (turn := backlog.turn()) is not None:
        found.append(turn)
        backlog.done()
    return found


def seqs(turn: Turn) -> list[int]:
    return turn.tables["collectives"]["seq"].to_pylist()


def test_a_cluster_that_floods_gets_one_turn_between_those_of_the_others(backlog: Backlog):
    for number in range(4):
        backlog.add(batch(10, "flood", first=10 * number))
    backlog.add(batch(3, "small"))
    backlog.add(batch(4, "other", tenant="u"))
    assert [(turn.key, turn.n_rows) for turn in turns(backlog)] == [
        (("t", "flood"), 10),
        (("t", "small"), 3),
        (("u", "other"), 4),
        (("t", "flood"), 10),
        (("t", "flood"), 10),
        (("t", "flood"), 10),
    ]


def test_small_batches_of_one_cluster_are_looked_at_together(backlog: Backlog):
    for number in range(5):
        backlog.add(batch(2, "c", first=2 * number))
    (turn,) = turns(backlog)
    assert seqs(turn) == list(range(10))


def test_a_batch_of_several_clusters_is_told_apart(backlog: Backlog):
    backlog.add(batch(2, "a", "b", None))
    assert [(turn.key[1], turn.n_rows) for turn in turns(backlog)] == [("a", 2), ("b", 2), ("", 2)]


def test_what_is_too_much_is_left_out_counted_and_the_newest_is_looked_at(backlog: Backlog, clock: Hand):
    for number in range(6):
        backlog.add(batch(10, "c", first=10 * number))
    clock.now_s += 0.5
    (turn,) = turns(backlog)
    assert (turn.n_rows, turn.n_left_out) == (10, 50)
    assert seqs(turn) == list(range(50, 60))


def test_what_has_waited_for_long_is_left_out_too(backlog: Backlog, clock: Hand):
    backlog.add(batch(5, "c"))
    clock.now_s += 19.5
    backlog.add(batch(5, "c", first=5))
    clock.now_s += 1.0
    (turn,) = turns(backlog)
    assert (seqs(turn), turn.n_left_out, turn.is_behind) == ([5, 6, 7, 8, 9], 5, True)


def test_who_is_who_is_never_left_out(backlog: Backlog):
    backlog.add(batch(2, "c", table="processes"))
    for number in range(6):
        backlog.add(batch(10, "c", first=10 * number))
    found = turns(backlog)
    assert sum(len(turn.tables.get("processes", ())) for turn in found) == 2
    assert sum(turn.n_left_out for turn in found) == 50


def test_rows_that_wait_are_told_until_they_are_looked_at(backlog: Backlog, clock: Hand):
    backlog.add(batch(4, "c"))
    clock.now_s += 3.0
    assert (backlog.n_waiting, backlog.lag_s) == (4, 3.0)
    turn = backlog.turn()
    assert turn is not None and turn.is_behind
    assert (backlog.n_waiting, backlog.lag_s) == (4, 0.0)
    backlog.done()
    assert backlog.n_waiting == 0


def test_what_finds_no_room_at_all_is_counted(backlog: Backlog):
    assert [backlog.add(batch(400, "c")) for _ in range(3)] == [0, 0, 400]
