"""The rank waits for a lock on a file (flock, fcntl) that another process holds."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.causes._registry import Cause, Excess, intervals
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events.layout import Array
from stallscope.events.names import Category

_FILE_LOCKS = (73, 72, 32, 25)
"""flock, fcntl on x86-64, then on arm64. On the other architecture these calls do not block in OTHER_OFF."""


def _waits(excess: Excess) -> Array:
    rows = excess.off(Category.OTHER_OFF)
    return rows[np.isin(rows["syscall_nr"], _FILE_LOCKS)]


def _claims_ns(excess: Excess) -> float:
    """The part of the blocked time that the rank's intervals off the CPU spent in these system calls."""
    blocked = float(excess.off(Category.OTHER_OFF)["duration_ns"].sum())
    waited = float(_waits(excess)["duration_ns"].sum())
    return excess.ns(Category.OTHER_OFF) * waited / blocked if blocked > 0 else 0.0


def _evidence(excess: Excess) -> CauseEvidence:
    samples = excess.samples[np.isin(excess.samples["syscall_nr"], _FILE_LOCKS)]
    samples = samples[samples["object"] != b""]
    if not len(samples):
        return intervals(_waits(excess))
    names, number = np.unique(samples["object"], return_inverse=True)
    most = int(np.bincount(number, weights=samples["n"]).argmax())
    return replace(intervals(_waits(excess)), lock=names[most].decode("utf-8", "replace"))


def _because(evidence: CauseEvidence) -> str:
    return f"waiting for a {evidence.lock}" if evidence.lock is not None else ""


CAUSE = Cause(
    name="file_lock",
    title="waited for a file lock",
    state="waiting for a file lock",
    noun="file lock",
    categories=(Category.OTHER_OFF,),
    evidence=_evidence,
    advice=lambda _: ["Give each process its own file, or hold the lock for a shorter time."],
    claims_ns=_claims_ns,
    because=_because,
)
