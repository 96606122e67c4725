"""Turns of clusters: fair under a flood, many batches at once, bounded, with omitted rows counted."""

from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pytest

from stallscope.continuous.backlog import MAX_CLUSTERS, Backlog, BacklogLimits, ClusterTurn, in_parts
from stallscope.store.hub import schema
from stallscope.store.hub.store import Batch
from stallscope.store.hub.unexamined import OTHERS

BOUNDS = BacklogLimits(
    turn_rows=10, behind_s=2.0, patience_s=2.0, calm_s=10.0, max_every=4, max_rows=50, max_rows_in=1_000
)


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


def turns(backlog: Backlog) -> list[ClusterTurn]:
    result = []
    while (turn := backlog.turn()) is not None:
        result.append(turn)
        backlog.done()
    return result


def seqs(turn: ClusterTurn) -> list[int]:
    return turn.tables["collectives"]["seq"].to_pylist()


def test_a_cluster_that_floods_gets_one_turn_between_those_of_the_others(backlog: Backlog):
    for number in range(4):
        backlog.add(batch(10, "flood", first=10 * number))
    backlog.add(batch(3, "small"))
    backlog.add(batch(4, "other", tenant="u"))
    assert [(turn.key, turn.n_rows) for turn in turns(backlog)] == [
        (("t", "flood"), 10),
        (("u", "other"), 4),
        (("t", "small"), 3),
        (("t", "flood"), 10),
        (("t", "flood"), 10),
        (("t", "flood"), 10),
    ]


def test_a_tenant_with_many_clusters_gets_no_more_turns_than_another_tenant(backlog: Backlog):
    for number in range(20):
        backlog.add(batch(5, f"c{number}"))
    for number in range(2):
        backlog.add(batch(10, "only", tenant="u", first=10 * number))
    assert [turn.key[0] for turn in turns(backlog)][:4] == ["t", "u", "t", "u"]


def test_the_rows_of_all_clusters_are_bounded_at_the_cost_of_the_largest_tenant(clock: Hand):
    backlog = Backlog(replace(BOUNDS, max_rows_all=100), clock_s=clock)
    backlog.add(batch(10, "honest", tenant="u"))
    backlog.add(batch(3, "c0", table="processes"))
    for number in range(40):
        backlog.add(batch(10, f"c{number}"))
    taken = turns(backlog)
    assert sum(turn.n_rows for turn in taken) <= 100
    assert sum(turn.n_rows + turn.n_left_out for turn in taken) == 413
    assert [(turn.n_rows, turn.n_left_out) for turn in taken if turn.key[0] == "u"] == [(10, 0)]
    assert sum(len(turn.tables.get("processes", ())) for turn in taken) == 3


def test_small_batches_of_one_cluster_are_looked_at_together(backlog: Backlog):
    for number in range(5):
        backlog.add(batch(2, "c", first=2 * number))
    (turn,) = turns(backlog)
    assert seqs(turn) == list(range(10))


def test_a_batch_is_split_by_cluster(backlog: Backlog):
    backlog.add(batch(2, "a", "b", None))
    assert [(turn.key[1], turn.n_rows) for turn in turns(backlog)] == [("a", 2), ("b", 2), ("", 2)]


def test_more_rows_than_fit_are_sampled_in_whole_rounds_of_all_ranks(backlog: Backlog):
    n_ranks, n_rounds = 3, 20
    for _ in range(n_ranks):
        backlog.add(batch(n_rounds, "c"))
    taken = turns(backlog)
    assert sorted(seq for turn in taken for seq in seqs(turn)) == sorted([*range(0, n_rounds, 2)] * n_ranks)
    assert {turn.every for turn in taken} == {2}
    assert sum(turn.n_left_out for turn in taken) == n_ranks * n_rounds // 2


def test_rows_whose_wait_does_not_become_shorter_are_sampled_and_finely_again_later(
    backlog: Backlog, clock: Hand
):
    for first in (0, 10, 20, 30):
        backlog.add(batch(10, "c", first=first))
    clock.now_s += BOUNDS.behind_s + 1
    first = backlog.turn()
    assert first is not None and (first.every, first.n_left_out, first.n_rows) == (1, 0, 10)
    clock.now_s += BOUNDS.patience_s
    second, third = backlog.turn(), backlog.turn()
    assert second is not None and (second.every, second.n_left_out, second.n_rows) == (2, 15, 10)
    assert third is not None and (third.every, third.n_rows) == (2, 5)
    backlog.add(batch(8, "c"))
    turn = backlog.turn()
    assert turn is not None and (seqs(turn), turn.every, turn.n_left_out) == ([0, 2, 4, 6], 2, 4)
    clock.now_s += BOUNDS.calm_s + 1
    for every, expected in ((2, [0, 2]), (1, [0, 1, 2, 3])):
        backlog.add(batch(4, "c"))
        turn = backlog.turn()
        assert turn is not None and (seqs(turn), turn.every) == (expected, every)


def test_no_row_is_left_out_while_waits_become_shorter(backlog: Backlog, clock: Hand):
    """A start of 6 s, in which no row is examined, is made up for: each second brings 10 rows, and 20 are examined."""
    n_rows = 0
    for second in range(20):
        backlog.add(batch(5, "c", first=10 * second))
        backlog.add(batch(5, "c", first=10 * second + 5))
        for _ in range(2 if second >= 4 else 0):
            turn = backlog.turn()
            n_rows += 0 if turn is None else turn.n_rows
            assert turn is None or (turn.every, turn.n_left_out) == (1, 0)
        clock.now_s += 1.0
    assert n_rows == 200


def test_other_clusters_and_rows_without_a_round_are_not_sampled(backlog: Backlog):
    rows = {"ts_ns": [1, 1], "cluster_id": ["c", "c"], "seq": [None, 1]}
    backlog.add(Batch("", "t", {"collectives": schema.conformed("collectives", pa.table(rows))}))
    backlog.add(batch(60, "c"))
    backlog.add(batch(5, "other"))
    taken = turns(backlog)
    assert [seq for turn in taken if turn.key[1] == "c" for seq in seqs(turn)] == [None, *range(0, 60, 2)]
    assert [seqs(turn) for turn in taken if turn.key[1] == "other"] == [[0, 1, 2, 3, 4]]


def test_only_beyond_the_coarsest_sample_the_oldest_rows_are_skipped(backlog: Backlog):
    for number in range(30):
        backlog.add(batch(10, "c", first=10 * number))
    (turn,) = turns(backlog)
    assert turn.every == BOUNDS.max_every
    assert seqs(turn) == [seq for seq in range(300) if seq % 4 == 0][-turn.n_rows :]
    assert turn.n_left_out == 300 - turn.n_rows


def test_rows_that_fit_into_a_turn_are_examined_however_long_they_waited(backlog: Backlog, clock: Hand):
    backlog.add(batch(5, "c"))
    clock.now_s += 100.0
    backlog.add(batch(5, "c", first=5))
    (turn,) = turns(backlog)
    assert (seqs(turn), turn.n_left_out, turn.is_behind) == ([*range(10)], 0, True)


def test_identities_of_processes_are_never_left_out(backlog: Backlog):
    backlog.add(batch(2, "c", table="processes"))
    for number in range(30):
        backlog.add(batch(10, "c", first=10 * number))
    taken = turns(backlog)
    assert sum(len(turn.tables.get("processes", ())) for turn in taken) == 2


def test_waiting_rows_are_counted_until_they_are_evaluated(backlog: Backlog, clock: Hand):
    backlog.add(batch(4, "c"))
    clock.now_s += 3.0
    assert (backlog.n_waiting, backlog.lag_s) == (4, 3.0)
    turn = backlog.turn()
    assert turn is not None and turn.is_behind
    assert (backlog.n_waiting, backlog.lag_s) == (4, 0.0)
    backlog.done()
    assert backlog.n_waiting == 0


def test_rows_that_do_not_fit_are_counted(backlog: Backlog):
    assert [backlog.add(batch(400, "c")) for _ in range(3)] == [0, 0, 400]


def test_waiting_rows_fit_into_their_share_of_the_memory():
    few, many = BacklogLimits.within(40_000_000), BacklogLimits.within(64 << 30)
    assert (few.max_rows, few.max_rows_in, few.max_rows_all) == (100_000, 100_000, 100_000)
    assert many == BacklogLimits()


def test_stored_rows_are_divided_by_the_time_of_their_commits_without_loss():
    def rows(times_us: list[int]) -> pa.Table:
        at = pa.array(times_us, pa.timestamp("us", "UTC"))
        return pa.table({"received_at": at, "n": range(len(times_us))})

    tables = {"collectives": rows([n // 3 for n in range(100)]), "processes": rows([0, 0, 20])}
    parts = list(in_parts(tables, 30))
    assert len(parts) == 4
    for name, whole in tables.items():
        assert pa.concat_tables([part[name] for part in parts if name in part]).equals(whole)
    ends = [max(rows["received_at"].to_pylist()[-1] for rows in part.values()) for part in parts]
    begins = [min(rows["received_at"].to_pylist()[0] for rows in part.values()) for part in parts]
    assert all(end < begin for end, begin in zip(ends, begins[1:], strict=False)), "no commit is in two parts"
    assert list(in_parts(tables, 1000)) == [tables]


def test_rows_with_an_empty_cluster_name_and_rows_without_a_name_are_examined_together(backlog: Backlog):
    backlog.add(batch(2, "", None, "c"))
    found = {turn.key[1]: turn.n_rows for turn in turns(backlog)}
    assert found == {"": 4, "c": 2}


def test_the_clusters_of_a_tenant_are_bounded_and_the_rows_of_the_others_are_reported(clock: Hand):
    skipped: Counter[tuple[str, str]] = Counter()

    def skip(key: tuple[str, str], n_rows: int) -> None:
        skipped[key] += n_rows

    backlog = Backlog(replace(BOUNDS, max_rows_in=10_000, max_rows_all=10_000), skipped=skip, clock_s=clock)
    names = [f"c{number}" for number in range(MAX_CLUSTERS + 50)]
    backlog.add(batch(2, *names))
    backlog.add(batch(1, "one more"))
    backlog.add(batch(1, "honest", tenant="u"))
    examined = [turn.key for turn in turns(backlog)]
    assert len(examined) == MAX_CLUSTERS + 1 and ("u", "honest") in examined
    assert skipped == {("t", OTHERS): 100, ("t", "one more"): 1}
