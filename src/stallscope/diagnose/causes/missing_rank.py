"""The rank does not enter a round in which its peers wait."""

import signal
from collections.abc import Iterable
from typing import TypeVar

from stallscope.diagnose.causes._registry import Cause
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import BY_SIGNAL

T = TypeVar("T")
_COMPUTES = ("on_cpu", "preempted")
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def _advice(evidence: CauseEvidence) -> list[str]:
    states = evidence.doing or []
    if any(state.oom_killed for state in states):
        return [
            "Give the job more host memory (memory.max; Kubernetes: the memory limit), or reduce its use: data loader "
            "workers, prefetched batches, pinned buffers, checkpoints held in memory."
        ]
    if call := _first(state.failed_call for state in states):
        return [
            f"Read the last lines of the rank's log: {call} failed, and the rank then did not enter the round."
        ]
    have_ended = bool(states) and all(state.is_alive is False and not state.has_hung for state in states)
    exit_status = _first(state.exit_status for state in states)
    if have_ended and exit_status is not None:
        return [_after_end(exit_status)]
    if have_ended:
        return [
            "The process has ended: look for its exit code, the OOM killer (dmesg) and Xid errors on that host."
        ]
    at, category = _first(state.at for state in states), _first(state.state for state in states)
    if category == "stopped":
        return [
            "A signal stopped the process: resume it (kill -CONT PID), and find the sender: a debugger, a scheduler."
        ]
    if at and category in _COMPUTES:
        return [
            f"Look at {at}: the rank computes there instead of entering the collective, perhaps in an endless loop."
        ]
    if at:
        return [
            f"Look at {at}: the rank is there instead of in the collective, and all other ranks wait for it."
        ]
    return [
        "Dump the rank's stacks before a restart (py-spy dump --native --pid PID): they show where it is blocked."
    ]


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _after_end(exit_status: int) -> str:
    if exit_status == BY_SIGNAL + signal.SIGKILL:
        return "Find the sender of the SIGKILL (logs, dmesg): the launcher, the scheduler, a memory or time limit."
    if exit_status - BY_SIGNAL in _CRASHES:
        return "The process crashed: open its core file, or set PYTHONFAULTHANDLER=1 and read the end of its log."
    return "Read the last lines of the rank's log: the process exited by itself or on request."


CAUSE = Cause(
    name="missing_rank",
    title="never entered the round",
    state="absent from the round",
    noun="missing rank",
    categories=(),
    advice=_advice,
)
