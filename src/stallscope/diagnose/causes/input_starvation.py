"""The rank waits for a child process: typically a data loader worker, or a program that it started."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.causes._registry import Cause, Excess, intervals
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.names import Category

_WAITS_FOR_AN_END = (61, 247, 260, 95)
"""wait4, waitid on x86-64, then on arm64. On the other architecture these calls do not wait for a child."""


def _evidence(excess: Excess) -> CauseEvidence:
    rows = excess.off(Category.CHILD)
    is_for_end = np.isin(rows["syscall_nr"], _WAITS_FOR_AN_END)
    if 2 * rows["duration_ns"][is_for_end].sum() > rows["duration_ns"].sum():
        return replace(intervals(rows), until_it_ended=True)
    return intervals(rows)


def _because(evidence: CauseEvidence) -> str:
    return "waiting for the end of a program that it had started" if evidence.until_it_ended else ""


def _advice(evidence: CauseEvidence) -> list[str]:
    if evidence.until_it_ended:
        return [
            "Find the program that the loop starts (subprocess, a shell, nvidia-smi, git), and move it out of the step."
        ]
    return [
        "Raise num_workers and prefetch_factor, or simplify the preprocessing; keep workers alive between epochs.",
        "Check that the workers have enough CPUs: they share the rank's cpuset.",
    ]


CAUSE = Cause(
    name="input_starvation",
    title="waited for a child process, such as its data loader",
    state="waiting for input from a child process, such as a data loader",
    noun="input (child process or data loader)",
    categories=(Category.CHILD,),
    evidence=_evidence,
    advice=_advice,
    because=_because,
)
