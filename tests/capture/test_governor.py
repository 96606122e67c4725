"""Probes on high-frequency functions are on for the share of the time that their budget allows."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from stallscope.capture.probes import elf, operations
from stallscope.capture.probes.governor import (
    SCHEDULER_TIMES,
    Count,
    Governor,
    Group,
    exceeds_budget,
    off_until_ns,
)
from stallscope.capture.probes.maps import Entries
from stallscope.capture.probes.operations import SYMBOLS, Hook
from stallscope.capture.probes.program import Program
from stallscope.capture.probes.redundant import Redundant
from stallscope.capture.rows.call_statistics import CallSums
from stallscope.events import kernel
from stallscope.events.kernel import HookGroup
from stallscope.events.layout import Array

from ..patience import until
from .test_cuda_calls import PREPARE, library  # noqa: F401 (the fixture)

SECOND_NS = 10**9
THREAD, OTHER = (7, 8), (7, 9)
BUDGET = 0.005
WAY_NS, TIMES_WAY = 50, 20.0
"""A hook with its return costs a microsecond."""


def spending(hits: dict[tuple[int, int], int], *, way_ns: int = WAY_NS, inside_ns: int = 0) -> Group:
    """A group that has been on for a second, in which its probes were hit this many times."""
    group = Group(period_ns=0)
    group.add_counts(dict.fromkeys(hits, Count()), 0, cost_ratio=TIMES_WAY)
    now = {thread: Count(n * way_ns, inside_ns) for thread, n in hits.items()}
    group.add_counts(now, SECOND_NS, cost_ratio=TIMES_WAY)
    return group


def test_the_threads_of_the_busiest_process_count_and_a_hit_without_its_return_costs_half():
    group = spending({THREAD: 2 * 3000, OTHER: 2 * 1000, (9, 9): 2 * 3500})
    assert group.spent == 4000 * 1000
    assert group.load(SECOND_NS) == pytest.approx(0.004)


def test_scheduler_programs_are_charged_to_the_budget():
    group = Group(period_ns=0)
    group.add_counts({THREAD: Count()}, 0, cost_ratio=TIMES_WAY)
    group.add_counts(
        {THREAD: Count(2 * 1000 * WAY_NS, scheduler_ns=500_000)}, SECOND_NS, cost_ratio=TIMES_WAY
    )
    assert group.spent == 1000 * 1000 + 500_000 * SCHEDULER_TIMES


def test_a_high_probe_entry_cost_uses_up_the_budget_sooner():
    """As in a process whose other work replaces the cache contents between its calls."""
    assert not exceeds_budget(HookGroup.HOT, spending({THREAD: 2 * 4000}), BUDGET)
    assert exceeds_budget(HookGroup.HOT, spending({THREAD: 2 * 4000}, way_ns=7 * WAY_NS), BUDGET)


def test_probes_below_the_budget_stay_on():
    group = spending({THREAD: 2 * 4000})
    assert not exceeds_budget(HookGroup.HOT, group, BUDGET)


def test_probes_over_budget_stay_off_until_the_overrun_is_repaid():
    group = spending({THREAD: 2 * 200_000})
    assert exceeds_budget(HookGroup.HOT, group, BUDGET)
    assert off_until_ns(group, BUDGET) == group.spent / BUDGET == 40 * SECOND_NS


def test_the_first_period_is_shorter_than_later_periods():
    group = spending({THREAD: 2 * 8000})
    assert exceeds_budget(HookGroup.HOT, group, BUDGET)
    group = Group()
    lengths_s = []
    for _ in range(5):
        lengths_s.append(group.length_ns // SECOND_NS)
        group.begin_period(0)
    assert lengths_s == [1, 2, 2, 2, 2]


def test_copies_that_take_much_of_the_time_stay_on():
    little = spending({THREAD: 2 * 6000}, inside_ns=SECOND_NS // 100)
    much = spending({THREAD: 2 * 6000}, inside_ns=SECOND_NS // 5)
    assert exceeds_budget(HookGroup.COPIES, little, BUDGET)
    assert not exceeds_budget(HookGroup.COPIES, much, BUDGET)
    assert exceeds_budget(HookGroup.HOT, much, BUDGET)


def test_short_copies_with_expensive_probes_are_limited_by_the_budget():
    """Copies as in a DDP job of small layers: a hundred per step, 5 us each, within one GPU."""
    short = spending({THREAD: 2 * 10_000}, inside_ns=SECOND_NS // 20)
    assert exceeds_budget(HookGroup.COPIES, short, BUDGET)


def test_counters_are_reset_when_a_thread_reuses_a_slot():
    group = spending({THREAD: 2 * 1000})
    group.add_counts({OTHER: Count(2 * 500 * WAY_NS)}, 2 * SECOND_NS, cost_ratio=TIMES_WAY)
    assert group.spent == 500 * 1000


def test_how_long_a_group_was_on_is_known():
    group = Group(on_since_ns=100)
    group.record_switch(150, is_on=False)
    assert group.total_on_ns(170) == 50
    group.record_switch(200, is_on=True)
    assert group.total_on_ns(230) == 80


def test_a_new_process_is_counted_from_its_start_whatever_others_have_cost():
    program = cast("Program", SimpleNamespace(mode="session"))
    governor = Governor(program, BUDGET, TIMES_WAY, clock_ns=lambda: 5 * SECOND_NS)
    state = governor.groups[HookGroup.COPIES]
    state.record_switch(5 * SECOND_NS, is_on=False)
    state.next_on_ns = 60 * SECOND_NS
    governor.renew()
    assert state.next_on_ns <= 5 * SECOND_NS


def test_the_counts_of_a_new_process_are_not_scaled_by_the_time_before_its_start():
    now_ns = [0]
    governor = Governor(
        cast("Program", SimpleNamespace(mode="session")), BUDGET, TIMES_WAY, clock_ns=lambda: now_ns[0]
    )
    hot = governor.groups[HookGroup.HOT]
    hot.record_switch(SECOND_NS, is_on=False)
    assert governor.probed_interval(HookGroup.HOT, SECOND_NS) == (SECOND_NS, SECOND_NS)
    governor.renew()
    hot.record_switch(9 * SECOND_NS, is_on=True)
    assert governor.probed_interval(HookGroup.HOT, 9 * SECOND_NS) is None
    assert governor.probed_interval(HookGroup.HOT, 10 * SECOND_NS) == (SECOND_NS, SECOND_NS)


@pytest.fixture(scope="module")
def by_group(library: Path) -> dict[HookGroup, list[Hook]]:  # noqa: F811
    """Hooks of each governed group."""
    with elf.open_image(library) as image:
        exported = elf.exported_functions(image, operations.names(groups=HookGroup))
    indexes = {name: symbol.offset for name, symbol in exported.items()}
    return {group: operations.hooks(indexes, groups=(group,)) for group in operations.GOVERNED}


@pytest.fixture(scope="module")
def hooks(library: Path) -> list[Hook]:  # noqa: F811
    """The groups that no governor switches."""
    with elf.open_image(library) as image:
        exported = elf.exported_functions(image, operations.names(groups=(HookGroup.ALWAYS,)))
    return operations.hooks({n: s.offset for n, s in exported.items()}, groups=(HookGroup.ALWAYS,))


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_a_storm_of_launches_is_counted_while_hooks_are_on_and_estimated_beyond(
    tracing: Callable[..., Program],
    puppet,
    library: Path,  # noqa: F811
    by_group: dict[HookGroup, list[Hook]],
):
    program = tracing()
    governor = Governor(program, BUDGET, TIMES_WAY)
    tallies = CallSums(0, program.operations, program.balances, governor, own_pid=os.getpid())
    with elf.open_image(library) as image:
        governor.add(image.key, image.path, by_group)
    puppet.does(*PREPARE, "lib.storm(300)")
    governor.govern()
    assert governor.groups[HookGroup.HOT].is_on
    (row,) = launches(tallies)
    assert (row["n"], row["n_seen"], row["is_estimate"]) == (300, 300, 0)
    puppet.does("lib.storm(100000)")
    governor.govern()
    hot = governor.groups[HookGroup.HOT]
    assert not hot.is_on and hot.is_cycling
    assert any("estimates" in note for note in governor.notes())
    puppet.does("lib.storm(50000)")
    assert len(program.operations().keys)
    (row,) = launches(tallies)
    assert row["n_seen"] == 100_000 == sum(json.loads(row["histogram"]).values())
    hot.next_on_ns = 0
    governor.govern()
    assert hot.is_on
    assert not len(launches(tallies))
    puppet.does("lib.storm(2000)")
    governor.stop()
    (row,) = launches(tallies)
    assert row["n_seen"] == 2000
    assert row["is_estimate"] and row["n"] > 2000
    assert program.losses()["lost_operation"] == program.losses()["lost_call"] == 0


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_few_hits_are_not_looked_at_by_thread_and_count_later(
    tracing: Callable[..., Program],
    puppet,
    library: Path,  # noqa: F811
    by_group: dict[HookGroup, list[Hook]],
    monkeypatch: pytest.MonkeyPatch,
):
    looks: list[int] = []
    add_counts = Group.add_counts
    monkeypatch.setattr(
        Group, "add_counts", lambda *args, **kwargs: looks.append(1) or add_counts(*args, **kwargs)
    )
    program, clock = tracing(), iter(range(SECOND_NS, 1 << 62, SECOND_NS // 10))
    governor = Governor(program, BUDGET, TIMES_WAY, clock_ns=clock.__next__)
    with elf.open_image(library) as image:
        governor.add(image.key, image.path, by_group)
    puppet.does(*PREPARE, "lib.storm(10)")
    governor.govern()
    assert program.entry_costs_ns()[HookGroup.HOT] > 0
    assert not looks
    puppet.does("lib.storm(1000)")
    governor.govern()
    assert governor.groups[HookGroup.HOT].spent == program.entry_costs_ns()[HookGroup.HOT] / 2 * TIMES_WAY
    governor.stop()


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
@pytest.mark.parametrize("n_frees, is_on", [(0, True), (20_000, False)])
def test_permanently_attached_probes_are_charged_to_the_budget(
    tracing: Callable[..., Program],
    puppet,
    library: Path,  # noqa: F811
    hooks: list[Hook],
    by_group: dict[HookGroup, list[Hook]],
    n_frees: int,
    is_on: bool,
):
    program, clock = tracing(), iter(range(SECOND_NS, 1 << 62, SECOND_NS))
    governor = Governor(program, BUDGET, TIMES_WAY, clock_ns=clock.__next__)
    with elf.open_image(library) as image:
        program.attach(image.path, hooks)
        governor.add(image.key, image.path, by_group)
    puppet.does(*PREPARE, f"[lib.cudaFree(P(0)) for _ in range({n_frees})]", "lib.storm(2000)")
    governor.cost_ratio = (
        2 * BUDGET * SECOND_NS / 2 / program.entry_costs_ns()[HookGroup.HOT]
    )  # half of the budget
    governor.govern()
    governor.stop()
    assert governor.groups[HookGroup.HOT].is_on is is_on


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_a_ring_that_fills_raises_the_thresholds(tracing: Callable[..., Program], puppet):
    program = tracing(ring_bytes=1 << 16, slow_call_ns=1)
    governor = Governor(program, BUDGET, TIMES_WAY)
    puppet.does(*PREPARE, "[lib.cudaFree(P(0)) for _ in range(1000)]")
    assert program.events.fill() > 0.5
    for _ in range(3):
        governor.govern()
    assert any("2 times" in note for note in governor.notes())
    lost, output = program.losses()["lost_call"], len(program.events.drain())
    for _ in range(150):
        governor.govern()
    assert any("threshold of slow calls is back to its default" in note for note in governor.notes())
    calls = program.operations()
    assert calls.values["n"].sum() == 1000 and lost > 0
    assert output + lost >= 1000


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_without_a_budget_hot_functions_are_not_hooked(
    tracing: Callable[..., Program],
    puppet,
    library: Path,  # noqa: F811
    by_group: dict[HookGroup, list[Hook]],
):
    program = tracing()
    governor = Governor(program, 0, TIMES_WAY)
    with elf.open_image(library) as image:
        governor.add(image.key, image.path, by_group)
    puppet.does(*PREPARE, "lib.storm(100); lib.cudaMemcpyAsync(P(1), P(2), Z(8), 1, P(0))")
    governor.govern()
    governor.stop()
    result = program.operations()
    assert [SYMBOLS[symbol] for symbol in result.keys["symbol"]] == ["cudaMemcpyAsync"]


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_the_way_in_is_longer_after_other_work(tracing: Callable[..., Program], puppet):
    program, alone_ns, after_work_ns = tracing(), [], []
    puppet.does(*PREPARE, "lib.cudaFree(P(0))", "other = ctypes.create_string_buffer(8 << 20)")
    for _ in range(3):  # a busy machine disturbs some of the measurements
        for ways_ns, work in (alone_ns, ""), (after_work_ns, "ctypes.memset(other, 1, len(other)); "):
            before_ns = program.entry_costs_ns()[HookGroup.ALWAYS]
            puppet.does(f"for _ in range(100): {work}lib.cudaFree(P(0))")
            ways_ns.append(program.entry_costs_ns()[HookGroup.ALWAYS] - before_ns)
    assert min(after_work_ns) > 1.2 * min(alone_ns) > 0


@pytest.fixture
def governed(
    tracing: Callable[..., Program],
    library: Path,  # noqa: F811
    by_group: dict[HookGroup, list[Hook]],
) -> tuple[Program, Governor]:
    """A program, and a governor in whose clock a second passes between two readings."""
    program = tracing()
    clock = iter(range(SECOND_NS, 1 << 62, SECOND_NS))
    governor = Governor(program, BUDGET, TIMES_WAY, clock_ns=clock.__next__)
    with elf.open_image(library) as image:
        governor.add(image.key, image.path, by_group)
    return program, governor


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_runtime_waits_are_counted_in_the_driver_while_each_contains_a_driver_call(
    puppet, governed: tuple[Program, Governor]
):
    program, governor = governed
    puppet.does(*PREPARE)
    for n in 10, 1000, 1000:
        puppet.does(f"lib.waits({n})")
        governor.govern()
    counts = n_waits(program)
    assert counts == {"cudaStreamSynchronize": 2010}
    puppet.does("lib.waits(500)")
    assert n_waits(program) == counts | {"cuStreamSynchronize": 500}
    governor.renew()
    governor.govern()
    puppet.does("lib.waits(500)")
    assert n_waits(program) == {"cudaStreamSynchronize": 2510, "cuStreamSynchronize": 500}
    governor.stop()


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_a_runtime_wait_that_is_open_when_its_probes_are_dropped_ends_with_its_return(
    puppet, governed: tuple[Program, Governor]
):
    """The thread makes no other CUDA call, which would end the wait as well."""
    program, governor = governed
    begin, end = os.pipe()
    puppet.does(*PREPARE)
    for n in 10, 1000:
        puppet.does(f"lib.waits({n})")
        governor.govern()
    puppet.does("lib.waits(1000)", "import os", "blocked_by = ctypes.c_int.in_dll(lib, 'blocked_by')")
    puppet.does(f"blocked_by.value = os.open('/proc/{os.getpid()}/fd/{begin}', os.O_RDONLY)")
    puppet.tell("lib.cudaStreamSynchronize(P(0))")
    until(lambda: is_waiting(program))
    governor.govern()
    assert HookGroup.RUNTIME_WAITS in governor._off
    os.write(end, b"x")
    assert puppet.process.stdout.readline() == "done\n"
    until(lambda: not is_waiting(program))
    governor.govern()
    puppet.does("lib.waits(5)")
    assert n_waits(program) == {"cudaStreamSynchronize": 2011, "cuStreamSynchronize": 5}
    governor.stop()
    os.close(begin), os.close(end)


def is_waiting(program: Program) -> bool:
    """Whether a thread of the traced process is in a synchronise call."""
    (row,) = program.process_rows().values
    return bool((row["slots"]["call"] != 0).any())


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_a_runtime_wait_without_a_driver_call_keeps_the_probes(puppet, governed: tuple[Program, Governor]):
    program, governor = governed
    puppet.does(*PREPARE, "lib.waits(10)")
    governor.govern()
    for _ in range(3):
        puppet.does("lib.waits(1000)", "lib.cudaEventSynchronize(P(1))")
        governor.govern()
    assert n_waits(program) == {"cudaStreamSynchronize": 3010, "cudaEventSynchronize": 3}
    governor.stop()


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.compiler
def test_waits_that_exceed_the_budget_are_sampled_in_a_process_without_peers(
    puppet, governed: tuple[Program, Governor]
):
    """The counts are estimates then, and the program has no open call while the probes are off."""
    program, governor = governed
    puppet.does(*PREPARE)
    governor.cost_ratio = 1e6
    state, n_all = governor.groups[HookGroup.WAITS], 0
    while state.is_on:
        puppet.does("lib.waits(1000)")
        n_all += 1000
        governor.govern()
    assert sum(n_waits(program).values()) == n_all
    assert not governor.unprobed_waits.are_probed
    assert not program.process_rows().values["slots"]["class_op"].any()
    puppet.does("lib.waits(1000)")
    assert sum(n_waits(program).values()) == n_all
    state.next_on_ns = 0
    while not state.is_on:
        governor.govern()
    assert governor.unprobed_waits.are_probed
    puppet.does("lib.waits(10)")
    assert sum(n_waits(program).values()) == n_all + 10
    governor.stop()


@pytest.mark.parametrize(
    "n_bare, uses_nccl, expected",
    [
        (0, 0, {HookGroup.RUNTIME_WAITS, HookGroup.GRAPH_LAUNCHES}),
        (0, 1, {HookGroup.RUNTIME_WAITS}),
        (1, 0, {HookGroup.GRAPH_LAUNCHES}),
    ],
)
def test_probes_without_reports_of_their_own_are_redundant(
    n_bare: int, uses_nccl: int, expected: set[HookGroup]
):
    rows = np.zeros(1, kernel.PROCESS)
    rows["uses_nccl"] = uses_nccl
    processes = Entries(np.array([7], np.uint32), rows)
    redundant = Redundant(since_ns=0)
    assert redundant.groups(processes, SECOND_NS // 2) == set()
    redundant.groups(processes, SECOND_NS)
    rows["slots"]["n_contained"][0, 2], rows["slots"]["n_bare"][0, 3] = 1000, n_bare
    assert redundant.groups(processes, 2 * SECOND_NS) == expected
    rows["slots"]["n_contained"][0, 2] += 10
    assert HookGroup.RUNTIME_WAITS not in redundant.groups(processes, 3 * SECOND_NS)


def n_waits(program: Program) -> dict[str, int]:
    """Number of synchronise calls by function."""
    entries = program.operations()
    names = [SYMBOLS[symbol] for symbol in entries.keys["symbol"]]
    counts = dict(zip(names, entries.values["n"].tolist(), strict=True))
    return {name: n for name, n in counts.items() if "Synchronize" in name}


def launches(tallies: CallSums) -> Array:
    (_, rows), _ = tallies.rows(time.monotonic_ns())
    return rows[np.array([SYMBOLS[symbol] == "cudaLaunchKernel" for symbol in rows["symbol"]], bool)]
