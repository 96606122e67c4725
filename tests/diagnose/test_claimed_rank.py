"""Two processes that claim the same rank: no rank is accused, and both processes are named."""

from dataclasses import replace

from stallscope.diagnose import Stream, diagnose
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace

from .builders import MS, Gone, Job, data_parallel, dp_trace, every, trace_of
from .cutting import Cut, Hand, batches


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
