"""The timeline: intervals, waits, gaps, communicators, and the processes of ranks."""

import numpy as np

from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events.names import Category, Op
from stallscope.events.trace import Trace

from .builders import MS, TRANSFER_NS, Call, Delay, Job, dp_trace, trace_of, where

SLOW = Delay(1, 3, 30 * MS)


def test_self_time_is_the_interval_without_the_wait():
    timeline = timeline_of(dp_trace([SLOW], jitter_ns=0))
    at = {
        rank: np.flatnonzero((timeline.rank[timeline.process] == rank) & (timeline.rows["seq"] == 12))[0]
        for rank in (0, 1)
    }
    # Round 12 opens step 4; the wait at the end of step 3 lies before it. Rank 0 waited for rank 1 all of 30 ms.
    assert timeline.wait_ns[at[0]] - timeline.wait_ns[at[1]] == 30 * MS
    assert timeline.self_ns[at[0]] == timeline.self_ns[at[1]] == 2 * MS + 10_000
    np.testing.assert_array_equal(timeline.interval_ns, timeline.wait_ns + timeline.self_ns)


def test_the_wait_of_the_last_rank_is_the_transfer_only():
    timeline = timeline_of(dp_trace([SLOW], jitter_ns=0))
    own_rows = (timeline.rank[timeline.process] == 1) & (timeline.rows["seq"] == 12)
    assert timeline.wait_ns[own_rows].tolist() == [TRANSFER_NS]


def test_every_process_has_one_first_row_without_an_interval():
    timeline = timeline_of(dp_trace(n_ranks=5))
    assert timeline.is_first.sum() == timeline.n_processes == 5
    assert not timeline.interval_ns[timeline.is_first].any()
    assert not timeline.is_whole[timeline.is_first].any()


def test_a_lost_record_spoils_the_interval_it_lies_in_and_no_other():
    whole = dp_trace()
    lost = (whole.collectives["pid"] == 1002) & (whole.collectives["seq"] == 50)
    timeline = timeline_of(where(whole, ~lost))
    spoilt = np.flatnonzero(~timeline.is_whole & ~timeline.is_first)
    assert [(int(timeline.rank[timeline.process[i]]), int(timeline.rows["seq"][i])) for i in spoilt] == [
        (2, 51)
    ]


def test_a_wait_is_never_longer_than_its_interval():
    trace = dp_trace()
    trace.collectives["ledger_ns"][40:, Category.WAIT_GPU - 1] += 10**15
    timeline = timeline_of(trace)
    assert (timeline.wait_ns <= timeline.interval_ns).all()
    assert (timeline.self_ns >= 0).all()


def test_point_to_point_pairs_are_matched_by_source_and_destination():
    there = Call(((0, 1), (2, 3)), op=Op.SEND)
    back = Call(((1, 0), (3, 2)), op=Op.SEND)
    timeline = timeline_of(trace_of(Job((there, back), n_steps=3)))
    assert timeline.is_p2p.all()
    pairs = {}
    for i, row in enumerate(timeline.rows):
        own, peer = int(row["comm_rank"]), int(row["peer_rank"])
        source = own if row["op"] == Op.SEND else peer
        pairs.setdefault(int(timeline.comm[i]), set()).add((source, own + peer - source))
    assert len(pairs) == 4
    assert sorted(next(iter(pair)) for pair in pairs.values()) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert all(len(pair) == 1 for pair in pairs.values())


def test_ranks_are_those_of_the_job_or_the_order_of_appearance():
    trace = dp_trace()
    trace.processes["rank"] = [3, 1, 0, 2]
    assert timeline_of(trace).rank.tolist() == [3, 1, 0, 2]
    trace.processes["rank"] = [3, -1, 0, 2]
    assert timeline_of(trace).rank.tolist() == [0, 1, 2, 3]
    trace.processes["rank"] = [1, 1, 0, 2]
    assert timeline_of(trace).rank.tolist() == [0, 1, 2, 3]


def test_ranks_without_a_launcher_come_from_the_largest_communicator():
    trace = dp_trace()
    trace.processes["rank"] = -1
    trace.collectives["comm_rank"] = np.array([2, 0, 3, 1])[trace.collectives["comm_rank"]]
    assert timeline_of(trace).rank.tolist() == [2, 0, 3, 1]
    trace.processes["rank"] = [2, -1, -1, 1]
    assert timeline_of(trace).rank.tolist() == [2, 0, 3, 1]
    trace.processes["rank"] = 0
    assert timeline_of(trace).rank.tolist() == [2, 0, 3, 1]


def test_a_communicator_of_some_ranks_assigns_no_rank_numbers():
    pairs = Call(((2, 3), (0, 1)))
    trace = trace_of(Job((pairs,), n_steps=3))
    trace.processes["rank"] = -1
    assert timeline_of(trace).rank.tolist() == [0, 1, 2, 3]


def test_equal_process_numbers_on_two_hosts_are_two_processes():
    trace = dp_trace(node=(0, 0, 1, 1), offset_ns=(0, 0))
    trace.collectives["pid"] = np.where(trace.collectives["pid"] % 2, 7, 8)
    trace.processes["pid"] = [8, 7, 8, 7]
    timeline = timeline_of(trace)
    assert timeline.n_processes == 4
    assert sorted(timeline.rank.tolist()) == [0, 1, 2, 3]


def test_communicators_of_equal_size_are_distinguished_by_first_use():
    tensor, data = Call(((0, 1), (2, 3))), Call(((0, 2), (1, 3)))
    timeline = timeline_of(trace_of(Job((tensor, tensor, data), n_steps=4)))
    for rank in range(4):
        own = timeline.role[timeline.rank[timeline.process] == rank].reshape(-1, 3)
        assert (own[:, 0] == own[:, 1]).all()
        assert (own[:, 0] != own[:, 2]).all()
    assert len(np.unique(timeline.role)) == 2


def test_no_collectives_make_an_empty_timeline():
    timeline = timeline_of(Trace())
    assert (timeline.n_processes, len(timeline.rows)) == (0, 0)
