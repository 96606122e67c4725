"""Named faults of one process. Constant faults are named as well: no faster period is needed for comparison.

Each fault has its share of the wall clock, the largest gain if it were removed, the line of code and the next action.
A fault on the host cannot cost more than the share in which the GPU was idle, if that share is known.
"""

from collections.abc import Callable

from stallscope.diagnose.processes import gpu_faults, host_faults
from stallscope.diagnose.processes.activity import Activity
from stallscope.diagnose.processes.buckets import buckets
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


def faults(trace: Trace, activity: Activity, limits: Thresholds) -> list[Fault]:
    """The faults of a process that cost at least limits.fault_share, or limits.wait_share, the largest first.

    A share from few samples must exceed the limit by its standard error.
    """
    case = Case(trace, activity, buckets(activity), limits)
    candidates = [fault for rule in _RULES if (fault := rule(case)) is not None]
    costly = [
        fault
        for fault in candidates
        if fault.lost(activity) - case.bucket(fault.cause).error >= _least_share(fault, limits)
    ]
    named = [fault for fault in costly if fault.cause != "low_utilisation"] or costly
    return sorted(named, key=lambda fault: -fault.share)


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


def _least_share(fault: Fault, limits: Thresholds) -> float:
    return limits.wait_share if fault.cause in _WAITS else limits.fault_share
