"""The rank was off the CPU, and the recording does not tell in what it was blocked."""

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess, intervals, most_of
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    rows = excess.off(Category.OTHER_OFF)
    told = intervals(rows)
    if excess.knows_syscalls and len(rows):
        told["system_calls"] = [int(nr) for nr in most_of(rows, "syscall_nr")[:3]]
    return told


def _advice(evidence: Evidence) -> list[str]:
    if evidence.get("system_calls"):
        return ["It was blocked in the system calls named in the evidence: see what that rank does there."]
    return [
        "Trace the job live (stallscope trace): the system call tells a sleep, a lock and a socket apart."
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
