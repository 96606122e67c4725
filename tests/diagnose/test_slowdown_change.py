"""Where a job became slower is found wherever in the trace that is."""

import numpy as np
import pytest

from stallscope.diagnose.slowdown import _change


@pytest.mark.parametrize("n_before", [20, 100, 150, 280])
def test_the_cut_is_where_the_steps_become_slower(n_before: int):
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.normal(17e6, 1e6, n_before), rng.normal(44e6, 8e6, 300 - n_before)])
    assert _change(values, 10) == n_before
