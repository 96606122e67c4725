"""The emulated CUDA runtime runs ahead, has a bounded queue, and blocks where the real one does."""

import pytest

pytestmark = pytest.mark.compiler

NOT_READY = 600


def test_a_launch_returns_before_its_kernel_runs_and_synchronize_waits_for_it(ranks):
    (found,) = ranks("launch")
    assert found["enqueue_ns"] < 30_000_000 < found["wait_ns"]
    assert found["ready_code"] == NOT_READY
    assert found["done_code"] == 0
    assert found["bad_kernel_code"] == 98


def test_a_full_queue_blocks_the_launch(ranks):
    (found,) = ranks("full_queue")
    assert found["half_ns"] < found["half"] * found["kernel_ns"]
    assert found["enqueued_ns"] >= (found["more"] - 1) * found["kernel_ns"]
    assert found["done_ns"] >= (found["depth"] + found["more"]) * found["kernel_ns"]
    assert found["enqueued_ns"] < found["done_ns"] - found["depth"] // 2 * found["kernel_ns"]


def test_waiting_costs_cpu_only_when_it_is_asked_to_spin(ranks):
    (found,) = ranks("wait_cpu")
    assert max(found["auto_ns"], found["block_ns"]) < found["run_ns"] / 4
    assert found["spin_ns"] > 2 * max(found["auto_ns"], found["block_ns"])


def test_the_schedule_can_be_set_from_outside(ranks):
    (found,) = ranks("launch", EMULATED_CUDA_SCHEDULE="4")
    assert found["wait_ns"] > 30_000_000


def test_streams_run_beside_each_other_and_wait_for_events(ranks):
    (found,) = ranks("streams")
    assert found["slow_after_fast_code"] == NOT_READY
    assert found["event_before_code"] == NOT_READY
    assert found["event_after_code"] == 0
    assert found["slow_after_dependent_code"] == 0
    assert found["device_wait_code"] == 0


def test_events_measure_the_device(ranks):
    (found,) = ranks("events")
    assert found["early_code"] == NOT_READY
    assert found["elapsed_ns"] >= found["run_ns"]
    assert found["wait_ns"] > found["run_ns"] / 2
    assert found["never_ns"] < found["run_ns"]


def test_only_pageable_copies_block(ranks):
    (found,) = ranks("copies")
    for name in ("pinned_to_host_ns", "pinned_to_device_ns", "small_pageable_to_device_ns"):
        assert found[name] < found["run_ns"] / 2, name
    for name in ("pageable_to_host_ns", "pageable_to_device_ns"):
        assert found[name] > found["run_ns"] / 2, name
    assert found["freed_code"] == 0


def test_copies_move_data(ranks):
    assert ranks("data") == [{"written": 1.5, "copied": 1.5, "zeroed": 0.0}]


def test_allocating_costs_cpu_by_size_and_free_waits_for_the_device(ranks):
    (found,) = ranks("allocations")
    assert found["big_ns"] > 5 * found["small_ns"]
    assert found["free_wall_ns"] > found["run_ns"] / 2
    assert found["freed_twice_code"] == 1
    assert found["null_code"] == 0
    assert found["too_much_code"] == 2
    assert (found["last_error_code"], found["then_code"]) == (2, 0)


def test_a_graph_replays_its_work_collectives_too(ranks):
    for found in ranks("graph", nranks=2):
        assert found["in_capture_code"] == 900
        assert found["after_capture_ns"] < found["run_ns"] / 2
        assert found["launched_ns"] < found["run_ns"] < found["done_ns"]
        assert found["value"] == 8.0


def test_the_device_goes_on_while_its_process_is_stopped(ranks):
    (found,) = ranks("stopped")
    assert found["stopped_ns"] > 3 * found["run_ns"]
    assert found["run_ns"] <= found["elapsed_ns"] < 2 * found["run_ns"]
