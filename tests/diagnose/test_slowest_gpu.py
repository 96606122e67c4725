"""A slow GPU among GPUs whose work is random for each rank and step, by its order among the GPUs of a step."""

import numpy as np
import pytest

from stallscope.diagnose.gpu.even_work import longer_ns
from stallscope.diagnose.report.verdict import Report
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.events.layout import Array

from .builders import MS, Job, data_parallel, trace_of
from .reports import report_of

N_RANKS, N_STEPS, SLOW_SINCE = 8, 60, 20
LIMITS = Thresholds()


def report_on(late_ns: Array) -> Report:
    """The report on a job whose GPUs work longer by some times: (ranks, steps)."""
    more = {(rank, step): int(late_ns[rank, step]) for rank, step in np.ndindex(late_ns.shape)}
    program = data_parallel(N_RANKS, work_ns=500_000, gpu_ns=10 * MS)
    return report_of(trace_of(Job(program, N_RANKS, n_steps=N_STEPS, gpu_late_ns=more, has_gpu_times=True)))


def drawn(seed: int) -> Array:
    """Work of each rank and step, that varies from rank to rank by 30 ms."""
    return np.random.default_rng(seed).uniform(0, 30 * MS, (N_RANKS, N_STEPS))


def accused(report: Report) -> set[int]:
    return {rank for verdict in report.verdicts for rank in verdict.ranks}


def suspects(report: Report) -> list[list[int] | None]:
    return [verdict.evidence.suspects for verdict in report.verdicts if verdict.kind == "inconclusive"]


@pytest.mark.parametrize("seed", range(2))
def test_a_slow_gpu_among_uneven_work_makes_the_answer_inconclusive(seed: int) -> None:
    """The rank may have more work instead, so no rank is accused."""
    late_ns = drawn(seed)
    late_ns[3, SLOW_SINCE:] += 0.6 * (late_ns[3, SLOW_SINCE:] + 20 * MS)
    report = report_on(late_ns)
    assert (accused(report), suspects(report)) == (set(), [[3]])


@pytest.mark.parametrize("seed", range(2))
def test_gpus_that_are_slow_at_times_and_since_some_step_are_both_suspects(seed: int) -> None:
    late_ns = drawn(seed)
    late_ns[3, SLOW_SINCE:] += 0.6 * (late_ns[3, SLOW_SINCE:] + 20 * MS)
    late_ns[6, 10:14] += 120 * MS
    late_ns[6, 40:44] += 120 * MS
    report = report_on(late_ns)
    assert not accused(report)
    assert sorted(suspects(report)) == [[3], [6]]


@pytest.mark.parametrize("seed", range(5))
def test_work_that_is_drawn_for_each_step_suspects_no_gpu(seed: int) -> None:
    report = report_on(drawn(seed))
    assert (accused(report), suspects(report)) == (set(), [])


@pytest.mark.parametrize("seed", range(3))
def test_work_that_stays_on_a_gpu_for_some_steps_names_no_gpu(seed: int) -> None:
    late_ns = drawn(seed)
    for first, rank in zip(range(0, N_STEPS, 12), (1, 5, 2, 7, 1), strict=True):
        late_ns[rank, first : first + 12] += 20 * MS
    assert not accused(report_on(late_ns))


@pytest.mark.parametrize("more_ms", [6, 20])
def test_work_that_moves_once_names_no_gpu(more_ms: int) -> None:
    """The work of a hot expert, that another rank has from some step on."""
    late_ns = np.random.default_rng(1).uniform(0, MS, (N_RANKS, N_STEPS))
    late_ns[0, :36] += more_ms * MS
    late_ns[1, 36:] += more_ms * MS
    report = report_on(late_ns)
    assert not accused(report)
    assert not report.healthy


@pytest.mark.parametrize(("scatter", "is_found"), [(0.02, True), (0.3, False)])
def test_longer_work_shows_only_where_the_work_is_even(scatter: float, is_found: bool) -> None:
    table = cells_of(N_RANKS, N_STEPS)
    own_ns = 10 * MS * np.exp(scatter * np.random.default_rng(1).standard_normal(N_RANKS * N_STEPS))
    slow = (table.process == 3) & (table.step >= SLOW_SINCE)
    own_ns[slow] *= 1.3
    longer = longer_ns(table, own_ns, np.zeros(N_RANKS, np.int64), LIMITS)
    assert not longer[~slow].any()
    assert (np.count_nonzero(longer[slow]) >= 0.9 * np.count_nonzero(slow)) == is_found


def cells_of(n_ranks: int, n_steps: int) -> Cells:
    """Cells with their process and step only."""
    names = [name for name in Cells.__dataclass_fields__ if name not in ("process", "step")]
    nothing = {name: np.zeros(n_ranks * n_steps) for name in names}
    process, step = np.repeat(np.arange(n_ranks), n_steps), np.tile(np.arange(n_steps), n_ranks)
    return Cells(process=process, step=step, **nothing)
