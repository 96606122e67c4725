"""The emulated CUDA runtime runs ahead, has a bounded queue, and blocks where the real one does."""

import pytest

pytestmark = [pytest.mark.compiler, pytest.mark.live]

NOT_READY = 600


def test_a_launch_returns_before_its_kernel_runs_and_synchronize_waits_for_it(ranks):
    (rank,) = ranks("launch")
    assert rank["enqueue_ns"] < 30_000_000 < rank["wait_ns"]
    assert rank["ready_code"] == NOT_READY
    assert rank["done_code"] == 0
    assert rank["bad_kernel_code"] == 98


def test_a_full_queue_blocks_the_launch(ranks):
    (rank,) = ranks("full_queue")
    assert rank["half_ns"] < rank["half"] * rank["kernel_ns"]
    assert rank["enqueued_ns"] >= (rank["more"] - 1) * rank["kernel_ns"]
    assert rank["done_ns"] >= (rank["depth"] + rank["more"]) * rank["kernel_ns"]
    assert rank["enqueued_ns"] < rank["done_ns"] - rank["depth"] // 2 * rank["kernel_ns"]


def test_waiting_uses_the_cpu_only_in_spin_mode(ranks):
    (rank,) = ranks("wait_cpu")
    assert max(rank["auto_ns"], rank["block_ns"]) < rank["run_ns"] / 4
    assert rank["spin_ns"] > 2 * max(rank["auto_ns"], rank["block_ns"])


def test_the_schedule_can_be_set_from_outside(ranks):
    (rank,) = ranks("launch", EMULATED_CUDA_SCHEDULE="4")
    assert rank["wait_ns"] > 30_000_000


def test_streams_run_concurrently_and_wait_for_events(ranks):
    (rank,) = ranks("streams")
    assert rank["slow_after_fast_code"] == NOT_READY
    assert rank["event_before_code"] == NOT_READY
    assert rank["event_after_code"] == 0
    assert rank["slow_after_dependent_code"] == 0
    assert rank["device_wait_code"] == 0


def test_events_measure_the_device(ranks):
    (rank,) = ranks("events")
    assert rank["early_code"] == NOT_READY
    assert rank["elapsed_ns"] >= rank["run_ns"]
    assert rank["wait_ns"] > rank["run_ns"] / 2
    assert rank["never_ns"] < rank["run_ns"]


def test_only_pageable_copies_block(ranks):
    (rank,) = ranks("copies")
    for name in ("pinned_to_host_ns", "pinned_to_device_ns", "small_pageable_to_device_ns"):
        assert rank[name] < rank["run_ns"] / 2, name
    for name in ("pageable_to_host_ns", "pageable_to_device_ns"):
        assert rank[name] > rank["run_ns"] / 2, name
    assert rank["freed_code"] == 0


def test_copies_move_data(ranks):
    assert ranks("data") == [{"written": 1.5, "copied": 1.5, "zeroed": 0.0}]


def test_allocating_costs_cpu_by_size_and_free_waits_for_the_device(ranks):
    (rank,) = ranks("allocations")
    assert rank["big_ns"] > 5 * rank["small_ns"]
    assert rank["free_wall_ns"] > rank["run_ns"] / 2
    assert rank["freed_twice_code"] == 1
    assert rank["null_code"] == 0
    assert rank["too_much_code"] == 2
    assert (rank["last_error_code"], rank["then_code"]) == (2, 0)


def test_a_graph_replays_its_work_and_its_collectives(ranks):
    for rank in ranks("graph", nranks=2):
        assert rank["in_capture_code"] == 900
        assert rank["after_capture_ns"] < rank["run_ns"] / 2
        assert rank["launched_ns"] < rank["run_ns"] < rank["done_ns"]
        assert rank["value"] == 8.0


def test_the_device_goes_on_while_its_process_is_stopped(ranks):
    (rank,) = ranks("stopped")
    assert rank["stopped_ns"] > 3 * rank["run_ns"]
    assert rank["run_ns"] <= rank["elapsed_ns"] < 2 * rank["run_ns"]
