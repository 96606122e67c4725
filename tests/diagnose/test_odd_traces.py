"""Valid but odd data never stop the diagnosis, of a whole trace or of a stream."""

from functools import cache

import pytest

from stallscope.diagnose import diagnose
from stallscope.events.names import Category
from stallscope.events.trace import Trace

from .builders import MS, Gone, Job, data_parallel, dp_trace, every, trace_of
from .cutting import Cut, told
from .odd_traces import odd

N_SEEDS = 48
"""About a third of a second each. The first 1,400 seeds were tried by hand."""


@cache
def traces() -> tuple[Trace, ...]:
    return (
        dp_trace(every(2, 7, 50 * MS, category=Category.IO), n_steps=30),
        trace_of(Job(data_parallel(4), 4, 30, node=(0, 0, 1, 1), offset_ns=(0, 5 * MS))),
        trace_of(Job(data_parallel(3), 3, 30, node=(0, 1, 2), offset_ns=(0, 5 * MS, -3 * MS))),
        trace_of(Job(data_parallel(4), gone=(Gone(3, 20),), quiet_ns=60_000 * MS)),
    )


@pytest.mark.parametrize("seed", range(0, N_SEEDS, 4))
def test_odd_data_get_an_answer(seed: int):
    for number in range(seed, seed + 4):
        trace = odd(traces()[number % 4], number)
        assert diagnose(trace).answer in ("healthy", "inconclusive", "found"), number
        if len(trace.collectives):
            assert told(trace, Cut(4, apart=number % 3 == 0)).report.answer
