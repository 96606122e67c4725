"""Clocks of several nodes: a release delayed by host work is not an offset, and the stated accuracy is reached."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.timeline.clocks import aligned
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events import layout
from stallscope.events.names import Category
from stallscope.events.trace import Clock, Trace

from .builders import EPOCH_NS, MS, START_NS, Delay, Gone, Job, data_parallel, trace_of
from .reports import report_of

OFFSETS_NS = (0, 70_000 * MS, -3_000 * MS, 5_000_000 * MS, 11 * MS, 900 * MS, -8_000 * MS, 1)
N_STEPS = 60


def job_of(n_nodes: int, delays: list[Delay], *, ranks_per_node: int = 1, **rest) -> Job:
    n_ranks = n_nodes * ranks_per_node
    return Job(
        data_parallel(n_ranks, gpu_ns=MS),
        n_ranks=n_ranks,
        n_steps=N_STEPS,
        delays=tuple(delays),
        node=tuple(rank // ranks_per_node for rank in range(n_ranks)),
        offset_ns=OFFSETS_NS[:n_nodes],
        **rest,
    )


def with_wall_errors(trace: Trace, errors_ns: list[int]) -> Trace:
    """The trace with this error of each node's wall clock."""
    clocks = tuple(replace(clock, wall_ns=clock.wall_ns + errors_ns[clock.node]) for clock in trace.clocks)
    return replace(trace, clocks=clocks)


def before_wait(rank: int, ns: int, category: Category, *, period: int = 1) -> list[Delay]:
    """Host work of a rank after each step's last collective, before it waits."""
    return [
        Delay(rank, step, ns, category, call=2, is_before_wait=True) for step in range(8, N_STEPS, period)
    ]


def assert_accuracy_holds(trace: Trace) -> None:
    result = aligned(timeline_of(trace), trace)
    at = np.array([START_NS + N_STEPS * MS])
    common_error = [
        float(result.offsets[node].ns(at + OFFSETS_NS[node])[0]) - OFFSETS_NS[node] for node in result.offsets
    ]
    middle = np.median(common_error)
    for node, error in enumerate(common_error):
        assert abs(error - middle) <= result.error_ns[node] + result.error_ns.min() + 50_000, (
            node,
            error,
            middle,
        )


@pytest.mark.parametrize(
    ("n_nodes", "culprit", "ms", "category"),
    [
        (4, 2, 25, Category.IO),
        (4, 0, 25, Category.IO),
        (2, 0, 40, Category.SLEEP),
        (2, 1, 40, Category.ON_CPU),
        (3, 1, 15, Category.NET),
        (8, 5, 60, Category.PREEMPTED),
        (8, 7, 18, Category.LOCK),
    ],
)
def test_host_work_before_a_release_is_lateness_and_no_offset(n_nodes, culprit, ms, category):
    rng = np.random.default_rng(ms)
    trace = trace_of(job_of(n_nodes, before_wait(culprit, ms * MS, category), jitter_ns=MS // 4))
    trace = with_wall_errors(trace, rng.integers(-1_500_000, 1_500_000, n_nodes).tolist())
    assert_accuracy_holds(trace)
    assert accused(trace) == [("straggler", [culprit])]


def test_host_work_of_one_rank_of_a_node_does_not_hide_the_node_s_prompt_ranks():
    trace = trace_of(job_of(2, before_wait(1, 30 * MS, Category.IO), ranks_per_node=4))
    assert aligned(timeline_of(trace), trace).error_ns.max() <= MS / 2
    assert accused(trace) == [("straggler", [1])]


@pytest.mark.parametrize("off_ns", [2_000 * MS, -600 * MS])
def test_wall_clocks_that_the_rounds_disprove_are_not_used(off_ns):
    trace = with_wall_errors(
        trace_of(job_of(2, [Delay(3, s, 30 * MS) for s in range(8, 60, 5)], ranks_per_node=2)), [0, off_ns]
    )
    assert_accuracy_holds(trace)
    assert aligned(timeline_of(trace), trace).error_ns.max() <= MS / 2
    assert accused(trace) == [("straggler", [3])]


def test_the_error_covers_releases_and_wall_clocks_that_disagree():
    """Neither explanation can be excluded if the hosts have spare time in every round."""
    off_ns = 10 * MS
    job = replace(job_of(2, [], ranks_per_node=2), program=data_parallel(4, gpu_ns=20 * MS))
    result = aligned(*with_line(with_wall_errors(trace_of(job), [0, off_ns])))
    assert off_ns / 2 <= result.error_ns.max() <= off_ns


def accused(trace: Trace) -> list[tuple[str, list[int]]]:
    return [(verdict.kind, verdict.ranks) for verdict in report_of(trace).verdicts]


def with_line(trace: Trace):
    return timeline_of(trace), trace


@pytest.mark.parametrize("has_clocks", [True, False])
@pytest.mark.parametrize(("gone", "n_nodes"), [(5, 2), (0, 2), (6, 4)])
def test_a_hang_in_the_first_round_is_as_long_as_it_lasts(gone, n_nodes, has_clocks):
    job = replace(
        job_of(n_nodes, [], ranks_per_node=8 // n_nodes, gone=(Gone(gone, 0),), quiet_ns=120_000 * MS),
        program=data_parallel(8, n_buckets=1),
    )
    trace = trace_of(job)
    trace = replace(trace, communicators=communicators(trace, 8), clocks=trace.clocks if has_clocks else ())
    (verdict,) = report_of(trace).verdicts
    assert (verdict.kind, verdict.ranks) == ("hang", [gone])
    assert verdict.evidence.waited_s == pytest.approx(120, abs=1)


def communicators(trace: Trace, n_ranks: int):
    rows = layout.empty(layout.COMMUNICATORS, n_ranks)
    rows["comm_hash"] = trace.collectives["comm_hash"][0]
    rows["comm_rank"] = np.arange(n_ranks)
    rows["nranks"] = n_ranks
    rows["node"], rows["pid"] = trace.processes["node"], trace.processes["pid"]
    return rows


def test_a_step_of_a_wall_clock_makes_it_count_for_less():
    trace = trace_of(job_of(2, [], ranks_per_node=2))
    later = Clock(1, OFFSETS_NS[1] + 10_000 * MS, EPOCH_NS + 10_000 * MS - 700 * MS)
    stepped = replace(trace, clocks=(*trace.clocks, later, Clock(0, 10_000 * MS, EPOCH_NS + 10_000 * MS)))
    assert_accuracy_holds(stepped)
