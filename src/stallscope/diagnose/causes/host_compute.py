"""The rank computes on the CPU: no CUDA call, no system call."""

from stallscope.diagnose.causes._registry import Cause, Evidence, Excess
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    extra = round(excess.n_launches)
    return {"n_launches": extra} if extra > 0 else {}


def _advice(evidence: Evidence) -> list[str]:
    if evidence.get("n_launches"):
        return [
            "This rank makes more launches than its peers: compare its shapes and code paths with another rank."
        ]
    return [
        "Profile that rank's host code: garbage collection, data preparation, logging or a compiler on one rank only.",
        "If it is the garbage collector: call gc.freeze() after start-up, or collect on all ranks in the same step.",
    ]


CAUSE = Cause(
    name="host_compute",
    title="computed on the CPU",
    state="computing on the CPU",
    noun="computation on the CPU",
    categories=(Category.ON_CPU,),
    evidence=_evidence,
    advice=_advice,
)
