"""The rank does not enter a round in which its peers wait."""

import signal

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess
from stallscope.events.names import BY_SIGNAL

_COMPUTES = ("on_cpu", "preempted")
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def _evidence(excess: Excess) -> Evidence:
    return {}


def _advice(evidence: Evidence) -> list[str]:
    if evidence.get("is_out_of_memory"):
        return [
            "Give the job more host memory (memory.max; Kubernetes: the memory limit), or reduce its use: data loader "
            "workers, prefetched batches, pinned buffers, checkpoints held in memory."
        ]
    if isinstance(call := evidence.get("failed_call"), str):
        return [
            f"Read the last lines of the rank's log: {call} failed, and the rank then did not enter the round."
        ]
    if evidence.get("is_alive") is False and evidence.get("exit_status") is not None:
        return [_after_end(int(str(evidence["exit_status"])))]
    if evidence.get("is_alive") is False:
        return [
            "The process has ended: look for its exit code, the OOM killer (dmesg) and Xid errors on that host."
        ]
    if evidence.get("state") == "stopped":
        return [
            "A signal stopped the process: resume it (kill -CONT PID), and find the sender: a debugger, a scheduler."
        ]
    if isinstance(at := evidence.get("at"), str) and evidence.get("state") in _COMPUTES:
        return [
            f"Look at {at}: the rank computes there instead of entering the collective, perhaps in an endless loop."
        ]
    if isinstance(at := evidence.get("at"), str):
        return [
            f"Look at {at}: the rank is there instead of in the collective, and all other ranks wait for it."
        ]
    return [
        "Dump the rank's stacks before a restart (py-spy dump --native --pid PID): they show where it is blocked."
    ]


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
    noun="round not entered",
    categories=(),
    evidence=_evidence,
    advice=_advice,
)
