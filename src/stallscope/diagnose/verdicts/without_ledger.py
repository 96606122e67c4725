"""Reports on traces without time ledgers, whose source records the completion of calls or the duration of work.

Clocks and waits cannot be compared in such a trace. The diagnosis takes the records of the source as they are.
"""

from dataclasses import replace

from stallscope.diagnose.hangs.incomplete_collectives import records_completion, standstill
from stallscope.diagnose.report import text
from stallscope.diagnose.report.examined import of_records
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.spans.own_time import work
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.verdicts import incomplete
from stallscope.diagnose.verdicts.spans import slow_work
from stallscope.events.names import CollectiveFlag
from stallscope.events.trace import Trace


def is_for(trace: Trace) -> bool:
    """Whether a trace is of this kind: no collective has a ledger."""
    flags = trace.collectives["flags"]
    has_ledger = bool((flags & CollectiveFlag.NO_LEDGER == 0).any())
    return not has_ledger and (len(flags) > 0 or len(trace.spans) > 0)


def counts_only(trace: Trace) -> bool:
    """Whether the source counts collectives per communicator and records no call, as answers of NCCL's RAS do."""
    has_rows = len(trace.collectives) or len(trace.calls) or len(trace.spans) or len(trace.positions)
    return not has_rows and len(trace.communicators) > 0 and not trace.snapshots["ledger_ns"].any()


def _is_explained(hang: Verdict, odd: list[Verdict]) -> bool:
    """Whether the members of a round that never completes entered that round with different calls."""
    rounds = [(verdict.comm_hash, verdict.first_round) for verdict in odd]
    return not hang.ranks and (hang.comm_hash, hang.first_round) in rounds


def report(trace: Trace, odd: list[Verdict], *, limits: Thresholds, usd_per_gpu_hour: float | None) -> Report:
    """The report on a trace for which is_for(). odd: verdicts on rounds entered differently."""
    verdicts = [*odd]
    if records_completion(trace):
        held = standstill(trace)
        hang = incomplete.verdict(trace, held) if held else None
        verdicts += [hang] if hang and not _is_explained(hang, odd) else []
    done = work(trace, first_step=limits.warm_up_steps)
    if done is not None:
        verdicts += slow_work(trace, done, limits=limits, usd_per_gpu_hour=usd_per_gpu_hour)
    counts, evidence = of_records(trace)
    return Report(
        source=trace.source,
        examined=counts,
        evidence=evidence,
        verdicts=[replace(verdict, summary=text.summary(verdict)) for verdict in verdicts],
    )
