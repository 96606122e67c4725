"""The rank saves a checkpoint: it serialises on the CPU, copies, writes and syncs."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.causes import on_host
from stallscope.diagnose.causes._registry import Cause, Excess
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.processes import code_locations
from stallscope.events.layout import Array
from stallscope.events.names import Category

_SAVING = (Category.IO, Category.ON_CPU, Category.COPY)
_MIN_SHARE = 0.5  # of the weighted stacks that must be inside a save


def _claims_ns(excess: Excess) -> float:
    """All time on the CPU, in copies and in writes, where most stacks of that time are inside a save.

    Samples show the time on the CPU as well; the stacks of intervals off the CPU show the writes only.
    """
    samples = excess.samples[np.isin(excess.samples["category"], _SAVING)]
    writes = excess.off(Category.IO)
    is_save = _is_most(excess, samples, samples["n"]) or _is_most(excess, writes, writes["duration_ns"])
    return excess.ns(*_SAVING) if is_save else 0.0


def _is_most(excess: Excess, rows: Array, weight: Array) -> bool:
    """Whether the rows whose stack is inside a save have most of the weight."""
    saving = [number for number in np.unique(rows["stack"]).tolist() if _saves(excess, number)]
    inside = float(weight[np.isin(rows["stack"], saving)].sum())
    return inside > 0 and inside >= _MIN_SHARE * float(weight.sum())


def _saves(excess: Excess, stack: int) -> bool:
    return code_locations.saves(tuple(excess.stacks.get(stack, ())))


def _evidence(excess: Excess) -> CauseEvidence:
    return replace(
        on_host.disks(excess),
        serialise_ms=_ms(excess, Category.ON_CPU),
        copy_ms=_ms(excess, Category.COPY),
        write_ms=_ms(excess, Category.IO),
    )


def _ms(excess: Excess, category: Category) -> float | None:
    return round(excess.ns(category) / 1e6, 3) or None


CAUSE = Cause(
    name="checkpoint",
    title="saved a checkpoint while the GPU waited",
    state="saving a checkpoint",
    noun="checkpoint",
    categories=_SAVING,
    evidence=_evidence,
    advice=lambda _: ["Save less often, or asynchronously: copy to pinned memory, write from a thread."],
    claims_ns=_claims_ns,
)
