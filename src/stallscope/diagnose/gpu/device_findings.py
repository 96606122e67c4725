"""What the GPUs' side shows of a case: slow GPUs, a stage with more work, late steps that no GPU owns."""

from dataclasses import dataclass, field, replace

import numpy as np

from stallscope.diagnose.cost.absorption import absorption
from stallscope.diagnose.gpu.gpu_clock import gpu_time
from stallscope.diagnose.gpu.slow_gpu import (
    SlowDevice,
    device_excess,
    late_devices,
    least_device_ns,
    released_late,
    slow_devices,
)
from stallscope.diagnose.lateness.imbalance import Moving, SlowStage, moving, slow_stage
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.period import period_steps
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.excess import excess_ns


@dataclass(frozen=True)
class OnDevice:
    """slow: GPUs by process. more_work: GPUs that do additional work in some steps. stage: a stage whose GPUs have more
    work. uneven: late steps that no GPU owns.
    """

    slow: dict[int, SlowDevice] = field(default_factory=dict)
    stage: SlowStage | None = None
    uneven: Moving | None = None
    more_work: dict[int, SlowDevice] = field(default_factory=dict)


def on_device(case: Case, found: list[LateStep]) -> OnDevice:
    """By the GPUs' own times; without such times, slow GPUs by when their ranks are released.

    found: late steps of the hosts, which say nothing of the GPUs.
    """
    line, table, limits = case.line, case.judged, case.limits
    times = gpu_time(line)
    if times is None:
        return OnDevice(
            released_late(line, table, case.met, clocks=case.clocks, step_ns=case.step_ns, limits=limits)
        )
    host_excess_ns = excess_ns(line, case.plan, line.host_ns)
    more = device_excess(line, case.plan, table, times, host_excess_ns=host_excess_ns)
    late = late_devices(table, more, usual=case.pace, limits=limits, found=found)
    slow = slow_devices(table, more, late, usual=case.pace, limits=limits, found=found)
    stage = slow_stage(
        line,
        case.plan,
        table,
        step_ns=case.step_ns,
        limits=limits,
        wait_ns=times.held_ns,
        own_ns=times.own_ns,
    )
    named = {process: one.late for process, one in slow.items()}
    least_ns = least_device_ns(case.pace, limits)
    return OnDevice(slow, stage, moving(line, late, named, table=table, least_ns=least_ns, limits=limits))


def with_costly_gpus(case: Case, gpus: OnDevice) -> OnDevice:
    """The slow GPUs whose slowness makes steps last longer; those that work longer every k-th step have more work."""
    late = {process: one.late for process, one in gpus.slow.items()}
    harmless = absorption(case, late).proved
    costly = {process: one for process, one in gpus.slow.items() if process not in harmless}
    more_work = {process: one for process, one in costly.items() if _is_periodic(one.late)}
    slow = {process: one for process, one in costly.items() if process not in more_work}
    return replace(gpus, slow=slow, more_work=more_work)


def _is_periodic(late: list[LateStep]) -> bool:
    """Whether a GPU is late every k-th step, k above 1: as evaluations are, and clocks are not."""
    steps = np.array([one.step for one in late], np.int64)
    period = period_steps(steps, np.array([one.excess_ns for one in late]))
    return period is not None and period > 1
