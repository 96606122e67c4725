"""Ranks of one node, or of several nodes, that are late together are named together."""

import numpy as np
import pytest

from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.together import companions, in_groups, with_whole_nodes
from stallscope.events.names import Category
from stallscope.synth import HostStall, Schedule, simulate
from stallscope.synth import Job as SimulatedJob

from .builders import MS, Delay, Job, data_parallel, trace_of
from .cutting import Cut, told
from .reports import blamed, only, report_of

N_STEPS = 60


def late(ranks, *, period: int, ms: int, category: Category = Category.IO, first: int = 6) -> list[Delay]:
    return [
        Delay(rank, step, ms * MS + rank % 5 * MS, category)
        for step in range(first, N_STEPS, period)
        for rank in ranks
    ]


def job(n_nodes: int, per_node: int, delays: list[Delay]) -> Job:
    n_ranks = n_nodes * per_node
    return Job(
        data_parallel(n_ranks, n_buckets=2),
        n_ranks=n_ranks,
        n_steps=N_STEPS,
        delays=tuple(delays),
        node=tuple(rank // per_node for rank in range(n_ranks)),
        offset_ns=tuple(1_000_000 * MS * i for i in range(n_nodes)),
    )


@pytest.mark.parametrize(
    ("n_nodes", "per_node", "late_nodes", "period", "category", "cause"),
    [
        (8, 4, (0, 1, 2, 3), 9, Category.IO, "block_io"),
        (4, 4, (1, 2), 5, Category.NET, "network_wait"),
        (2, 8, (1,), 7, Category.IO, "block_io"),
        (6, 2, (4, 5), 3, Category.SLEEP, "host_sleep"),
        (5, 3, (0, 4), 8, Category.LOCK, "lock_contention"),
        (4, 1, (0, 2), 6, Category.IO, "block_io"),
        (8, 1, (2, 3, 4, 5), 6, Category.IO, "block_io"),
        (7, 1, (1, 2, 6), 4, Category.NET, "network_wait"),
    ],
)
def test_nodes_late_together_are_named_as_a_group(n_nodes, per_node, late_nodes, period, category, cause):
    ranks = [node * per_node + i for node in late_nodes for i in range(per_node)]
    trace = trace_of(job(n_nodes, per_node, late(ranks, period=period, ms=120, category=category)))
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.ranks) == ("straggler", ranks)
    assert verdict.causes[0].cause.name == cause
    assert verdict.period_steps == period
    assert len(verdict.nodes) == len(late_nodes)
    assert "late rank changes" not in verdict.summary


def test_most_ranks_of_a_node_late_together_are_named_as_a_group():
    verdict = only(report_of(trace_of(job(4, 4, late((4, 5, 6), period=6, ms=90)))))
    assert (verdict.kind, verdict.ranks, verdict.nodes) == ("straggler", [4, 5, 6], ["host-b"])


def test_nodes_with_one_rank_each_and_more_to_compute_have_uneven_work():
    delays = late((2, 3, 4, 5), period=2, ms=60, category=Category.ON_CPU)
    verdict = only(report_of(trace_of(job(8, 1, delays))))
    assert (verdict.kind, verdict.evidence.more_work) == ("imbalance", [2, 3, 4, 5])


@pytest.mark.parametrize("n", [1, 5, 20])
@pytest.mark.parametrize("ms", [20, 60])
def test_a_stream_accuses_no_rank_with_more_work(n, ms):
    trace = trace_of(job(8, 1, late((2, 3, 4, 5), period=2, ms=ms, category=Category.ON_CPU)))
    changes = told(trace, Cut(n=n))
    assert [kind for kind, _ in changes.opened] == ["imbalance"]
    assert blamed(changes.report) == blamed(report_of(trace))


def test_two_ranks_late_in_different_steps_are_two_culprits():
    delays = late((1,), period=6, ms=90) + late((2,), period=6, ms=90, first=9)
    verdicts = report_of(trace_of(job(4, 4, delays))).verdicts
    assert sorted(verdict.ranks for verdict in verdicts) == [[1], [2]]


def test_ranks_spread_over_all_nodes_are_not_grouped():
    """One rank of each of four nodes: uneven work, or chance."""
    node = np.repeat(np.arange(4), 4)
    process, step = np.repeat([0, 4, 8, 12], 5), np.tile(np.arange(10, 60, 10), 4)
    assert companions(0, process, step, node).tolist() == []


def test_companions_are_the_ranks_of_late_nodes():
    node = np.repeat(np.arange(4), 2)
    process, step = np.repeat([0, 1, 2, 3, 6], 5), np.tile(np.arange(10, 60, 10), 5)
    assert companions(0, process, step, node).tolist() == [1, 2, 3, 6]
    assert companions(0, process[:10], step[:10], node).tolist() == [1]


def test_a_rank_late_in_some_steps_of_its_late_node_belongs_to_the_node():
    node = np.repeat(np.arange(2), 4)
    named = {rank: [late_in(rank, step) for step in range(0, 60, 10)] for rank in range(3)}
    of_node = [late_in(3, step) for step in (10, 30, 40)]
    elsewhere = [*of_node, late_in(3, 11)]
    others = [late for delays in named.values() for late in delays]
    assert with_whole_nodes(named, [*others, *of_node], node) == {**named, 3: of_node}
    assert with_whole_nodes(named, [*others, *elsewhere], node) == named
    assert with_whole_nodes({0: named[0]}, [*others, *of_node], node) == {0: named[0]}
    assert with_whole_nodes(named, [*others, *of_node[:2]], node) == named  # two of six may be chance


def late_in(process: int, step: int) -> LateStep:
    return LateStep(process, step, 0, 0, 50 * MS, 50 * MS, 1)


def test_nodes_with_other_steps_are_other_groups():
    node = np.repeat(np.arange(3), 2)
    early, later = np.arange(0, 20), np.arange(40, 60)
    steps = {0: early, 1: early, 2: later, 3: later, 4: later}
    same = dict.fromkeys(steps, Category.IO)
    assert in_groups(steps, node, same) == [[0, 1], [2, 3], [4]]


def test_nodes_with_one_rank_each_form_a_group_if_they_wait_for_the_same_kind_of_thing():
    steps = dict.fromkeys(range(4), np.arange(0, 40, 5))
    category = {0: Category.IO, 1: Category.LOCK, 2: Category.IO, 3: Category.LOCK}
    assert in_groups(steps, np.arange(8), category) == [[0, 2], [1, 3]]
    assert in_groups({**steps, 2: np.arange(1, 40, 5)}, np.arange(8), category) == [[0], [1, 3], [2]]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_node_that_is_one_pipeline_stage_is_named_when_its_ranks_are_late_together(stage):
    """All ranks of the program are late, so their peers do not show the delay; their own other steps do."""
    ranks = tuple(range(8 * stage, 8 * stage + 8))
    late_stage = HostStall(
        cause="block_io", ranks=ranks, delay_ns=90 * MS, schedule=Schedule(first=8, every=6)
    )
    job = SimulatedJob(dp=8, pp=2, ranks_per_node=8, steps=60)
    trace, _ = simulate(job, [late_stage], seed=3, has_twin=False)
    verdict = only(report_of(trace))
    assert (verdict.kind, tuple(verdict.ranks), verdict.period_steps) == ("straggler", ranks, 6)
    assert verdict.causes[0].cause.name == "block_io"


def test_healthy_stages_on_nodes_of_their_own_are_healthy():
    trace, _ = simulate(SimulatedJob(dp=8, pp=2, ranks_per_node=8, steps=60), seed=3, has_twin=False)
    assert not [verdict for verdict in report_of(trace).verdicts if verdict.ranks]
