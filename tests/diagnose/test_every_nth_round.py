"""A busy hub keeps every k-th round of all ranks: the diagnosis names the same rank, and no change of the job."""

from dataclasses import replace
from functools import cache

import pytest

from stallscope.diagnose import Stream, diagnose
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events.names import Category
from stallscope.events.trace import Trace

from .builders import MS, Job, data_parallel, every, trace_of
from .cutting import Cut, Hand, batches

N_STEPS = 160


@cache
def job(*, is_slow: bool) -> Trace:
    delays = every(2, 5, 50 * MS, category=Category.IO, until=N_STEPS) if is_slow else []
    return trace_of(Job(data_parallel(4), n_ranks=4, n_steps=N_STEPS, delays=tuple(delays)))


def sampled(trace: Trace, k: int) -> Trace:
    """Every k-th round."""
    return replace(trace, collectives=trace.collectives[trace.collectives["seq"] % k == 0])


@pytest.mark.parametrize("k", [2, 4])
def test_a_late_rank_is_named_with_its_cause_from_every_nth_round(k: int):
    """Its cost is exact as long as each step has a round: a step of this job has three."""
    (whole,) = diagnose(job(is_slow=True)).verdicts
    (verdict,) = diagnose(sampled(job(is_slow=True), k)).verdicts
    assert (verdict.kind, verdict.ranks) == ("straggler", [2]) == (whole.kind, whole.ranks)
    assert verdict.causes[0].cause.name == "block_io"
    assert whole.cost and verdict.cost
    if k == 4:
        assert verdict.cost.at_most_gpu_seconds is not None
        return
    assert verdict.cost.may_be_gpu_seconds == pytest.approx(whole.cost.gpu_seconds, rel=0.1)


@pytest.mark.parametrize("is_slow", [True, False], ids=["late rank", "healthy"])
@pytest.mark.parametrize("ks", [(1, 2, 4), (4, 2, 1), (2, 2, 8)])
def test_a_sample_that_changes_is_not_a_change_of_the_job(ks: tuple[int, ...], is_slow: bool):
    clock, n = Hand(), 30
    stream = Stream(clock=clock)
    opened = []
    for number, (at_ns, batch) in enumerate(batches(job(is_slow=is_slow), Cut(n))):
        clock.now_ns = at_ns
        opened += stream.feed(sampled(batch, ks[min(len(ks) * number // n, len(ks) - 1)]))
    opened += stream.finish()
    wanted = {("straggler", (2,))} if is_slow else set()
    assert {(change.verdict.kind, tuple(change.verdict.ranks)) for change in opened} == wanted


@pytest.mark.parametrize("every_step", [1, 5])
@pytest.mark.parametrize("ks", [(1, 2), (2, 1), (1, 2, 1), (2, 1, 2, 1)])
def test_a_sample_that_changes_has_the_cost_of_a_steady_sample(ks: tuple[int, ...], every_step: int):
    """Each step of this job has a round of each sample."""
    delays = tuple(every(2, every_step, 50 * MS, category=Category.IO, until=N_STEPS))
    trace = trace_of(Job(data_parallel(4), n_ranks=4, n_steps=N_STEPS, delays=delays))
    costs = []
    for each in ((1,), ks):
        clock, n = Hand(), 30
        stream = Stream(clock=clock)
        changes = []
        for number, (at_ns, batch) in enumerate(batches(trace, Cut(n))):
            clock.now_ns = at_ns
            changes += stream.feed(sampled(batch, each[min(len(each) * number // n, len(each) - 1)]))
        changes += stream.finish()
        last = {change.incident_id: change.verdict.cost for change in changes}
        costs.append(sum(cost.gpu_seconds for cost in last.values() if cost))
    assert costs[1] == pytest.approx(costs[0], rel=0.1)


def test_a_record_that_only_one_rank_lacks_is_missing():
    trace = job(is_slow=False)
    rows = trace.collectives
    is_lost = (rows["pid"] == rows["pid"].min()) & (rows["seq"] % 2 == 1)
    timeline = timeline_of(replace(trace, collectives=rows[~is_lost]))
    lacks = timeline.process == 0
    assert not timeline.is_whole[lacks].any() and timeline.is_whole[~lacks & ~timeline.is_first].all()
