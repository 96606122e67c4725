"""Two processes that claim the same rank: no rank is accused, and both processes are named."""

from dataclasses import replace

import pytest

from stallscope.diagnose import Stream, Verdict, diagnose
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace

from .builders import MS, Gone, Job, data_parallel, dp_trace, every, trace_of
from .cutting import Cut, Hand, batches
from .test_job_separation import another, attached_late, side_by_side


def with_claim(trace: Trace) -> Trace:
    """The process of rank 3 claims rank 2, and no communicator numbers its members."""
    processes = trace.processes.copy()
    processes["rank"][processes["rank"] == 3] = 2
    collectives, communicators = trace.collectives.copy(), trace.communicators.copy()
    collectives["comm_rank"], communicators["comm_rank"] = UNKNOWN, UNKNOWN
    return replace(trace, processes=processes, collectives=collectives, communicators=communicators)


HANG = with_claim(trace_of(Job(data_parallel(4), gone=(Gone(3, 20),))))
STRAGGLER = with_claim(dp_trace(every(2, 5, 50 * MS)))


def test_a_claimed_rank_is_inconclusive_and_both_processes_are_named():
    for trace in (HANG, STRAGGLER):
        report = diagnose(trace)
        (verdict,) = report.verdicts
        assert (verdict.kind, verdict.ranks) == ("inconclusive", [])
        assert [process.pid for process in verdict.evidence.processes] == [1002, 1003]
        assert "processes 1002 on" in verdict.summary and "1003 on" in verdict.summary
        assert "claim rank 2" in verdict.summary


def test_a_stream_reports_a_claimed_rank_and_no_hang():
    for trace in (HANG, STRAGGLER):
        clock = Hand()
        stream = Stream(clock=clock)
        changes = []
        for clock.now_ns, batch in batches(trace, Cut(12)):
            changes += stream.feed(batch)
        assert {verdict.kind for verdict in stream.report().verdicts} == {"inconclusive"}
        changes += stream.finish()
        assert {change.verdict.kind for change in changes} == {"inconclusive"}


def test_a_later_process_with_the_same_rank_is_not_a_duplicate_claim():
    trace = with_claim(dp_trace(every(2, 5, 50 * MS)))
    rows = trace.collectives
    last_ns = rows["ts_ns"][rows["pid"] == 1002].max()
    moved = rows.copy()
    moved["ts_ns"][rows["pid"] == 1003] += last_ns
    assert all(v.evidence.claimed_ranks is None for v in diagnose(replace(trace, collectives=moved)).verdicts)


N_LONG = 200
"""Steps of a job whose releases distinguish it from another job."""


def streamed(trace: Trace) -> list[tuple[str, list[int], list[int]]]:
    """The verdicts that a stream opens."""
    clock = Hand()
    stream = Stream(clock=clock)
    changes = []
    for clock.now_ns, batch in batches(trace, Cut(12)):
        changes += stream.feed(batch)
    changes += stream.finish()
    return [named(change.verdict) for change in changes if change.kind == "opened"]


def named(verdict: Verdict) -> tuple[str, list[int], list[int]]:
    claimants = [process.pid for process in verdict.evidence.processes or ()]
    return verdict.kind, verdict.ranks, claimants or verdict.pids


@pytest.mark.parametrize("ranks", [(0, 1, 2, 2), (0, 0, 0, 0), (5, 5, 6, 7)])
def test_processes_that_are_released_together_claim_a_rank_of_one_job_that_was_attached_late(ranks):
    trace = attached_late(dp_trace(every(2, 5, 50 * MS), n_steps=N_LONG))
    trace.processes["rank"] = ranks
    trace.collectives["comm_rank"] = UNKNOWN
    claimants = [1000 + i for i, rank in enumerate(ranks) if ranks.count(rank) > 1]
    assert [named(verdict) for verdict in diagnose(trace).verdicts] == [("inconclusive", [], claimants)]
    assert streamed(trace) == [("inconclusive", [], claimants)]


def test_processes_of_two_jobs_that_were_attached_late_are_distinguished_by_their_releases():
    """Two launchers started them at the same moment, so their pids are in no useful order."""
    faulty = attached_late(dp_trace(every(2, 5, 50 * MS), n_steps=N_LONG))
    healthy = attached_late(
        another(dp_trace(every(1, 300, MS), n_steps=N_LONG), pids_from=100, later_ns=3 * MS)
    )
    both = side_by_side(faulty, healthy)
    both.collectives["comm_rank"] = UNKNOWN
    for table in (both.collectives, both.processes, both.snapshots):
        for old, new in ((1102, 990), (1003, 1110), (1101, 2000)):
            table["pid"][table["pid"] == old] = new
    expected = [("straggler", [2], [1002])]
    assert [named(verdict) for verdict in diagnose(both).verdicts] == expected
    assert streamed(both) == expected


def test_without_recorded_waits_a_rank_is_claimed_if_no_second_job_has_the_lowest_rank():
    trace = attached_late(dp_trace(every(2, 5, 50 * MS)))
    for name in ("wait_enter_ns", "wait_leave_ns", "comm_rank"):
        trace.collectives[name] = UNKNOWN
    trace.processes["rank"] = (0, 1, 2, 2)
    expected = [("inconclusive", [], [1002, 1003])]
    assert [named(verdict) for verdict in diagnose(trace).verdicts] == expected
    assert streamed(trace) == expected
