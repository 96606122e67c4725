"""Where a job became slower is found wherever in the trace that is; filling a launch queue is not that."""

import numpy as np
import pytest

from stallscope.diagnose.lateness.slowdown import _change
from stallscope.synth import Job, simulate

from .reports import report_of


@pytest.mark.parametrize("n_before", [20, 100, 150, 280])
def test_the_cut_is_where_the_steps_become_slower(n_before: int):
    rng = np.random.default_rng(3)
    values = np.concatenate([rng.normal(17e6, 1e6, n_before), rng.normal(44e6, 8e6, 300 - n_before)])
    assert _change(values, 10) == n_before


def test_a_host_that_runs_ahead_until_its_launch_queue_is_full_has_not_become_slower():
    job = Job(steps=300, sync_every=50, buckets=2, ranks_per_node=4)
    trace, _ = simulate(job, seed=5, has_twin=False)
    assert report_of(trace).verdicts == []
