"""The rank was ready to run and did not get a CPU."""

from dataclasses import replace

from stallscope.diagnose.causes import on_host
from stallscope.diagnose.causes._registry import Cause, Excess, intervals, most_of
from stallscope.diagnose.evidence_fields import CauseEvidence, merged
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    rows = excess.off(Category.PREEMPTED)
    if not len(rows):
        return CauseEvidence()
    if (quota := on_host.quota(excess, rows)).quota:
        return merged(intervals(rows), quota)
    others = rows[rows["by_pid"] != rows["pid"]]
    return replace(intervals(rows), by=on_host.texts(most_of(others, "by_comm")[:3]))


def _because(evidence: CauseEvidence) -> str:
    quota = evidence.quota
    return f"kept off the CPU by the quota of its control group ({quota})" if quota else ""


def _advice(evidence: CauseEvidence) -> list[str]:
    if evidence.quota:
        return [
            "Raise the quota (cpu.max; Kubernetes: the CPU limit; Docker: --cpus), or remove it: a rank with its "
            "loaders and OpenMP threads uses several CPUs at a time.",
            "Or give the rank fewer threads: OMP_NUM_THREADS, num_workers.",
        ]
    moved = ", ".join(evidence.by or ["the other tasks"])
    return [
        f"Move {moved} to other CPUs, or give the rank dedicated CPUs (taskset, cpuset, --cpus-per-task).",
        "Check the rank's CPU affinity and the number of OpenMP and data loader threads on that host.",
    ]


CAUSE = Cause(
    name="cpu_preemption",
    title="was kept off the CPU by other tasks",
    state="kept off the CPU by other tasks",
    noun="preemption by other tasks",
    categories=(Category.PREEMPTED,),
    evidence=_evidence,
    advice=_advice,
    because=_because,
)
