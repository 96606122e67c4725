"""Named faults of one process. Constant faults are named as well: no faster period is needed for comparison.

Each fault has its share of the wall clock, the largest gain if it were removed, the line of code and the next action.
A fault on the host cannot cost more than the share in which the GPU was idle, if that share is known.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from stallscope.diagnose.processes import gpu_faults, host_faults
from stallscope.diagnose.processes.activity import Z_80, Activity
from stallscope.diagnose.processes.buckets import buckets
from stallscope.diagnose.processes.code_locations import function
from stallscope.diagnose.processes.fault import Case, Fault
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.trace import Trace

_RULES: tuple[Callable[[Case], Fault | None], ...] = (
    host_faults.input_starvation,
    host_faults.child_program,
    host_faults.full_pipe,
    host_faults.file_lock,
    host_faults.recompilation,
    host_faults.checkpoint,
    host_faults.interpreter_lock,
    host_faults.thread_lock,
    host_faults.disk,
    host_faults.network,
    host_faults.page_faults,
    host_faults.preemption,
    host_faults.stopped,
    host_faults.sleep,
    gpu_faults.driver,
    gpu_faults.allocation,
    gpu_faults.pageable_copies,
    gpu_faults.copies,
    gpu_faults.excessive_syncs,
    gpu_faults.launch_bound,
    gpu_faults.compute,
    gpu_faults.throttled,
    gpu_faults.shared_gpu,
    gpu_faults.low_utilisation,
)


@dataclass(frozen=True)
class Candidate:
    """A fault, and the 80 % interval of the share that the process could save."""

    fault: Fault
    at_least: float
    at_most: float


@dataclass(frozen=True)
class Faults:
    """named: faults that certainly cost enough, the largest first. uncertain: faults that may cost enough."""

    named: list[Fault]
    uncertain: list[Candidate]


def faults(trace: Trace, activity: Activity, limits: Thresholds) -> Faults:
    """The faults of a process that cost at least limits.fault_share, or limits.wait_share.

    The lower end of the interval of a share must reach the limit: a short time, few samples and a GPU that may be busy
    make it lower. The limit applies to the share of the time in which the thread did not wait for a CPU, so that other
    programs do not hide a fault. The share of a named fault contains the waits for a CPU at its lines, since they would
    end with the fault.
    """
    case = Case(trace, activity, buckets(activity), limits)
    named, uncertain = [], []
    for rule in _RULES:
        if (fault := rule(case)) is None:
            continue
        error, limit = _error(case, fault), _min_share(fault, activity, limits)
        limit *= 1 - (activity.budget["preempted"] if fault.cause not in _OF_CPU else 0.0)
        at_least = fault.lost_at_least(activity, error)
        if at_least >= limit:
            named.append(_Named(fault, error, *_cpu_waits(case, fault)))
        elif fault.lost(activity) >= limit:
            uncertain.append(Candidate(fault, at_least, min(fault.lost(activity) + Z_80 * error, 1.0)))
    named = [each for each in named if each.fault.cause != "low_utilisation"] or named
    return Faults(_ranked(named, limits), sorted(uncertain, key=lambda each: -each.at_most))


class _Named(NamedTuple):
    """A fault, the standard error of its share, and the share and variance of the waits for a CPU at its lines."""

    fault: Fault
    error: float
    cpu_waits: float
    variance: float

    @property
    def whole(self) -> float:
        return self.fault.share + self.cpu_waits

    @property
    def at_most(self) -> float:
        return float(self.whole + Z_80 * (self.error**2 + self.variance) ** 0.5)


def _ranked(named: list[_Named], limits: Thresholds) -> list[Fault]:
    """The faults by their share, the largest first.

    The waits for a CPU come before a fault that they delay only if their share is certainly larger than the fault with
    these waits. Otherwise they are a part of the fault, so that each second counts once.
    """
    of_cpu = next((each for each in named if each.fault.cause in _OF_CPU), None)
    at_least = of_cpu.fault.share - Z_80 * of_cpu.error if of_cpu else 0.0
    by = of_cpu.fault.evidence.by if of_cpu else None
    faults, left = [], of_cpu.fault.share if of_cpu else 0.0
    for each in named:
        if each is of_cpu:
            continue
        fault = each.fault
        if each.cpu_waits >= _MIN_CPU_WAITS and each.at_most >= at_least:
            facts = replace(fault.evidence, cpu_wait=round(each.cpu_waits, 3), by=by)
            fault = replace(fault, share=min(each.whole, 1.0), evidence=facts)
            left -= each.cpu_waits
        faults.append(fault)
    if of_cpu and left >= limits.fault_share:
        faults.append(replace(of_cpu.fault, share=left))
    return sorted(faults, key=lambda fault: -fault.share)


_OF_CPU = frozenset(("cpu_preemption", "cpu_quota"))
_WITHOUT_CPU_WAITS = _OF_CPU | {"host_compute", "low_utilisation"}
"""Necessary computation also waits for a CPU: then the competition for the CPU is the fault, not the computation."""

_MIN_CPU_WAITS = 0.01


def _cpu_waits(case: Case, fault: Fault) -> tuple[float, float]:
    """The share of the waits for a CPU at the lines of a fault, and its variance."""
    if fault.cause in _WITHOUT_CPU_WAITS or fault.is_of_gpu:
        return 0.0, 0.0
    waits = sum(
        share
        for name in _BUCKETS_OF.get(fault.cause, (fault.cause,))
        for line, share in case.bucket(name).cpu_waits.by_name.items()
        if fault.cause != "excessive_sync" or function(line) == function(fault.line)
    )
    preempted = case.bucket("cpu_preemption")
    return waits, waits * max(preempted.share - waits, 0.0) / max(preempted.n_samples, 1)


_BUCKETS_OF = {
    "child_program": ("child_program", "child_wait"),
    "cpu_quota": ("cpu_preemption",),
    "excessive_sync": ("gpu_wait", "host_compute", "host_device_copy"),
    "input_starvation": ("input_starvation", "child_wait"),
    "launch_bound": ("host_compute",),
    "pageable_copy": ("host_device_copy",),
}


def _error(case: Case, fault: Fault) -> float:
    """The standard error of a fault's share: of its buckets, in proportion."""
    of_fault = [case.bucket(name) for name in _BUCKETS_OF.get(fault.cause, (fault.cause,))]
    if fault.cause == "excessive_sync":
        return float((max(fault.share * (1 - fault.share), 0.0) / max(case.activity.n_samples, 1)) ** 0.5)
    share = sum(bucket.share for bucket in of_fault)
    error = float(sum(bucket.variance for bucket in of_fault) ** 0.5)
    return error * min(fault.share / share, 1.0) if share > 0 else 0.0


_WAITS = frozenset(
    (
        "block_io",
        "checkpoint",
        "file_lock",
        "full_pipe",
        "network_wait",
        "child_program",
        "cuda_alloc",
        "host_sleep",
    )
)


def _min_share(fault: Fault, activity: Activity, limits: Thresholds) -> float:
    is_waiting = activity.budget["gpu_wait"] >= limits.overlap_wait_share
    if fault.cause == "host_compute" and activity.gpu_busy is None and is_waiting:
        return limits.overlap_share
    return limits.wait_share if fault.cause in _WAITS else limits.fault_share
