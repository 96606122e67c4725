"""The emulated NCCL meets across processes, as collectives do."""

import pytest

pytestmark = pytest.mark.compiler

NOT_READY = 600


def test_nobody_is_released_before_the_last_has_entered(ranks):
    found = ranks("rendezvous", nranks=4)
    last_ns = max(one["entered_ns"] for one in found)
    assert all(one["released_ns"] > last_ns for one in found)
    assert all(one["returned_ns"] < last_ns for one in found[:-1]), "the call only enqueues"


def test_ranks_run_ahead_of_each_other(ranks):
    late, early = ranks("run_ahead", nranks=2)
    assert early["enqueued_ns"] < late["start_ns"] < early["done_ns"]


def test_small_data_really_travels(ranks):
    for found in ranks("values", nranks=3):
        assert found == {"sum": 6.0, "max": 3.0, "gathered": [1.0, 2.0, 3.0], "broadcast": 9.0, "whole": 6}


def test_broadcast_and_reduce_wait_for_whom_they_need(ranks):
    root, late = ranks("root_only", nranks=2)
    assert root["broadcast_ns"] < 100_000_000
    assert root["reduce_ns"] > 100_000_000
    assert late["reduce_ns"] < 100_000_000


def test_every_collective_completes(ranks):
    assert ranks("every_collective", nranks=3) == [{"is_done": True}] * 3


def test_split_groups_by_color_in_the_order_of_keys(ranks):
    found = ranks("split", nranks=4)
    assert [one["half"] for one in found] == [[2, 1], [2, 1], [2, 0], [2, 0]]
    assert [one["half_total"] for one in found] == [2.0, 4.0, 2.0, 4.0]
    assert [one["again"] for one in found] == [[2, 1], [2, 1], [2, 0], [2, 0]]
    assert [one["again_total"] for one in found] == [2.0, 4.0, 2.0, 4.0]
    assert [one["nobody"] for one in found] == [None, [3, 0], [3, 1], [3, 2]]
    assert [one["whole_total"] for one in found] == [6.0] * 4


def test_a_communicator_shrinks_and_grows(ranks):
    found = ranks("shrink_and_grow", nranks=3)
    assert [one["small"] for one in found] == [[2, 0], [2, 1], None]
    assert [one["big"] for one in found] == [[3, 0], [3, 1], [3, 2]]
    assert [one["total"] for one in found] == [3.0] * 3


def test_one_process_may_have_all_ranks(ranks):
    (found,) = ranks("one_process")
    assert found["all"] == [[3, 0], [3, 1], [3, 2]]
    assert found["device"] == 2
    assert found["plain"] == found["scalable"] == [[2, 0], [2, 1]]


def test_messages_in_a_group_do_not_block_each_other_and_large_sends_wait(ranks):
    found = ranks("messages", nranks=3)
    assert [one["in_group_code"] for one in found] == [0] * 3, "inside a group nothing is enqueued"
    assert found[0]["large_ns"] > 75_000_000
    assert found[0]["small_ns"] < 75_000_000


def test_ranks_that_disagree_hang_until_they_are_aborted(ranks):
    assert ranks("mismatch", nranks=2) == [{"stuck_code": NOT_READY, "after_code": 0}] * 2


def test_wrong_arguments_are_refused(ranks):
    assert ranks("bad_calls") == [
        {"no_comm": 4, "rank_too_high": 4, "group_end_alone": 5, "no_such_device": 101}
    ]
