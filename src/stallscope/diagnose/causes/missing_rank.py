"""The rank does not enter a round its peers wait in."""

from stallscope.diagnose.causes.registry import Cause, Evidence, Excess


def _evidence(excess: Excess) -> Evidence:
    return {}


def _advice(evidence: Evidence) -> list[str]:
    if evidence.get("is_out_of_memory"):
        return [
            "Give the job more host memory (memory.max; Kubernetes: the memory limit), or have it use less: data "
            "loader workers, prefetched batches, pinned buffers, checkpoints held in memory."
        ]
    if evidence.get("is_alive") is False:
        return [
            "Its process has ended: look for its exit code, the OOM killer (dmesg) and Xid errors on that host."
        ]
    if isinstance(at := evidence.get("at"), str):
        return [
            f"Look at {at}: there it is, instead of in the collective; what it waits for there holds up all others."
        ]
    return [
        "Dump its stacks (py-spy dump --native --pid PID) before restarting; see what it does instead in the evidence."
    ]


CAUSE = Cause(
    name="missing_rank",
    title="never entered the round",
    categories=(),
    evidence=_evidence,
    advice=_advice,
)
