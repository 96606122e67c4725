"""Reports on traces whose source keeps no ledger, but tells what has not completed, or what work took how long.

No clock and no account of waits can be compared there; what the source tells is judged as it is.
"""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.hangs.incomplete import standstill, tells_completion
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.spans.own_time import work
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.verdicts import incomplete
from stallscope.diagnose.verdicts.spans import slow_work
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import CollectiveFlag
from stallscope.events.trace import Trace


def is_told(trace: Trace) -> bool:
    """Whether a trace is of this kind: no collective has a ledger."""
    flags = trace.collectives["flags"]
    has_ledger = bool((flags & CollectiveFlag.NO_LEDGER == 0).any())
    return not has_ledger and (len(flags) > 0 or len(trace.spans) > 0)


def report(trace: Trace, odd: list[Verdict], *, limits: Thresholds, usd_per_gpu_hour: float | None) -> Report:
    """The report on a trace for which is_told(). odd: verdicts on rounds entered differently."""
    verdicts = [*odd]
    if tells_completion(trace):
        held = standstill(trace)
        verdicts += [incomplete.verdict(trace, held)] if held else []
    done = work(trace, first_step=limits.warm_up_steps)
    if done is not None:
        verdicts += slow_work(trace, done, limits=limits, usd_per_gpu_hour=usd_per_gpu_hour)
    return Report(
        source=trace.source,
        looked_at=_looked_at(trace),
        verdicts=[replace(verdict, summary=text.summary(verdict)) for verdict in verdicts],
    )


def _looked_at(trace: Trace) -> dict[str, object]:
    rows = trace.collectives
    is_round = rows["seq"] != UNKNOWN
    pairs = np.unique(rows[is_round][["comm_hash", "seq"]])
    times = np.concatenate([rows["ts_ns"], trace.spans["ts_ns"] + trace.spans["duration_ns"]])
    begins = np.concatenate([rows["ts_ns"], trace.spans["ts_ns"]])
    return {
        "n_ranks": len(trace.processes),
        "n_nodes": len(trace.nodes),
        "n_communicators": len(np.unique(trace.communicators["comm_hash"])),
        "n_rounds": len(pairs),
        "n_steps": len(np.unique(trace.spans["step"][trace.spans["step"] != UNKNOWN])),
        "n_lost_records": sum(trace.lost.values()),
        "seconds": round(float(times.max() - begins.min()) / 1e9, 3) if len(times) else 0.0,
    }
