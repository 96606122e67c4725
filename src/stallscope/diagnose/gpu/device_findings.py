"""Findings from GPU times: slow GPUs, a stage with more work, late steps that move between GPUs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from stallscope.diagnose.cost.absorption import absorption
from stallscope.diagnose.gpu.even_work import longer_ns
from stallscope.diagnose.gpu.gpu_clock import GpuTime, gpu_time
from stallscope.diagnose.gpu.hot_calls import has_hot_calls
from stallscope.diagnose.gpu.slow_gpu import (
    DeviceExcess,
    SlowDevice,
    device_excess,
    late_devices,
    min_device_ns,
    released_late,
    slow_at_even_work,
    slow_devices,
    steadily_slow_devices,
    without_overlap,
)
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.period import period_steps
from stallscope.diagnose.lateness.uneven_work import MovingLateness, SlowStage, moving, slow_stage
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.excess import excess_ns
from stallscope.diagnose.timeline.timeline import NO_WAIT_NS, Timeline
from stallscope.events.layout import Array

_SAME_STEPS = 0.8  # share of a GPU's late steps in which the other GPU must be late
_AS_LONG = 0.5  # share of a GPU's typical excess from which the work of another GPU is as long
_MIN_ELSEWHERE = 3  # steps in which other GPUs work as long
_MAX_GAP_STEPS = 3  # steps between the slow stretches of two GPUs from one to which work moves to the other
_VICTIM = 0.5  # share of the other GPU's excess up to which a GPU is its victim


@dataclass(frozen=True)
class DeviceFindings:
    """slow: GPUs by process. more_work: GPUs that do additional work in some steps. stage: a stage whose GPUs have more
    work. uneven: late steps that move between GPUs. differing: GPUs that are slower by a small share of a step, as GPUs
    of a model differ. often_last: GPUs among uneven work that are slow, or have more work in most steps.
    """

    slow: dict[int, SlowDevice] = field(default_factory=dict)
    stage: SlowStage | None = None
    uneven: MovingLateness | None = None
    more_work: dict[int, SlowDevice] = field(default_factory=dict)
    differing: dict[int, SlowDevice] = field(default_factory=dict)
    often_last: dict[int, SlowDevice] = field(default_factory=dict)


def on_device(case: Case, late_steps: list[LateStep]) -> DeviceFindings:
    """The findings from the GPUs' own times; without such times, slow GPUs from the releases of their ranks.

    late_steps: of the hosts, which are not evidence about the GPUs.
    """
    timeline, table, limits = case.timeline, case.judged, case.limits
    times = gpu_time(timeline)
    if times is None:
        return DeviceFindings(
            released_late(timeline, table, clocks=case.clocks, step_ns=case.step_ns, limits=limits)
        )
    host_excess_ns = excess_ns(timeline, case.programs, timeline.host_ns)
    more = device_excess(timeline, case.programs, table, times, host_excess_ns=host_excess_ns)
    late = late_devices(table, more, usual=case.pace, limits=limits, host_late_steps=late_steps)
    slow = slow_devices(table, more, late, usual=case.pace, limits=limits, host_late_steps=late_steps)
    if len(slow) > 1:
        connected = _connected(timeline)
        slow = {
            process: device for process, device in slow.items() if not _is_victim(connected, process, slow)
        }
    if limits.steady_noise_factor * more.noise_ns > min_device_ns(case.pace, limits):
        slow = {
            process: device
            for process, device in slow.items()
            if not (_moves(process, device, late) and _is_hot(case, process, device, times, more))
        }
    differing = {process: device for process, device in slow.items() if _is_by_manufacture(case, device)}
    slow = {process: device for process, device in slow.items() if process not in differing}
    at_times = {process: device for process, device in slow.items() if device.is_at_times}
    slow = {process: device for process, device in slow.items() if process not in at_times}
    often_last = {process: device for process, device in slow.items() if _is_followed(process, slow)}
    slow = {process: device for process, device in slow.items() if process not in often_last}
    if not slow and not often_last:
        steadily = steadily_slow_devices(
            table, more, usual=case.pace, limits=limits, host_late_steps=late_steps
        )
        often_last = steadily | at_times
    if not slow and case.pace.noise_ns >= min_device_ns(case.pace, limits):
        longer = longer_ns(table, more.own_ns, case.programs.program, limits)
        even = slow_at_even_work(table, more, longer, limits=limits, host_late_steps=late_steps)
        slow = {process: device for process, device in even.items() if not device.is_at_times}
        differing = {process: device for process, device in differing.items() if process not in even}
        often_last = {
            process: device for process, device in (even | often_last).items() if process not in slow
        }
    stage = slow_stage(
        timeline,
        case.programs,
        table,
        step_ns=case.step_ns,
        limits=limits,
        wait_ns=times.held_ns,
        own_ns=times.own_ns,
    )
    named = {process: device.late for process, device in [*slow.items(), *differing.items()]}
    min_ns = min_device_ns(case.pace, limits)
    return DeviceFindings(
        slow=slow,
        stage=stage,
        uneven=moving(
            timeline,
            without_overlap(table, more, late, usual=case.pace, limits=limits),
            named,
            table=table,
            min_ns=min_ns,
            limits=limits,
        ),
        differing=differing,
        often_last=often_last,
    )


def _is_followed(process: int, slow: Mapping[int, SlowDevice]) -> bool:
    """Whether another GPU becomes slow where this GPU is no longer slow, or the reverse, by a similar amount.

    Work moves from GPU to GPU like this (a hot expert).
    """
    first, last = _stretch(slow[process])
    for other, device in slow.items():
        begin, end = _stretch(device)
        gap = max(begin - last, first - end)
        sizes = sorted((slow[process].typical_ns, device.typical_ns))
        if other != process and 0 < gap <= _MAX_GAP_STEPS and sizes[0] >= _AS_LONG * sizes[1]:
            return True
    return False


def _stretch(device: SlowDevice) -> tuple[int, int]:
    steps = [late.step for late in device.late]
    return min(steps), max(steps)


def _moves(process: int, device: SlowDevice, late: list[LateStep]) -> bool:
    """Whether other GPUs work as long in other steps: a hot expert moves, while another program on a GPU stays."""
    own_steps = {step.step for step in device.late}
    typical_ns = device.typical_ns
    elsewhere = {
        step.step
        for step in late
        if step.process != process and step.step not in own_steps and step.excess_ns >= _AS_LONG * typical_ns
    }
    return len(elsewhere) >= _MIN_ELSEWHERE


def _is_hot(case: Case, process: int, device: SlowDevice, times: GpuTime, more: DeviceExcess) -> bool:
    """Whether a GPU of a job with uneven work has more work at times, rather than being slow."""
    steps = np.array([late.step for late in device.late], np.int64)
    own_ns = np.where(times.known, times.own_ns, 0.0)
    return has_hot_calls(
        case.timeline, case.programs, process, steps, own_ns=own_ns, excess_ns=more.by_row_ns
    )


def _is_by_manufacture(case: Case, device: SlowDevice) -> bool:
    """Whether a GPU is slower by a small share of its late steps: GPUs of a model differ that much, and their speed
    drifts around the threshold of a late step. The late steps may be of a longer kind than most steps.
    """
    table, rows = case.table, np.array([late.first_row for late in device.late], np.int64)
    late_cells = np.searchsorted(table.first_row, rows)
    late_cells = late_cells[late_cells + 1 < len(table.step)]
    late_cells = late_cells[table.process[late_cells] == table.process[late_cells + 1]]
    begin_ns = case.timeline.ts_ns[table.first_row]
    length_ns = np.append(begin_ns[late_cells + 1] - begin_ns[late_cells], case.step_ns)
    return device.typical_ns < case.limits.late_step_share * max(case.step_ns, float(np.median(length_ns)))


def _is_victim(connected: Array, process: int, slow: Mapping[int, SlowDevice]) -> bool:
    """Whether a GPU is late in the steps of a far slower GPU to which its smaller groups lead, over any number of
    other GPUs.

    Part of a wait for a partner counts as the GPU's own work: a transfer to a third rank waits for it on the stream.
    The partner may itself wait for the slower GPU, without being late. connected: see _connected().
    """
    own = {late.step: late.excess_ns for late in slow[process].late}
    for other, device in slow.items():
        if other == process or connected[other] != connected[process]:
            continue
        of_other = {late.step: late.excess_ns for late in device.late}
        shared = own.keys() & of_other.keys()
        is_far_less = sum(own[step] for step in shared) <= _VICTIM * sum(of_other[step] for step in shared)
        if len(shared) >= _SAME_STEPS * len(own) and is_far_less:
            return True
    return False


def _connected(timeline: Timeline) -> Array:
    """By process, the smallest process to which groups smaller than the job lead: int64 (p,)."""
    calls, label = timeline.calls, np.arange(timeline.n_processes)
    small = timeline.n_members[calls.comm] < timeline.n_processes
    process, comm = calls.process[small], calls.comm[small]
    while True:
        of_comm = np.full(len(timeline.n_members), timeline.n_processes)
        np.minimum.at(of_comm, comm, label[process])
        lower = label.copy()
        np.minimum.at(lower, process, of_comm[comm])
        if (lower == label).all():
            return label
        label = lower


def with_costly_gpus(case: Case, gpus: DeviceFindings) -> DeviceFindings:
    """The slow GPUs that make steps last longer; GPUs that work longer every k-th step have more work instead."""
    late = {process: device.late for process, device in (gpus.slow | gpus.often_last).items()}
    harmless = absorption(case, late, is_exact=False).proved
    costly = {process: device for process, device in gpus.slow.items() if process not in harmless}
    more_work = {
        process: device for process, device in costly.items() if _has_more_work(case, process, device)
    }
    slow = {process: device for process, device in costly.items() if process not in more_work}
    often_last = {process: device for process, device in gpus.often_last.items() if process not in harmless}
    return replace(gpus, slow=slow, more_work=more_work, often_last=often_last)


def _has_more_work(case: Case, process: int, device: SlowDevice) -> bool:
    """Whether a GPU is late every k-th step only, with k above 1: typical of evaluations, not of low clocks.

    In a job whose steps alternate (two models), a slow GPU is late in the longer kind of step. Where the host waits in
    every k-th step, the lateness shows in these steps.
    """
    steps = np.array([step.step for step in device.late], np.int64)
    period = period_steps(steps, np.array([step.excess_ns for step in device.late]))
    if period is None or period <= 1 or device.is_kind_of_step:
        return False
    table = case.judged
    here = (table.process == process) & (table.step >= steps.min()) & (table.step <= steps.max())
    n_waits = int(np.count_nonzero(table.wait_ns[here] > NO_WAIT_NS))
    return len(steps) < _SAME_STEPS * n_waits
