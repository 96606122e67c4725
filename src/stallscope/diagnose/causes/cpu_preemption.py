"""The rank was ready to run and did not get a CPU."""

from stallscope.diagnose.causes import on_host
from stallscope.diagnose.causes._registry import Cause, Evidence, Excess, intervals, most_of
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    rows = excess.off(Category.PREEMPTED)
    if not len(rows):
        return {}
    if quota := on_host.quota(excess, rows):
        return intervals(rows) | quota
    others = rows[rows["by_pid"] != rows["pid"]]
    return intervals(rows) | {"by": on_host.texts(most_of(others, "by_comm")[:3])}


def _because(evidence: Evidence) -> str:
    quota = evidence.get("quota")
    return f"kept off the CPU by the quota of its control group ({quota})" if quota else ""


def _advice(evidence: Evidence) -> list[str]:
    if evidence.get("quota"):
        return [
            "Raise the quota (cpu.max; Kubernetes: the CPU limit; Docker: --cpus), or remove it: a rank with its "
            "loaders and OpenMP threads uses several CPUs at a time.",
            "Or give the rank fewer threads: OMP_NUM_THREADS, num_workers.",
        ]
    tasks = evidence.get("by")
    moved = ", ".join(map(str, tasks)) if isinstance(tasks, list) and tasks else "the other tasks"
    return [
        f"Move {moved} to other CPUs, or give the rank dedicated CPUs (taskset, cpuset, --cpus-per-task).",
        "Check the rank's CPU affinity and the number of OpenMP and data loader threads on that host.",
    ]


CAUSE = Cause(
    name="cpu_preemption",
    title="was kept off the CPU by other tasks",
    state="kept off the CPU by other tasks",
    noun="preempted by other tasks",
    categories=(Category.PREEMPTED,),
    evidence=_evidence,
    advice=_advice,
    because=_because,
)
