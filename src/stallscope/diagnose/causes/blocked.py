"""The rank was blocked off the CPU, and the recording does not show the system call."""

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess, intervals, most_of
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    rows = excess.off(Category.OTHER_OFF)
    evidence = intervals(rows)
    if excess.knows_syscalls and len(rows):
        evidence["system_calls"] = [int(nr) for nr in most_of(rows, "syscall_nr")[:3]]
    return evidence


def _advice(evidence: Evidence) -> list[str]:
    if evidence.get("system_calls"):
        return ["The evidence lists the system calls that blocked the rank: find the code that makes them."]
    return [
        "Trace the job live (stallscope trace): the system call distinguishes a sleep, a lock and a socket."
    ]


CAUSE = Cause(
    name="blocked",
    title="was blocked off the CPU (system call not recorded)",
    state="blocked off the CPU (system call not recorded)",
    noun="blocked off the CPU (system call not recorded)",
    categories=(Category.OTHER_OFF,),
    evidence=_evidence,
    advice=_advice,
)
