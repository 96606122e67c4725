"""The reason for the delay of a late request: one rule for each, tried in order.

A rule names a reason if it covers at least HALF of the late interval. Rules on the machine come before rules on the
engine's code, and these before rules on other requests: a stopped process also queues its requests. Engines that no
longer answer are in dead_servers.py, and slow ranks of a tensor-parallel engine are found as in any job.
"""

from collections.abc import Callable

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.serving.code_reasons import (
    compilation,
    computation,
    computation_elsewhere,
    held,
    other_thread,
    sleep,
)
from stallscope.diagnose.serving.host_reasons import (
    disk,
    page_faults,
    preempted_holder,
    preemption,
    quota,
    stopped,
)
from stallscope.diagnose.serving.late_delay import Delay
from stallscope.diagnose.serving.late_reason import Reason
from stallscope.diagnose.serving.load_reasons import capacity, kv_cache, long_prompt
from stallscope.diagnose.serving.lock_reasons import (
    file_lock,
    interpreter_lock,
    lock,
    own_thread,
)
from stallscope.diagnose.serving.peer_reasons import full_pipe, other_service, slow_client

RULES: tuple[Callable[[Delay], Reason | None], ...] = (
    stopped,
    quota,
    slow_client,
    full_pipe,
    disk,
    page_faults,
    file_lock,
    other_service,
    compilation,
    sleep,
    long_prompt,
    kv_cache,
    capacity,
    preempted_holder,
    interpreter_lock,
    own_thread,
    preemption,
    computation,
    computation_elsewhere,
    held,
    other_thread,
    lock,
)


def reason_of(delay: Delay) -> Reason:
    """The reason for a delay; the cause "unknown" where no rule applies."""
    for rule in RULES:
        if reason := rule(delay):
            return reason
    return Reason("unknown", delay.holder_pid, CauseEvidence())
