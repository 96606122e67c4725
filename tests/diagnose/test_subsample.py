"""Of very many members, a sample represents all: each result equals the result with all medians."""

import numpy as np
import pytest

from stallscope.diagnose.arrays.grouping import median_of_others
from stallscope.diagnose.arrays.round_tables import Tables
from stallscope.diagnose.arrays.subsample import SAMPLED_FROM, spread_out

N, ROUNDS = 3 * SAMPLED_FROM, 12
RANDOM = np.random.default_rng(7)


def large_set() -> tuple[np.ndarray, ...]:
    """N members of one set in ROUNDS rounds: set, member, round and a value around 1e6 +- 1e4 of each row."""
    member = np.repeat(np.arange(N), ROUNDS)
    number = np.tile(np.arange(ROUNDS), N)
    return np.zeros(N * ROUNDS, np.int64), member, number, RANDOM.normal(1e6, 1e4, N * ROUNDS)


@pytest.mark.parametrize("ranks_a_node", [4, 8, 16])
@pytest.mark.parametrize("size", [2048, 5120, 10_240])
def test_places_are_spread_over_all_and_over_the_ranks_of_a_node(size, ranks_a_node):
    chosen = spread_out(size, 1024)
    assert chosen.min() >= 0 and chosen.max() < size and (np.diff(chosen) > 0).all()
    assert len(chosen) > 512 and np.diff(chosen).max() <= 4 * size / 1024
    each = np.bincount(chosen % ranks_a_node, minlength=ranks_a_node)
    assert each.min() > 0.8 * each.mean()


def test_all_indexes_are_sampled_if_there_are_few():
    assert spread_out(5, 8).tolist() == [0, 1, 2, 3, 4]


def test_rows_are_held_against_nearly_the_median_of_all():
    of_set, member, number, value = large_set()
    value[member == 17] += 5e5
    tables = Tables.of(of_set, member, number)
    beyond = tables.beyond_others(value)
    exact = value - np.median(value.reshape(N, ROUNDS), axis=0)[number]
    assert np.abs(beyond - exact).max() < 0.2 * 1e4
    assert (beyond[member == 17] > 4e5).all()
    rows = np.array([5, 17 * ROUNDS])
    assert tables.median_of_others(value, rows).tolist() == (value - beyond)[rows].tolist()


@pytest.mark.parametrize("is_laid_out", [True, False])
def test_a_round_with_few_members_uses_all_of_them(is_laid_out):
    of_set, member, number, value = large_set()
    kept = (number < ROUNDS - 1) | (member % 1000 == 999)
    of_set, member, number, value = of_set[kept], member[kept], number[kept], value[kept]
    beyond = Tables.of(of_set, member, number, is_laid_out=is_laid_out).beyond_others(value)
    rows = np.flatnonzero(number == ROUNDS - 1)
    assert len(rows) == N // 1000
    assert np.allclose(beyond[rows], value[rows] - median_of_others(number[rows], value[rows]))


def test_rows_that_do_not_count_get_no_answer_and_change_none():
    of_set, member, number, value = large_set()
    is_in = member % 3 != 0
    odd = np.where(is_in, value, 1e12)
    beyond = Tables.of(of_set, member, number).beyond_others(odd, is_in)
    assert np.isnan(beyond[~is_in]).all() and np.abs(beyond[is_in]).max() < 1e5


def test_small_sets_next_to_a_large_set_are_exact():
    of_set, member, number, value = large_set()
    small = np.arange(4 * 3)  # four members, three rounds
    of_set = np.concatenate([of_set, np.ones(12, np.int64)])
    member = np.concatenate([member, small // 3])
    number = np.concatenate([number, ROUNDS + small % 3])
    value = np.concatenate([value, RANDOM.normal(0, 1, 12)])
    beyond = Tables.of(of_set, member, number).beyond_others(value)
    assert np.allclose(beyond[-12:], value[-12:] - median_of_others(number[-12:], value[-12:]))
    assert np.abs(beyond[:-12]).max() < 1e5
