"""The emulated NCCL meets across processes, as collectives do."""

import pytest

pytestmark = pytest.mark.compiler

NOT_READY = 600


def test_no_rank_is_released_before_the_last_rank_has_entered(ranks):
    result = ranks("rendezvous", nranks=4)
    last_ns = max(entry["entered_ns"] for entry in result)
    assert all(entry["released_ns"] > last_ns for entry in result)
    assert all(entry["returned_ns"] < last_ns for entry in result[:-1]), "the call only enqueues"


def test_ranks_run_ahead_of_each_other(ranks):
    late, early = ranks("run_ahead", nranks=2)
    assert early["enqueued_ns"] < late["start_ns"] < early["done_ns"]


def test_small_data_really_travels(ranks):
    for rank in ranks("values", nranks=3):
        assert rank == {"sum": 6.0, "max": 3.0, "gathered": [1.0, 2.0, 3.0], "broadcast": 9.0, "whole": 6}


def test_broadcast_and_reduce_wait_for_whom_they_need(ranks):
    root, late = ranks("root_only", nranks=2)
    assert root["done_ns"] > late["entered_ns"]


def test_every_collective_completes(ranks):
    assert ranks("every_collective", nranks=3) == [{"is_done": True}] * 3


def test_split_groups_by_color_in_the_order_of_keys(ranks):
    result = ranks("split", nranks=4)
    assert [entry["half"] for entry in result] == [[2, 1], [2, 1], [2, 0], [2, 0]]
    assert [entry["half_total"] for entry in result] == [2.0, 4.0, 2.0, 4.0]
    assert [entry["again"] for entry in result] == [[2, 1], [2, 1], [2, 0], [2, 0]]
    assert [entry["again_total"] for entry in result] == [2.0, 4.0, 2.0, 4.0]
    assert [entry["nobody"] for entry in result] == [None, [3, 0], [3, 1], [3, 2]]
    assert [entry["whole_total"] for entry in result] == [6.0] * 4


def test_a_communicator_shrinks_and_grows(ranks):
    result = ranks("shrink_and_grow", nranks=3)
    assert [entry["small"] for entry in result] == [[2, 0], [2, 1], None]
    assert [entry["big"] for entry in result] == [[3, 0], [3, 1], [3, 2]]
    assert [entry["total"] for entry in result] == [3.0] * 3


def test_one_process_may_have_all_ranks(ranks):
    (rank,) = ranks("one_process")
    assert rank["all"] == [[3, 0], [3, 1], [3, 2]]
    assert rank["device"] == 2
    assert rank["plain"] == rank["scalable"] == [[2, 0], [2, 1]]


def test_messages_in_a_group_do_not_block_each_other_and_large_sends_wait(ranks):
    result = ranks("messages", nranks=3)
    assert [entry["in_group_code"] for entry in result] == [0] * 3, "inside a group nothing is enqueued"
    (_, large_done_ns), (_, small_done_ns) = result[0]["large"], result[0]["small"]
    assert large_done_ns > result[1]["large"][0]
    assert small_done_ns < result[1]["small"][0]


def test_ranks_that_disagree_hang_until_they_are_aborted(ranks):
    assert ranks("mismatch", nranks=2) == [{"stuck_code": NOT_READY, "after_code": 0}] * 2


def test_wrong_arguments_are_refused(ranks):
    assert ranks("bad_calls") == [
        {"no_comm": 4, "rank_too_high": 4, "group_end_alone": 5, "no_such_device": 101}
    ]
