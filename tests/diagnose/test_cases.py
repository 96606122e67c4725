"""Known reports of slow and hung jobs, with the numbers reported, as events: the right answer, or silence.

The cases have the numbers of bench/accuracy/cases.py, which states why some cases have no test here.
"""

import re
import sys
from pathlib import Path

import pytest

from stallscope.diagnose.report.verdict import Report
from stallscope.events.names import Category, Datatype
from stallscope.synth import Capture, CrossedOrder, SharedDevice, SlowDevice, simulate
from stallscope.synth import Job as SimulatedJob

from .builders import MS, Delay, Gone, Job, data_parallel, every, trace_of
from .reports import only, report_of

S = 1000 * MS
BENCH = Path(__file__).parents[2] / "bench" / "accuracy"


def late(rank: int, ms: float, category: Category, *, period: int = 1, step_ms: float = 6, **rest) -> Report:
    """The report on 4 ranks with steps of step_ms, of which one rank spends ms more in every n-th step."""
    delays = every(rank, period, int(ms * MS), category=category, **rest)
    return report_of(dp_job(step_ms, delays=tuple(delays)))


def dp_job(step_ms: float = 6, *, n_ranks: int = 4, **rest):
    """A data-parallel job with steps of this many ms."""
    program = data_parallel(n_ranks, work_ns=int(step_ms * MS / 3))
    return trace_of(Job(program, n_ranks=n_ranks, **rest))


def all_ranks(ms: float, category: Category, *, first: int = 0, until: int = 40, step_ms: float = 6, **rest):
    """The report on a job in which all ranks spend ms more from some step on."""
    delays = [
        Delay(rank, step, int(ms * MS), category, **rest) for rank in range(4) for step in range(first, until)
    ]
    return report_of(dp_job(step_ms, delays=tuple(delays)))


def named(report: Report) -> list[int]:
    """All ranks that any verdict names."""
    return sorted({rank for verdict in report.verdicts for rank in verdict.ranks})


def is_straggler(report: Report, rank: int, cause: str, *, period: int | None = None) -> bool:
    """Whether the only verdict is on this rank, for this cause."""
    verdict = only(report)
    first = verdict.causes[0]
    assert (verdict.kind, verdict.ranks, first.cause.name) == ("straggler", [rank], cause)
    assert first.share >= 0.8
    assert verdict.period_steps == period
    return True


def hang(category: Category, *, rank: int = 1, step: int = 20, n_ranks: int = 4) -> Report:
    """The report on a job one of whose ranks never makes the next call."""
    gone = (Gone(rank, step, category=category),)
    return report_of(dp_job(n_ranks=n_ranks, gone=gone, quiet_ns=60 * S))


def is_missing(report: Report, rank: int, *, is_alive: bool = True) -> bool:
    verdict = only(report)
    assert (verdict.kind, verdict.ranks) == ("hang", [rank])
    assert [output.is_alive for output in verdict.evidence.doing] == [is_alive]
    return True


# CPU, scheduler, Python


def test_c01_200_ms_in_the_backward_pass_of_one_rank():
    report = late(1, 200, Category.SLEEP, step_ms=90, call=1)
    assert is_straggler(report, 1, "host_sleep")
    assert only(report).late_ms["median"] == pytest.approx(200, rel=0.02)


def test_c02_a_loader_of_150_ms_a_batch_on_one_rank():
    assert is_straggler(late(2, 189, Category.CHILD, step_ms=10.4), 2, "input_starvation")


@pytest.mark.parametrize(("ms", "step_ms", "period"), [(40, 60, 1), (1500, 400, 3)], ids=["c04", "c05"])
def test_c04_c05_garbage_is_collected_on_another_rank_each_time(ms, step_ms, period):
    """A thirtieth of each rank's own time, one after the other."""
    steps = range(5, 40, period)
    delays = tuple(Delay((7 * i) % 8, step, ms * MS, Category.ON_CPU) for i, step in enumerate(steps))
    verdict = only(report_of(dp_job(step_ms, n_ranks=8, delays=delays)))
    assert (verdict.kind, verdict.ranks, verdict.causes[0].cause.name) == ("imbalance", [], "host_compute")


def test_c07_too_many_threads_on_all_ranks_accuse_none():
    assert not named(all_ranks(25, Category.PREEMPTED, first=20, step_ms=87))


def test_c08_ten_times_slower_on_all_ranks_is_reported_without_a_name():
    verdict = only(all_ranks(54, Category.PREEMPTED, first=20))
    assert (verdict.kind, verdict.ranks) == ("change", [])
    assert "every rank" in verdict.abstained_because


def test_c10_one_cpu_for_all_threads_of_a_rank():
    assert is_straggler(late(1, 30, Category.PREEMPTED), 1, "cpu_preemption")


def test_c11_all_workers_on_the_same_cores_accuse_none():
    assert not named(all_ranks(30, Category.PREEMPTED))


def test_c13_a_cpu_limit_halves_the_speed_of_one_rank():
    assert is_straggler(late(3, 600, Category.PREEMPTED, step_ms=600), 3, "cpu_preemption")


def test_c14_a_cpu_quota_is_used_up_again_and_again():
    assert is_straggler(late(0, 80, Category.PREEMPTED, period=4), 0, "cpu_preemption", period=4)


def test_c16_memory_of_the_other_socket_makes_one_rank_slower():
    assert is_straggler(late(2, 4, Category.ON_CPU), 2, "host_compute")


def test_c17_a_slow_clock_makes_all_ranks_of_a_host_slow():
    delays = [Delay(rank, step, 10 * MS, Category.ON_CPU) for rank in (2, 3) for step in range(40)]
    more = {"node": (0, 0, 1, 1), "offset_ns": (0, 5 * S)}
    verdict = only(report_of(dp_job(n_ranks=4, delays=tuple(delays), **more)))
    assert (verdict.kind, verdict.ranks, verdict.nodes) == ("straggler", [2, 3], ["host-b"])
    assert verdict.causes[0].cause.name == "host_compute"


def test_c19_an_upload_in_threads_holds_the_interpreter_for_dozens_of_steps_after_a_save():
    delays = tuple(Delay(0, step, 7 * MS, Category.LOCK) for step in range(20, 56))
    assert is_straggler(report_of(dp_job(n_steps=100, delays=delays)), 0, "lock_contention")


def test_c20_staging_a_checkpoint_copies_for_seconds():
    assert is_straggler(
        late(1, 4500, Category.COPY, period=10, step_ms=480), 1, "host_device_copy", period=10
    )


def test_c22_small_random_jitter_is_healthy():
    assert report_of(dp_job(jitter_ns=1 * MS)).healthy


# Data, disk, checkpoint, memory


def test_d01_the_storage_freezes_a_rank_every_num_workers_steps():
    assert is_straggler(late(1, 900, Category.IO, period=4, step_ms=100), 1, "block_io", period=4)


def test_d03_too_few_workers_on_all_ranks_accuse_none():
    assert not named(all_ranks(213, Category.CHILD, step_ms=77))


def test_d04_ten_minutes_between_epochs_on_all_ranks_are_not_a_hang():
    delays = tuple(Delay(rank, 20, 600 * S, Category.CHILD) for rank in range(4))
    assert report_of(dp_job(delays=delays)).healthy


@pytest.mark.parametrize("case", ["d06", "d13", "d15", "d18", "g24", "n15"])
def test_d06_d13_d15_d18_g24_n15_a_rank_whose_process_ended_is_named(case):
    """Killed for lack of memory, by SIGBUS, or after a fault of its GPU: its peers wait for the watchdog."""
    assert is_missing(hang(Category.NONE, rank=2), 2, is_alive=False)


def test_d09_one_rank_saves_while_the_others_go_on():
    assert is_missing(hang(Category.IO, rank=0), 0)


def test_d10_the_peers_wait_for_the_long_save_of_rank_0():
    assert is_straggler(late(0, 30_000, Category.IO, period=10, step_ms=900), 0, "block_io", period=10)


def test_d12_one_storage_target_is_slow():
    assert is_straggler(late(3, 800, Category.IO, period=5, step_ms=100), 3, "block_io", period=5)


def test_d19_memory_compaction_holds_one_rank():
    assert is_straggler(late(1, 500, Category.FAULT, period=3), 1, "page_fault", period=3)


def test_d21_a_driver_call_that_does_not_return():
    report = hang(Category.DRIVER, rank=3)
    assert is_missing(report, 3)
    assert only(report).evidence.doing[0].state == "driver"


# GPU memory, copies, launches, syncs


@pytest.mark.parametrize("case", ["g01", "g03", "g04"])
def test_g01_g03_g04_the_allocator_of_one_rank_frees_and_asks_again(case):
    assert is_straggler(late(2, 810, Category.ALLOC, step_ms=5000), 2, "cuda_alloc")


@pytest.mark.parametrize("n_syncs", [60, 3000], ids=["g06", "g07"])
def test_g06_g07_hidden_synchronise_calls_of_one_rank(n_syncs):
    report = late(1, 12, Category.DEVICE, n_syncs=n_syncs)
    assert is_straggler(report, 1, "excessive_sync")


@pytest.mark.parametrize("case", ["g09", "g12"])
def test_g09_g12_blocking_copies_from_pageable_memory(case):
    assert is_straggler(late(0, 9, Category.COPY), 0, "host_device_copy")


def test_g10_all_ranks_synchronise_before_each_step():
    assert not named(all_ranks(5, Category.DEVICE, n_syncs=1))


def test_g13_pinning_memory_on_the_hot_path():
    assert is_straggler(late(3, 40, Category.ALLOC, period=2), 3, "cuda_alloc", period=2)


def test_g15_a_job_bound_by_its_launches_is_healthy():
    assert report_of(dp_job(30)).healthy


def test_g16_checks_left_on_by_all_ranks_accuse_none():
    assert not named(all_ranks(12, Category.ON_CPU, n_syncs=30))


def device_job(fault) -> Report:
    job = SimulatedJob(dp=8, steps=80)
    return report_of(simulate(job, [fault], seed=5, capture=Capture(has_gpu_times=True), has_twin=False)[0])


def test_g18_a_hot_gpu_is_named_by_its_own_times():
    verdict = only(device_job(SlowDevice(ranks=(6,), factor=2.5)))
    assert (verdict.kind, verdict.ranks, verdict.causes[0].cause.name) == ("device", [6], "gpu_slow")


def test_g19_a_gpu_that_is_5_percent_slower_raises_no_alarm():
    assert device_job(SlowDevice(ranks=(1,), factor=1.05)).healthy


def test_g21_another_job_on_the_gpu():
    verdict = only(device_job(SharedDevice(ranks=(3,), delay_ns=4 * MS)))
    assert (verdict.kind, verdict.ranks, verdict.causes[0].cause.name) == ("device", [3], "gpu_shared")


# Fabric, PCIe, network


def test_n01_a_slow_pcie_link_makes_the_copies_of_one_rank_long():
    assert is_straggler(late(2, 56, Category.COPY, step_ms=100), 2, "host_device_copy")


def fabric(*, before_ns: int, after_ns: int, n_steps: int = 60) -> Report:
    """The report on a job whose transfers take longer from the middle on, equally for all ranks."""
    late_gpus = {(rank, step): after_ns for rank in range(4) for step in range(n_steps // 2, n_steps)}
    late_gpus |= {(rank, step): before_ns for rank in range(4) for step in range(n_steps // 2)}
    return report_of(trace_of(Job(data_parallel(), n_steps=n_steps, gpu_late_ns=late_gpus)))


def test_n03_a_node_that_is_a_third_of_a_percent_slower_raises_no_alarm():
    delays = tuple(Delay(1, step, 20_000, Category.ON_CPU) for step in range(40))
    assert report_of(dp_job(delays=delays)).healthy


def test_n07_a_fabric_that_becomes_slow_names_no_rank():
    verdict = only(fabric(before_ns=0, after_ns=40 * MS))
    assert (verdict.kind, verdict.ranks) == ("change", [])
    assert "device or fabric" in verdict.abstained_because


@pytest.mark.parametrize("case", ["n09", "n10", "n13", "n16", "p23"])
def test_n09_n10_n13_n16_p23_a_fabric_that_was_slow_from_the_start_accuses_no_rank(case):
    assert not named(fabric(before_ns=40 * MS, after_ns=40 * MS))


@pytest.mark.parametrize("case", ["n12", "p17"])
def test_n12_p17_a_standstill_after_all_ranks_entered_names_no_rank(case):
    """No rank is missing: the connection or the GPUs block all ranks."""
    job = Job(data_parallel(), n_steps=20, quiet_ns=60 * S)
    trace = trace_of(job)
    trace.snapshots["category"], trace.snapshots["in_call"] = Category.WAIT_GPU, 0
    assert not named(report_of(trace))


# Program order, missing ranks, init, benign


def test_p02_sizes_differ():
    trace = dp_job(n_steps=20, quiet_ns=60 * S)
    rows = trace.collectives
    odd = (rows["pid"] == 1001) & (rows["seq"] == 59)
    rows["count"][odd] *= 2
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.ranks) == ("mismatch", [1])


def test_p05_one_rank_decides_otherwise_by_its_clock():
    trace = dp_job(n_steps=20, quiet_ns=60 * S)
    rows = trace.collectives
    rows["datatype"][(rows["pid"] == 1003) & (rows["seq"] == 59)] = Datatype.INT8
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.ranks) == ("mismatch", [3])


def test_p03_two_ranks_take_two_communicators_in_another_order():
    job = SimulatedJob(dp=16, ep=8, steps=30, layers=2, buckets=2)
    trace, _ = simulate(job, [CrossedOrder(ranks=(6, 7), step=20)], seed=1)
    verdict = only(report_of(trace))
    assert (verdict.kind, verdict.ranks) == ("hang", [6, 7])


def test_p06_a_hidden_collective_that_some_ranks_wait_in():
    gone = tuple(Gone(rank, 20, category=Category.NET) for rank in (1, 2))
    verdict = only(report_of(dp_job(gone=gone, quiet_ns=60 * S)))
    assert (verdict.kind, verdict.ranks) == ("hang", [1, 2])
    assert {output.state for output in verdict.evidence.doing} == {"net"}


def test_p08_the_ranks_of_one_node_compile_while_the_others_wait():
    gone = tuple(Gone(rank, 5, category=Category.ON_CPU) for rank in (2, 3))
    more = {"node": (0, 0, 1, 1), "offset_ns": (0, 9 * S), "quiet_ns": 600 * S}
    verdict = only(report_of(dp_job(gone=gone, **more)))
    assert (verdict.kind, verdict.ranks, verdict.nodes) == ("hang", [2, 3], ["host-b"])
    assert {output.state for output in verdict.evidence.doing} == {"on_cpu"}


def test_p09_a_rank_compiles_again_for_each_length():
    assert is_straggler(late(1, 900, Category.ON_CPU, period=6), 1, "host_compute", period=6)


@pytest.mark.parametrize("ms", [214, 300])
def test_p11_a_long_first_call_is_benign(ms):
    delays = tuple(Delay(rank, 0, ms * MS, Category.ON_CPU) for rank in range(4))
    assert report_of(dp_job(delays=delays)).healthy


def test_p12_one_rank_prepares_for_half_an_hour_before_the_first_barrier():
    gone = (Gone(0, 1, category=Category.ON_CPU),)
    assert is_missing(report_of(dp_job(n_steps=2, gone=gone, quiet_ns=1900 * S)), 0)


@pytest.mark.parametrize("case", ["p14", "p15"])
def test_p14_p15_a_long_start_of_all_ranks_is_not_a_straggler(case):
    delays = tuple(Delay(rank, 0, 60 * S, Category.DRIVER) for rank in range(4))
    assert report_of(dp_job(delays=delays)).healthy


def ahead(quiet_ns: int) -> Report:
    """32 ranks, of which two have entered round 641 when the trace ends; the other 30 have not."""
    gone = tuple(Gone(rank, 20, call=1, category=Category.ON_CPU) for rank in range(30))
    return report_of(dp_job(n_ranks=32, gone=gone, n_steps=21, quiet_ns=quiet_ns))


def test_p18_two_ranks_ahead_for_a_moment_are_normal():
    assert ahead(5 * MS).healthy


def test_p18_the_many_behind_are_named_not_the_two_ahead():
    assert named(ahead(60 * S)) == list(range(30))


def test_p21_experts_without_tokens_are_uneven_work_not_bad_machines():
    """Odd ranks get no tokens, and wait for the even ranks in each step."""
    work = tuple(1 * MS if rank % 2 else 5 * MS for rank in range(8))
    report = report_of(trace_of(Job(data_parallel(8, work_ns=work), n_ranks=8)))
    assert not named(report)


def test_p24_a_hang_names_the_rank_that_is_missing():
    assert is_missing(hang(Category.SLEEP, rank=1), 1)


# The table


def table():
    sys.path.insert(0, str(BENCH))
    try:
        from cases import CASES
    finally:
        sys.path.remove(str(BENCH))
    return CASES


def test_the_table_and_this_file_list_the_same_tests():
    here = {name for name in globals() if re.match(r"test_[cdgnp]\d\d_", name)}
    tests = {known.test for known in table().values() if known.test}
    assert {name for name in tests if name not in here} == set()
    assert {name for name in here if name not in tests} <= {
        "test_p18_two_ranks_ahead_for_a_moment_are_normal"
    }


@pytest.mark.shared
def test_every_known_case_has_a_test_or_a_reason(shared: Path):
    file = (shared / "CASES").with_suffix(".md")
    if not file.exists():
        pytest.skip("no list of known cases next to the recordings")
    wanted = set(re.findall(r"^\| ([cdgnp]\d\d) \|", file.read_text(), flags=re.M))
    assert wanted == set(table())
    assert all(known.test or known.why_not for known in table().values())
