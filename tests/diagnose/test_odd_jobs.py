"""Jobs and traces of odd shapes: no crash, and no accusation without a reason."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.report import text
from stallscope.events.layout import COMMUNICATORS, empty
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace
from stallscope.synth import Job as SimulatedJob
from stallscope.synth import simulate

from .builders import MS, Call, Delay, Job, data_parallel, dp_trace, every, trace_of, where
from .reports import blamed, only, report_of

DELAYS = every(2, 7, 50 * MS)
SLOW = dp_trace(DELAYS)


def with_column(name, value):
    rows = SLOW.collectives.copy()
    rows[name] = value(rows) if callable(value) else value
    return replace(SLOW, collectives=rows)


NOTHING_TO_COMPARE = {
    "empty": Trace(),
    "no calls": replace(SLOW, collectives=SLOW.collectives[:0]),
    "one call": where(SLOW, np.arange(len(SLOW.collectives)) == 0),
    "one rank of four": where(SLOW, SLOW.collectives["pid"] == 1002),
    "one rank": dp_trace(every(0, 7, 50 * MS), n_ranks=1),
    "unnumbered": with_column("seq", 0),
    "numbers unknown": with_column("seq", -1),
    "no time passes": with_column("ts_ns", lambda rows: rows["ts_ns"][0]),
    "sends to itself": trace_of(Job((Call(((0, 0),), op=Op.SEND),), n_ranks=1)),
}
A_MONTH_NS = 30 * 86_400 * 10**9
LITTLE_KNOWN = {
    "no processes": replace(SLOW, processes=SLOW.processes[:0]),
    "no clocks": replace(SLOW, clocks=(), ends_ns=()),
    "end unknown": replace(SLOW, ends_ns=(-1,)),
    "no snapshots": replace(SLOW, snapshots=SLOW.snapshots[:0]),
    "rank unknown": with_column("comm_rank", -1),
    "size unknown": with_column("nranks", -1),
    "count unknown": with_column("count", -1),
    "large stream": with_column("stream", 2**64 - 1),
    "in any order": where(SLOW, np.random.default_rng(0).permutation(len(SLOW.collectives))),
    "told twice": replace(SLOW, collectives=np.concatenate([SLOW.collectives] * 2)),
    "processes told twice": replace(SLOW, processes=np.concatenate([SLOW.processes] * 2)),
    "a month's gap": with_column("ts_ns", lambda rows: rows["ts_ns"] + A_MONTH_NS * (rows["seq"] > 60)),
    "a communicator of one": trace_of(
        Job((*data_parallel(), Call(((0,), (1,), (2,), (3,)), count=3)), delays=tuple(DELAYS))
    ),
}


@pytest.mark.parametrize("trace", NOTHING_TO_COMPARE.values(), ids=NOTHING_TO_COMPARE)
def test_no_rank_is_named_in_a_trace_without_comparable_ranks(trace):
    assert not [verdict for verdict in report_of(trace).verdicts if verdict.ranks]


@pytest.mark.parametrize("trace", LITTLE_KNOWN.values(), ids=LITTLE_KNOWN)
def test_the_culprit_is_named_in_spite_of_missing_data(trace):
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.ranks, verdict.period_steps) == ("straggler", [2], 7)


@pytest.mark.parametrize("share", [0.002, 0.01, 0.05])
def test_lost_records_do_not_accuse_other_ranks(share):
    rng = np.random.default_rng(4)
    for _ in range(3):
        kept = where(SLOW, rng.random(len(SLOW.collectives)) >= share)
        assert {tuple(v.ranks) for v in report_of(replace(kept, lost={"arrival": 9})).verdicts} <= {(2,)}


@pytest.mark.parametrize("op", [op for op in Op if Op.NONE < op < Op.SEND], ids=lambda op: op.name.lower())
def test_every_collective_carries_blame(op):
    job = Job((Call(((0, 1, 2, 3),), op=op, waits=True),), delays=tuple(DELAYS))
    assert only(report_of(trace_of(job))).ranks == [2]


def test_a_ring_of_sends_carries_blame():
    ring = Call(((0, 1), (1, 2), (2, 3), (3, 0)), op=Op.SEND, waits=True)
    verdict = only(report_of(trace_of(Job((ring,), delays=tuple(DELAYS)))))
    assert (verdict.ranks, verdict.kind) == ([2], "straggler")


@pytest.mark.parametrize("n_steps", [1, 2, 3, 4])
def test_no_rank_is_named_in_the_first_steps_of_a_job(n_steps):
    report = report_of(dp_trace(every(1, 2, 50 * MS, first=0), n_steps=n_steps))
    assert report.verdicts == []


@pytest.mark.parametrize("n_ranks", [2, 3, 5, 33])
def test_jobs_of_any_size(n_ranks):
    trace = dp_trace(every(1, 4, 50 * MS, until=60), n_ranks=n_ranks, n_steps=60)
    assert blamed(report_of(trace)) == [("straggler", (1,), 4, "host_sleep")]


def test_ledgers_that_make_no_sense_do_not_crash():
    for seed in range(10):
        noise = np.random.default_rng(seed).integers(-(1 << 60), 1 << 60, SLOW.collectives["ledger_ns"].shape)
        report_of(with_column("ledger_ns", noise))


def test_records_that_make_no_sense_do_not_crash():
    rng = np.random.default_rng(7)
    for _ in range(10):
        rows = SLOW.collectives.copy()
        for name in (
            "op",
            "datatype",
            "seq",
            "comm_rank",
            "nranks",
            "peer_rank",
            "count",
            "n_syncs",
            "flags",
        ):
            hit = rng.random(len(rows)) < 0.05
            rows[name][hit] = rng.integers(0, 200, hit.sum())
        report_of(replace(SLOW, collectives=rows))


def test_ranks_that_no_agent_saw_are_counted_and_leave_the_answer_inconclusive():
    trace = dp_trace(n_ranks=6)
    pids = trace.processes["pid"]
    some = where(trace, np.isin(trace.collectives["pid"], pids[:4]))
    one_is_known = empty(COMMUNICATORS, 1)
    one_is_known["pid"], one_is_known["comm_hash"] = pids[4], trace.collectives["comm_hash"][0]
    report = report_of(replace(some, communicators=one_is_known))
    assert (report.examined["n_ranks"], report.examined["n_ranks_unseen"]) == (4, 1)
    message = text.report(report)
    assert "Examined 4 ranks of 5 on" in message
    assert "Inconclusive: 1 of 5 ranks is not in this trace." in message
    assert report.gaps[0].action in message
    assert report_of(trace).examined["n_ranks_unseen"] == 0


def test_pairs_of_a_pipeline_that_send_to_each_other_lack_no_rank():
    trace, _ = simulate(SimulatedJob(dp=2, pp=4, steps=20), [], seed=1)
    assert report_of(trace).examined["n_ranks_unseen"] == 0


@pytest.mark.parametrize("in_each_step", [Category.NET, Category.LOCK, Category.ON_CPU])
@pytest.mark.parametrize("category", [Category.ON_CPU, Category.IO])
def test_delays_just_above_the_threshold_are_named_if_the_host_was_off_the_cpu(in_each_step, category):
    """Computing varies with the speed of the host; a wait in each step of all ranks does not change that."""
    every_step = [
        Delay(rank, step, 60 * MS, category=in_each_step) for rank in range(8) for step in range(60)
    ]
    late = [Delay(2, step, int(3.6 * MS), category=category, call=1) for step in range(6, 60, 5)]
    report = report_of(trace_of(Job(data_parallel(8), 8, n_steps=60, delays=(*every_step, *late))))
    named = {rank for verdict in report.verdicts for rank in verdict.ranks}
    assert named == ({2} if category == Category.IO else set())
