"""Causes: each finds its category and is silent on all others; shares add up."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stallscope.diagnose.causes import Excess, explained
from stallscope.diagnose.causes._registry import all_causes
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events import layout
from stallscope.events.names import N_CATEGORIES, Category, Op

from .builders import MS, dp_trace, every
from .reports import SCHEMA, only, report_of

FINDS = {
    Category.LOCK: "lock_contention",
    Category.OTHER_OFF: "blocked",
    Category.SLEEP: "host_sleep",
    Category.NET: "network_wait",
    Category.CHILD: "input_starvation",
    Category.DEVICE: "gpu_slow",
    Category.STOPPED: "process_stopped",
    Category.PREEMPTED: "cpu_preemption",
    Category.FAULT: "page_fault",
    Category.DRIVER: "driver",
    Category.IO: "block_io",
    Category.LAUNCH: "launch_bound",
    Category.COPY: "host_device_copy",
    Category.ALLOC: "cuda_alloc",
    Category.ON_CPU: "host_compute",
}
"""The cause of a delay in a category. Waits for other ranks have no cause of their own."""


def excess(**by_category: float) -> Excess:
    ledger = np.zeros(N_CATEGORIES)
    for name, ns in by_category.items():
        ledger[Category[name] - 1] = ns
    return Excess(total_ns=float(ledger[ledger > 0].sum()), ledger_ns=ledger, n_steps=10)


def shares(parts):
    return {part.cause.name: part.share for part in parts}


def test_every_category_but_the_wait_has_a_cause():
    assert set(FINDS) == set(Category) - {Category.NONE, Category.WAIT_GPU}


@pytest.mark.parametrize("category", FINDS, ids=lambda category: category.name.lower())
def test_a_cause_finds_its_category_and_the_others_are_silent(category):
    parts = explained(excess(**{category.name: 100 * MS}))
    assert shares(parts) == {FINDS[category]: pytest.approx(1.0)}
    assert parts[0].excess_ns == pytest.approx(100 * MS)
    assert parts[0].cause.advice(parts[0].evidence)


@pytest.mark.parametrize(
    "category",
    [c for c in FINDS if c not in (Category.ALLOC, Category.COPY, Category.LAUNCH, Category.DEVICE)],
    ids=lambda category: category.name.lower(),
)
def test_a_delay_on_the_host_is_explained_by_its_category(category):
    verdict = only(report_of(dp_trace(every(2, 7, 50 * MS, category=category))))
    assert (verdict.ranks, verdict.causes[0].cause.name) == ([2], FINDS[category])
    assert len(verdict.causes) == 1


@pytest.mark.parametrize(
    "category", [Category.ALLOC, Category.COPY], ids=lambda category: category.name.lower()
)
def test_a_delay_in_cuda_calls_is_explained_by_its_category(category):
    verdict = only(report_of(dp_trace(every(2, 7, 50 * MS, category=category))))
    assert (verdict.ranks, verdict.causes[0].cause.name) == ([2], FINDS[category])


def test_shares_are_those_of_the_excess():
    parts = explained(excess(IO=60 * MS, PREEMPTED=30 * MS, ON_CPU=10 * MS))
    assert shares(parts) == {
        "block_io": pytest.approx(0.6),
        "cpu_preemption": pytest.approx(0.3),
        "host_compute": pytest.approx(0.1),
    }


def test_categories_in_which_the_peers_exceed_the_rank_are_not_causes():
    assert shares(explained(excess(IO=60 * MS, ON_CPU=-50 * MS))) == {"block_io": 1.0}


def test_small_parts_are_left_out():
    assert list(shares(explained(excess(IO=97 * MS, ON_CPU=3 * MS)))) == ["block_io"]


def test_time_outside_all_categories_has_an_unknown_cause():
    part = Excess(total_ns=100.0 * MS, ledger_ns=excess(IO=30 * MS).ledger_ns, n_steps=5)
    assert shares(explained(part)) == {"unknown": pytest.approx(0.7), "block_io": pytest.approx(0.3)}


def test_many_short_synchronise_calls_are_one_cause():
    ledger = excess(DEVICE=6 * MS, COPY=3 * MS, ON_CPU=12 * MS, IO=1 * MS).ledger_ns
    many = Excess(total_ns=22.0 * MS, ledger_ns=ledger, n_steps=10, n_syncs=2000)
    assert explained(many)[0].cause.name == "excessive_sync"
    assert explained(many)[0].share == pytest.approx(21 / 22)
    assert explained(many)[0].evidence.n_extra_syncs_per_step == 200
    few = Excess(total_ns=22.0 * MS, ledger_ns=ledger, n_steps=10, n_syncs=100)
    assert "excessive_sync" not in shares(explained(few))
    long = Excess(total_ns=2200.0 * MS, ledger_ns=100 * ledger, n_steps=10, n_syncs=2000)
    assert "excessive_sync" not in shares(explained(long))


def test_preemption_evidence_names_the_other_process_and_the_duration():
    off = layout.empty(layout.OFFCPU, 3)
    off["category"], off["pid"] = Category.PREEMPTED, 7
    off["by_pid"], off["by_comm"] = [9, 9, 7], [b"stress", b"stress", b"python"]
    off["duration_ns"] = [4 * MS, 6 * MS, 1 * MS]
    result = Excess(total_ns=10.0 * MS, ledger_ns=excess(PREEMPTED=10 * MS).ledger_ns, n_steps=1, offcpu=off)
    part = explained(result)[0]
    assert part.evidence == CauseEvidence(n_intervals=3, longest_ms=6.0, by=["stress"])
    assert "stress" in part.cause.advice(part.evidence)[0]


def test_evidence_names_the_slow_calls():
    calls = layout.empty(layout.CALLS, 3)
    calls["op"] = [Op.ALLOC, Op.FREE, Op.COPY]
    calls["symbol"], calls["duration_ns"] = [1, 2, 3], [5 * MS, 9 * MS, 50 * MS]
    result = Excess(
        total_ns=10.0 * MS,
        ledger_ns=excess(ALLOC=10 * MS).ledger_ns,
        n_steps=1,
        calls=calls,
        symbols=("", "cudaMalloc", "cudaFree", "cudaMemcpy"),
    )
    evidence = explained(result)[0].evidence
    assert evidence == CauseEvidence(n_slow_calls=2, longest_ms=9.0, functions=["cudaFree", "cudaMalloc"])


def test_blocked_evidence_lists_known_system_calls():
    off = layout.empty(layout.OFFCPU, 1)
    off["category"], off["syscall_nr"], off["duration_ns"] = Category.OTHER_OFF, 61, 5 * MS
    ledger = excess(OTHER_OFF=5 * MS).ledger_ns
    known = explained(Excess(total_ns=5.0 * MS, ledger_ns=ledger, n_steps=1, offcpu=off))[0]
    assert known.evidence.system_calls == [61]
    unknown = explained(
        Excess(total_ns=5.0 * MS, ledger_ns=ledger, n_steps=1, offcpu=off, knows_syscalls=False)
    )[0]
    assert unknown.evidence.system_calls is None
    assert known.cause.advice(known.evidence) != unknown.cause.advice(unknown.evidence)


@settings(max_examples=60)
@given(
    st.lists(st.floats(-1e9, 1e9), min_size=N_CATEGORIES, max_size=N_CATEGORIES),
    st.floats(0, 1e10),
    st.integers(0, 5000),
)
def test_shares_never_exceed_the_whole(ledger, total_ns, n_syncs):
    result = Excess(total_ns=total_ns, ledger_ns=np.array(ledger), n_steps=3, n_syncs=n_syncs)
    parts = explained(result)
    assert sum(part.share for part in parts) <= 1 + 1e-9
    assert all(part.share >= 0.05 for part in parts)
    assert [part.share for part in parts] == sorted((part.share for part in parts), reverse=True)
    assert len({part.cause.name for part in parts}) == len(parts)


def test_names_are_those_of_the_schema():
    entry = SCHEMA["$defs"]["verdict"]["properties"]["causes"]["items"]["properties"]["cause"]
    assert {cause.name for cause in all_causes()} == set(entry["enum"])


def test_every_cause_has_a_title_and_advice():
    nothing = Excess(total_ns=1.0, ledger_ns=np.zeros(N_CATEGORIES), n_steps=1)
    for cause in all_causes():
        assert cause.title and not cause.noun.startswith("because")
        assert 1 <= len(cause.advice(cause.evidence(nothing))) <= 3


@pytest.mark.parametrize(("syscall_nr", "is_told"), [(61, True), (260, True), (7, False)])
def test_a_started_program_is_distinguished_from_the_data_loader(syscall_nr, is_told):
    rows = layout.empty(layout.OFFCPU, 2)
    rows["category"], rows["syscall_nr"], rows["duration_ns"] = Category.CHILD, syscall_nr, 50 * MS
    ledger = np.zeros(N_CATEGORIES)
    ledger[Category.CHILD - 1] = 100 * MS
    (part,) = explained(Excess(total_ns=100.0 * MS, ledger_ns=ledger, n_steps=2, offcpu=rows))
    assert part.cause.name == "input_starvation"
    assert ("program that it had started" in part.state) == is_told
    assert ("num_workers" in part.cause.advice(part.evidence)[0]) != is_told


def test_time_that_the_source_does_not_record_is_not_called_blocked():
    ledger = np.zeros(N_CATEGORIES)
    ledger[Category.OTHER_OFF - 1] = 100 * MS
    excess = Excess(
        total_ns=100.0 * MS, ledger_ns=ledger, n_steps=2, knows_syscalls=False, knows_blocking=False
    )
    assert [part.cause.name for part in explained(excess)] == ["not_recorded"]
    assert [part.cause.name for part in explained(replace(excess, knows_blocking=True))] == ["blocked"]


def test_a_wait_in_flock_is_a_file_lock_with_its_path_and_holder():
    rows, samples = layout.empty(layout.OFFCPU, 2), layout.empty(layout.SAMPLES, 1)
    rows["category"], rows["syscall_nr"], rows["duration_ns"] = Category.OTHER_OFF, 73, 50 * MS
    samples["syscall_nr"], samples["n"], samples["object"] = 73, 9, b"lock on /data/idx.lock held by 7 rsync"
    ledger = np.zeros(N_CATEGORIES)
    ledger[Category.OTHER_OFF - 1] = 100 * MS
    excess = Excess(total_ns=100.0 * MS, ledger_ns=ledger, n_steps=2, offcpu=rows, samples=samples)
    (part,) = explained(excess)
    assert (part.cause.name, part.share) == ("file_lock", 1.0)
    assert part.state == "waiting for a lock on /data/idx.lock held by 7 rsync"
    rows["syscall_nr"] = 247
    assert [part.cause.name for part in explained(replace(excess, offcpu=rows))] == ["blocked"]


@pytest.mark.parametrize("has_samples", [True, False])
def test_a_save_with_cpu_bound_serialisation_is_a_checkpoint(has_samples):
    save = ("fsync+0x1 (libc.so.6)", "/job/train.py:12 save_checkpoint", "/job/train.py:90 main")
    rows, samples = layout.empty(layout.OFFCPU, 1), layout.empty(layout.SAMPLES, int(has_samples))
    rows["category"], rows["syscall_nr"], rows["duration_ns"], rows["stack"] = Category.IO, 74, 40 * MS, 3
    samples["category"], samples["n"], samples["stack"] = Category.ON_CPU, 12, 3
    ledger = np.zeros(N_CATEGORIES)
    ledger[Category.IO - 1], ledger[Category.ON_CPU - 1] = 40 * MS, 60 * MS
    excess = Excess(
        total_ns=100.0 * MS, ledger_ns=ledger, n_steps=1, offcpu=rows, samples=samples, stacks={3: save}
    )
    (part,) = explained(excess)
    assert part.cause.name == "checkpoint"
    assert (part.evidence.serialise_ms, part.evidence.write_ms) == (60.0, 40.0)
    names = {part.cause.name for part in explained(replace(excess, stacks={3: ("/job/train.py:7 read",)}))}
    assert names == {"block_io", "host_compute"}
