"""Programs and steps: ranks that make the same calls, and calls that repeat."""

import numpy as np
import pytest

from stallscope.diagnose.timeline.programs import programs_of, repeat_length
from stallscope.diagnose.timeline.timeline import timeline_of
from stallscope.events.names import Op
from stallscope.synth.fault_scenarios import scene

from .builders import MS, Call, Delay, Job, data_parallel, dp_trace, trace_of, where

EVERYONE = ((0, 1, 2, 3),)
LAYER = (
    Call(EVERYONE, op=Op.ALL_GATHER, count=64),
    Call(EVERYONE, op=Op.ALL_GATHER, count=64),
    Call(EVERYONE, op=Op.REDUCE_SCATTER, count=64),
)


def steps_by_round(trace):
    """Step of each round, checked to be the same for all ranks."""
    timeline = timeline_of(trace)
    programs = programs_of(timeline)
    order = np.lexsort((timeline.process, timeline.rows["seq"]))
    steps = programs.step[order].reshape(-1, timeline.n_processes)
    assert (steps == steps[:, :1]).all()
    return steps[:, 0], programs


def test_ranks_of_a_data_parallel_job_run_one_program():
    programs = programs_of(timeline_of(dp_trace(n_ranks=8)))
    assert len(set(programs.program.tolist())) == 1


def test_stages_of_a_pipeline_run_different_programs():
    first, second = ((0, 1),), ((2, 3),)
    forward, backward = ((0, 2), (1, 3)), ((2, 0), (3, 1))
    program = (
        Call(first, count=4),
        Call(second, count=4),
        Call(second, count=5),
        Call(forward, op=Op.SEND, count=77),
        Call(backward, op=Op.SEND, count=78, waits=True),
    )
    timeline = timeline_of(trace_of(Job(program)))
    number = dict(zip(timeline.rank.tolist(), programs_of(timeline).program.tolist(), strict=True))
    assert number[0] == number[1] != number[2] == number[3]


def test_nested_groups_are_one_program():
    tensor, data = Call(((0, 1), (2, 3)), waits=True), Call(((0, 2), (1, 3)), count=9, waits=True)
    programs = programs_of(timeline_of(trace_of(Job((tensor, tensor, data)))))
    assert len(set(programs.program.tolist())) == 1
    assert programs.has_steps.all()


def test_the_same_call_has_the_same_key_on_all_ranks_of_a_program():
    timeline = timeline_of(dp_trace())
    programs = programs_of(timeline)
    for key in np.unique(programs.key):
        same = programs.key == key
        assert same.sum() == 4
        assert len(np.unique(timeline.rows["seq"][same])) == 1


@pytest.mark.parametrize("n_buckets", [1, 2, 3, 7])
def test_a_step_is_the_repeating_pattern_of_calls(n_buckets):
    step, _ = steps_by_round(trace_of(Job(data_parallel(n_buckets=n_buckets), n_steps=30)))
    known = step[step >= 0]
    _, counts = np.unique(known[known < known.max()], return_counts=True)
    assert set(counts.tolist()) == {n_buckets}
    assert len(known) >= n_buckets * 28


def test_a_step_of_many_equal_layers_is_the_step_not_the_layer():
    program = (*LAYER * 6, Call(EVERYONE, count=1, waits=True))
    step, plan = steps_by_round(trace_of(Job(program, n_steps=20)))
    _, counts = np.unique(step[(step >= 0) & (step < step.max())], return_counts=True)
    assert plan.has_steps.all()
    assert set(counts.tolist()) == {len(program)}


def test_rows_of_a_validation_do_not_shift_the_steps_after_it():
    validation = tuple(Call(EVERYONE, op=Op.BROADCAST, count=9, waits=True) for _ in range(2))
    trace = trace_of(Job(data_parallel(), n_steps=40, extra={10: validation, 25: validation}))
    step, _ = steps_by_round(trace)
    is_training = np.ones(len(step), bool)
    for begin in (3 * 10, 3 * 25 + 2):
        is_training[begin : begin + 2] = False
    of_training = step[is_training]
    whole = of_training[(of_training >= 0) & (of_training < of_training.max())]
    _, counts = np.unique(whole, return_counts=True)
    assert set(counts.tolist()) == {3}
    assert (np.diff(step) >= 0).all()


@pytest.mark.parametrize("every", [5, 10, 20])
def test_periodic_calls_do_not_merge_several_steps_into_one(every):
    saving = (Call(EVERYONE, op=Op.BROADCAST, count=9, waits=True),)
    saves = dict.fromkeys(range(every, 200, every), saving)
    step, plan = steps_by_round(trace_of(Job(data_parallel(), n_steps=200, extra=saves)))
    _, counts = np.unique(step[(step >= 0) & (step < step.max())], return_counts=True)
    assert plan.has_steps.all()
    assert set(counts.tolist()) == {3, 4}


def test_equal_calls_are_distinguished_by_synchronise_calls_between_them():
    alike = Call(EVERYONE, count=1000)
    program = (alike, alike, alike, Call(EVERYONE, count=1000, waits=True))
    step, plan = steps_by_round(trace_of(Job(program, n_steps=25)))
    _, counts = np.unique(step[(step >= 0) & (step < step.max())], return_counts=True)
    assert plan.has_steps.all()
    assert set(counts.tolist()) == {4}


def test_without_a_pattern_a_step_lasts_from_wait_to_wait():
    rng = np.random.default_rng(5)
    calls = tuple(
        Call(EVERYONE, count=int(rng.integers(1, 4000)), op=Op(int(rng.integers(1, 5))), waits=i % 5 == 4)
        for i in range(100)
    )
    step, plan = steps_by_round(trace_of(Job(calls, n_steps=1)))
    assert not plan.has_steps.any()
    _, counts = np.unique(step[(step >= 0) & (step < step.max())], return_counts=True)
    assert set(counts.tolist()) == {5}


@pytest.mark.parametrize(
    ("symbols", "wanted"),
    [
        ("a" * 50, 1),
        ("ab" * 30, 2),
        ("aab" * 20, 3),
        ("aaaabaaaac" * 12, 10),
        ("abcabd" * 15, 6),
        ("ab", 0),
        ("abcdefghijklmnopqrstuvwxyz", 0),
        ("", 0),
    ],
)
def test_repeat_length(symbols, wanted):
    assert repeat_length(np.array([ord(symbol) for symbol in symbols], np.int64)) == wanted


def test_random_symbols_have_no_period():
    for seed in range(20):
        symbols = np.random.default_rng(seed).integers(0, 6, 400)
        assert repeat_length(symbols) == 0


def test_a_pattern_with_a_rare_stranger_keeps_its_period():
    symbols = list("abcd" * 60)
    for at in (50, 121, 200):
        symbols.insert(at, "x")
    assert repeat_length(np.array([ord(symbol) for symbol in symbols], np.int64)) == 4


def test_lost_records_do_not_move_other_ranks_to_other_steps():
    trace = dp_trace([Delay(2, 20, 50 * MS)])
    lost = (trace.collectives["pid"] == 1001) & np.isin(trace.collectives["seq"], [31, 32, 77])
    timeline = timeline_of(where(trace, ~lost))
    programs = programs_of(timeline)
    for seq in range(30, 90):
        same = timeline.rows["seq"] == seq
        assert len(np.unique(programs.step[same])) == 1


def test_additional_synchronise_calls_of_one_rank_do_not_hide_the_steps():
    """Rank 0 has the most rows, and copies in every fifth step, in a job that saves every 12 steps."""
    trace, _ = scene("dp8-saves", "host_device_copy", 18, has_twin=False)
    timeline = timeline_of(trace)
    programs = programs_of(timeline)
    assert programs.has_steps.all()
    assert 95 <= len(np.unique(programs.step[programs.step >= 0])) <= 105
