"""The verdict on a slow GPU."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.causes import Explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.cost.delays import (
    Delays,
)
from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.diagnose.gpu.slow_gpu import SlowDevice
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.verdicts._late import (
    ExaminedTotals,
    cost_of,
    location,
    steps,
)


def verdict(
    case: Case, process: int, slow: SlowDevice, delays: Delays, *, examined: ExaminedTotals
) -> Verdict:
    """The verdict on a slow GPU. delays: see device_cost."""
    why = cause("gpu_shared" if slow.is_irregular else "gpu_slow")
    values = delays.sizes_ns / 1e6
    evidence = CauseEvidence(
        seen_by=slow.seen_by,
        excess_ms_quartiles=[round(float(np.quantile(values, q)), 3) for q in (0.25, 0.5, 0.75)],
    )
    part = Explained(why, 1.0, delays.excess.total_ns, evidence)
    return replace(
        location(case, [process], delays, examined=examined),
        kind="device",
        late_ms={"median": round(float(np.median(values)), 3), "max": round(float(values.max()), 3)},
        n_incidents=delays.n_incidents,
        causes=[part],
        confidence=round(min(1 - 0.5**delays.n_late, 0.9 if slow.is_irregular else 0.95), 3),
        victims=[int(r) for p, r in enumerate(case.timeline.rank) if p != process],
        cost=cost_of(case, delays, examined=examined),
        advice=why.advice(evidence),
        evidence=steps(case, delays.n_late, examined),
    )
