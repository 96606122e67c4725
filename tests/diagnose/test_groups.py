"""Statistics over groups agree with the plain way to compute them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stallscope.diagnose.groups import median_of_others, numbered

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(-(2**52), 2**52)), max_size=30)


@given(ROWS)
def test_median_of_the_others_leaves_out_the_row_itself(rows):
    group = np.array([group for group, _ in rows], np.int64)
    value = np.array([value for _, value in rows], np.int64)
    found = median_of_others(group, value)
    for i, (own_group, _) in enumerate(rows):
        others = [v for j, (g, v) in enumerate(rows) if g == own_group and j != i]
        if not others:
            assert np.isnan(found[i])
        else:
            assert found[i] == pytest.approx(float(np.median(others)))


def test_a_late_one_does_not_move_the_median_it_is_held_against():
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
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            assert (number[i] == number[j]) == (one == other)
