"""Rounds: the calls that belong together, and how late each rank is."""

import numpy as np
import pytest

from stallscope.diagnose.lateness.period import period_steps
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.clocks import aligned
from stallscope.diagnose.timeline.rounds import rounds
from stallscope.diagnose.timeline.timeline import timeline_of

from .builders import MS, Call, Delay, Job, dp_trace, trace_of


def met_of(trace):
    timeline = timeline_of(trace)
    return timeline, rounds(timeline, aligned(timeline, trace), Thresholds())


def test_lateness_is_against_the_median_of_the_others():
    line, met = met_of(dp_trace([Delay(3, 4, 40 * MS)], jitter_ns=0))
    late = {int(line.rank[line.process[i]]): met.late_ns[i] for i in np.flatnonzero(line.rows["seq"] == 12)}
    assert late == {0: 0, 1: 0, 2: 0, 3: 40 * MS}


def test_a_round_is_the_same_number_on_the_same_communicator():
    pairs = Call(((0, 1), (2, 3)))
    line, met = met_of(trace_of(Job((pairs,), n_steps=7)))
    assert met.n_rounds == 14
    assert met.n_arrived.tolist() == [2] * 14
    for number in range(14):
        rows = line.rows[met.round == number]
        assert len(np.unique(rows["comm_hash"])) == len(np.unique(rows["seq"])) == 1
        assert met.last_ns[number] == rows["ts_ns"].max()


def test_a_rank_alone_in_its_round_is_not_late():
    _, met = met_of(trace_of(Job((Call(((0,), (1,), (2,), (3,))),), n_steps=5)))
    assert np.isnan(met.late_ns).all()


@pytest.mark.parametrize(
    ("steps", "sizes", "wanted"),
    [
        ([7, 21, 35, 49], [290] * 4, 14),
        ([7, 21, 49, 63], [290] * 4, 14),  # one return was missed
        ([7, 8, 21, 35, 49], [290, 20, 290, 290, 290], 14),  # a small one in between
        ([3, 4, 5, 6, 7], [50] * 5, None),  # a delay in every step has no period
        ([3, 11, 13, 30, 41], [50] * 5, None),
        ([3, 9], [50] * 2, None),
        ([3, 9, 16, 23], [50] * 4, None),  # 6, 7, 7: not regular enough
        ([], [], None),
    ],
)
def test_period(steps, sizes, wanted):
    assert period_steps(np.array(steps, np.int64), np.array(sizes, np.float64)) == wanted
