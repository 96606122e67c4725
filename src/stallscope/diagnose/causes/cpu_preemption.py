"""The rank wanted to run and did not get a CPU."""

from stallscope.diagnose.causes.registry import Cause, Evidence, Excess, intervals, most_of
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    rows = excess.off(Category.PREEMPTED)
    if not len(rows):
        return {}
    others = rows[rows["by_pid"] != rows["pid"]]
    by = [name.decode("utf-8", "replace") for name in most_of(others, "by_comm")[:3].tolist() if name]
    return intervals(rows) | {"by": by}


def _advice(evidence: Evidence) -> list[str]:
    who = evidence.get("by")
    found = f"{', '.join(map(str, who))} ran instead: " if isinstance(who, list) and who else ""
    return [
        f"{found}move it to other CPUs, or give the rank CPUs of its own (taskset, cpuset, --cpus-per-task).",
        "Check the rank's CPU affinity and the number of OpenMP and data loader threads on that host.",
    ]


CAUSE = Cause(
    name="cpu_preemption",
    title="was kept off the CPU by other tasks",
    categories=(Category.PREEMPTED,),
    evidence=_evidence,
    advice=_advice,
)
