"""The rank was blocked off the CPU, and the recording does not show the system call."""

from dataclasses import replace

from stallscope.diagnose.causes._registry import Cause, Excess, intervals, most_of
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    rows = excess.off(Category.OTHER_OFF)
    if not excess.knows_syscalls or not len(rows):
        return intervals(rows)
    return replace(intervals(rows), system_calls=[int(nr) for nr in most_of(rows, "syscall_nr")[:3]])


def _advice(evidence: CauseEvidence) -> list[str]:
    if evidence.system_calls:
        return ["The evidence lists the system calls that blocked the rank: find the code that makes them."]
    return [
        "Trace the job live (stallscope trace): the system call distinguishes a sleep, a lock and a socket."
    ]


CAUSE = Cause(
    name="blocked",
    title="was blocked off the CPU (system call not recorded)",
    state="blocked off the CPU (system call not recorded)",
    noun="wait off the CPU (system call not recorded)",
    categories=(Category.OTHER_OFF,),
    evidence=_evidence,
    advice=_advice,
)
