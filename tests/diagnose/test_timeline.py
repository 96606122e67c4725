"""The timeline: intervals, waits, gaps, communicators and who is who."""

import numpy as np

from stallscope.diagnose.timeline.timeline import timeline
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace

from .builders import MS, TRANSFER_NS, Call, Delay, Job, dp_trace, trace_of, where

SLOW = Delay(1, 3, 30 * MS)


def test_self_time_is_the_interval_without_the_wait():
    line = timeline(dp_trace([SLOW], jitter_ns=0))
    at = {
        rank: np.flatnonzero((line.rank[line.process] == rank) & (line.rows["seq"] == 12))[0]
        for rank in (0, 1)
    }
    # Round 12 opens step 4; the wait at the end of step 3 lies before it. Rank 0 waited for rank 1 all of 30 ms.
    assert line.wait_ns[at[0]] - line.wait_ns[at[1]] == 30 * MS
    assert line.self_ns[at[0]] == line.self_ns[at[1]] == 2 * MS + 10_000
    np.testing.assert_array_equal(line.interval_ns, line.wait_ns + line.self_ns)


def test_the_wait_of_the_last_rank_is_the_transfer_only():
    line = timeline(dp_trace([SLOW], jitter_ns=0))
    own_rows = (line.rank[line.process] == 1) & (line.rows["seq"] == 12)
    assert line.wait_ns[own_rows].tolist() == [TRANSFER_NS]


def test_every_process_has_one_first_row_without_an_interval():
    line = timeline(dp_trace(n_ranks=5))
    assert line.is_first.sum() == line.n_processes == 5
    assert not line.interval_ns[line.is_first].any()
    assert not line.is_whole[line.is_first].any()


def test_a_lost_record_spoils_the_interval_it_lies_in_and_no_other():
    whole = dp_trace()
    lost = (whole.collectives["pid"] == 1002) & (whole.collectives["seq"] == 50)
    line = timeline(where(whole, ~lost))
    spoilt = np.flatnonzero(~line.is_whole & ~line.is_first)
    assert [(int(line.rank[line.process[i]]), int(line.rows["seq"][i])) for i in spoilt] == [(2, 51)]


def test_a_wait_is_never_longer_than_its_interval():
    trace = dp_trace()
    trace.collectives["ledger_ns"][40:, Category.WAIT_GPU - 1] += 10**15
    line = timeline(trace)
    assert (line.wait_ns <= line.interval_ns).all()
    assert (line.self_ns >= 0).all()


def test_point_to_point_pairs_are_matched_by_source_and_destination():
    there = Call(((0, 1), (2, 3)), op=Op.SEND)
    back = Call(((1, 0), (3, 2)), op=Op.SEND)
    line = timeline(trace_of(Job((there, back), n_steps=3)))
    assert line.is_p2p.all()
    pairs = {}
    for i, row in enumerate(line.rows):
        own, peer = int(row["comm_rank"]), int(row["peer_rank"])
        source = own if row["op"] == Op.SEND else peer
        pairs.setdefault(int(line.comm[i]), set()).add((source, own + peer - source))
    assert len(pairs) == 4
    assert sorted(next(iter(pair)) for pair in pairs.values()) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert all(len(pair) == 1 for pair in pairs.values())


def test_ranks_are_those_of_the_job_or_the_order_of_appearance():
    trace = dp_trace()
    trace.processes["rank"] = [3, 1, 0, 2]
    assert timeline(trace).rank.tolist() == [3, 1, 0, 2]
    trace.processes["rank"] = [3, -1, 0, 2]
    assert timeline(trace).rank.tolist() == [0, 1, 2, 3]
    trace.processes["rank"] = [1, 1, 0, 2]
    assert timeline(trace).rank.tolist() == [0, 1, 2, 3]


def test_ranks_that_no_launcher_told_are_those_in_the_communicator_of_all():
    trace = dp_trace()
    trace.processes["rank"] = -1
    trace.collectives["comm_rank"] = np.array([2, 0, 3, 1])[trace.collectives["comm_rank"]]
    assert timeline(trace).rank.tolist() == [2, 0, 3, 1]
    trace.processes["rank"] = [2, -1, -1, 1]
    assert timeline(trace).rank.tolist() == [2, 0, 3, 1]
    trace.processes["rank"] = 0
    assert timeline(trace).rank.tolist() == [2, 0, 3, 1]


def test_a_communicator_of_some_ranks_numbers_nobody():
    pairs = Call(((2, 3), (0, 1)))
    trace = trace_of(Job((pairs,), n_steps=3))
    trace.processes["rank"] = -1
    assert timeline(trace).rank.tolist() == [0, 1, 2, 3]


def test_equal_process_numbers_on_two_hosts_are_two_processes():
    trace = dp_trace(node=(0, 0, 1, 1), offset_ns=(0, 0))
    trace.collectives["pid"] = np.where(trace.collectives["pid"] % 2, 7, 8)
    trace.processes["pid"] = [8, 7, 8, 7]
    line = timeline(trace)
    assert line.n_processes == 4
    assert sorted(line.rank.tolist()) == [0, 1, 2, 3]


def test_communicators_of_one_size_are_told_apart_by_first_use():
    tensor, data = Call(((0, 1), (2, 3))), Call(((0, 2), (1, 3)))
    line = timeline(trace_of(Job((tensor, tensor, data), n_steps=4)))
    for rank in range(4):
        own = line.role[line.rank[line.process] == rank].reshape(-1, 3)
        assert (own[:, 0] == own[:, 1]).all()
        assert (own[:, 0] != own[:, 2]).all()
    assert len(np.unique(line.role)) == 2


def test_no_collectives_make_an_empty_timeline():
    line = timeline(Trace())
    assert (line.n_processes, len(line.rows)) == (0, 0)
