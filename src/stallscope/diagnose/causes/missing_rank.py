"""The rank does not enter a round its peers wait in."""

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
            "Give the job more host memory (memory.max; Kubernetes: the memory limit), or have it use less: data "
            "loader workers, prefetched batches, pinned buffers, checkpoints held in memory."
        ]
    if isinstance(call := evidence.get("failed_call"), str):
        return [
            f"Read the last lines of its log: {call} failed, and what came of that kept it from the round."
        ]
    if evidence.get("is_alive") is False and evidence.get("exit_status") is not None:
        return [_after_end(int(str(evidence["exit_status"])))]
    if evidence.get("is_alive") is False:
        return [
            "Its process has ended: look for its exit code, the OOM killer (dmesg) and Xid errors on that host."
        ]
    if evidence.get("state") == "stopped":
        return [
            "It is stopped by a signal: let it go on (kill -CONT PID), and see who stops it: a debugger, a scheduler."
        ]
    if isinstance(at := evidence.get("at"), str) and evidence.get("state") in _COMPUTES:
        return [
            f"Look at {at}: there it computes, instead of being in the collective: a loop without an end?"
        ]
    if isinstance(at := evidence.get("at"), str):
        return [
            f"Look at {at}: there it is, instead of in the collective; what it waits for there holds up all others."
        ]
    return [
        "Dump its stacks (py-spy dump --native --pid PID) before restarting; see what it does instead in the evidence."
    ]


def _after_end(exit_status: int) -> str:
    if exit_status == BY_SIGNAL + signal.SIGKILL:
        return (
            "Look for who kills: the launcher, the scheduler, a limit of memory or time (their logs, dmesg)."
        )
    if exit_status - BY_SIGNAL in _CRASHES:
        return "It crashed: look at its core file, or set PYTHONFAULTHANDLER=1 and read the last lines of its log."
    return "Read the last lines of its log: it ended by itself, or was told to."


CAUSE = Cause(
    name="missing_rank",
    title="never entered the round",
    state="absent from the round",
    noun="round not entered",
    categories=(),
    evidence=_evidence,
    advice=_advice,
)
