"""Statistics over groups agree with the plain way to compute them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallscope.diagnose.arrays.grouping import median_of_others, numbered

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(-(2**52), 2**52)), max_size=30)


@given(ROWS)
def test_median_of_the_others_leaves_out_the_row_itself(rows):
    group = np.array([group for group, _ in rows], np.int64)
    value = np.array([value for _, value in rows], np.int64)
    median = median_of_others(group, value)
    for i, (own_group, _) in enumerate(rows):
        others = [v for j, (g, v) in enumerate(rows) if g == own_group and j != i]
        if not others:
            assert np.isnan(median[i])
        else:
            assert median[i] == pytest.approx(float(np.median(others)))


def test_a_late_rank_is_not_part_of_its_own_reference_median():
    late = np.array([100, 100, 100, 400])
    assert (late - median_of_others(np.zeros(4, np.int64), late)).tolist() == [0, 0, 0, 300]


def test_of_two_each_is_held_against_the_other():
    assert median_of_others(np.zeros(2, np.int64), np.array([5, 9])).tolist() == [9, 5]


@given(st.lists(st.tuples(st.integers(-5, 5), st.sampled_from([0, 2**63, 2**64 - 1])), max_size=30))
def test_rows_have_one_number_exactly_when_all_columns_agree(rows):
    columns = (np.array([a for a, _ in rows], np.int64), np.array([b for _, b in rows], np.uint64))
    number, n_groups = numbered(*columns)
    assert n_groups == len(set(rows))
    assert set(number.tolist()) == set(range(n_groups))
    for i, entry in enumerate(rows):
        for j, other in enumerate(rows):
            assert (number[i] == number[j]) == (entry == other)


@pytest.mark.parametrize(
    "columns",
    [
        lambda random, n: (random.integers(0, 3, n).astype(np.uint16), random.integers(-4, 4, n)),
        lambda random, n: (random.integers(0, 2, n) > 0, random.integers(0, 1000, n).astype(np.uint32)),
        lambda random, n: (random.integers(0, 2**63, 5).astype(np.uint64)[random.integers(0, 5, n)] * 2,),
        lambda random, n: (random.integers(0, 2**63, 900)[random.integers(0, 900, n)], np.zeros(n, np.int64)),
        lambda random, n: (
            random.integers(0, 300, n),
            random.integers(0, 300, n),
            random.integers(0, 300, n),
        ),
        lambda random, n: (random.integers(-(2**62), 2**62, n), random.integers(0, 2, n).astype(np.int8)),
        lambda random, n: (
            np.arange(n) // 10 % 50,
            np.arange(n) // 10 % 50 * 1000 + random.integers(0, 9, n),
        ),
        lambda random, n: (np.zeros(n, np.int64), np.full(n, 7, np.uint8)),
    ],
)
def test_many_rows_are_numbered_as_sorting_numbers_them(columns):
    n = 20_000
    given = columns(np.random.default_rng(3), n)
    number, n_groups = numbered(*given)
    table = np.stack([column.astype(object) for column in given], axis=1)
    order = {row: i for i, row in enumerate(sorted({tuple(row) for row in table.tolist()}))}
    assert number.dtype == np.int64 and n_groups == len(order)
    assert number.tolist() == [order[tuple(row)] for row in table.tolist()]
