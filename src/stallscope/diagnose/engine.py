"""The whole diagnosis, step by step: a trace goes in, a report comes out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stallscope.diagnose.arrays.parallel import both, keep_freed_memory
from stallscope.diagnose.cost.delays import device_cost
from stallscope.diagnose.findings import Findings, findings, mismatch_findings
from stallscope.diagnose.gpu.gpu_rounds import gpu_trace
from stallscope.diagnose.hangs.earlier_hang import is_for as is_before_attach
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.processes.activity import activities
from stallscope.diagnose.processes.budget_summary import as_data
from stallscope.diagnose.processes.single import is_single
from stallscope.diagnose.report import text
from stallscope.diagnose.report.conclusion import concluded
from stallscope.diagnose.report.examined import budget_of_case, of_case
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import job_separation
from stallscope.diagnose.timeline.case import Case, case_of
from stallscope.diagnose.verdicts import (
    _late,
    before_attach,
    by_job,
    change,
    claimed_rank,
    device,
    exported,
    failure,
    gpu_arrival,
    gpu_driver,
    hang,
    held_gpus,
    imbalance,
    inconclusive,
    inference_engine,
    mismatch,
    process,
    process_exit,
    stated,
    straggler,
    without_ledger,
)
from stallscope.diagnose.verdicts._owners import with_owners
from stallscope.diagnose.verdicts._pids import with_pids
from stallscope.events.call_labels import SCHEDULE_FACT
from stallscope.events.trace import Trace

_MANY_ROWS = 1 << 20
_NO_STEP = np.iinfo(np.int64).max


def diagnose(
    trace: Trace, limits: Thresholds | None = None, *, usd_per_gpu_hour: float | None = None
) -> Report:
    """The report on a trace.

    usd_per_gpu_hour: price of a GPU hour; costs are in GPU seconds only where it is None.
    """
    if exported.is_for(trace):
        return exported.report(trace)
    limits = limits or Thresholds()
    if len(trace.collectives) >= _MANY_ROWS:
        keep_freed_memory()
    if len(trace.idle_gpus) and not _has_job(trace):
        return held_gpus.only_idle(trace, limits, usd_per_gpu_hour)
    if gpu_arrival.is_only(trace):
        trace = gpu_trace(trace)
    parts = job_separation.parts(trace)
    reports = [_whole_report(part, limits, usd_per_gpu_hour) for part in parts]
    report_of_all = by_job.numbered(reports, parts) if len(parts) > 1 else reports[0]
    report_of_all = process.with_processes_alone(trace, report_of_all, limits, usd_per_gpu_hour)
    report_of_all = inference_engine.with_engines(trace, report_of_all, limits)
    report_of_all = held_gpus.with_idle_gpus(trace, report_of_all, limits, usd_per_gpu_hour)
    return replace(report_of_all, activity=as_data(trace, activities(trace)))


def has_calls(trace: Trace) -> bool:
    """Whether a trace has calls, spans of work or counts of calls."""
    tables = (trace.collectives, trace.calls, trace.spans, trace.operations, trace.gpu_kernels)
    return (
        any(map(len, tables))
        or inference_engine.has_engines(trace)
        or without_ledger.counts_only(trace)
        or exported.is_for(trace)
    )


def can_diagnose(trace: Trace) -> bool:
    """Whether a trace has calls, stacks of ranks, statements of a log, or a reason why it has none of them."""
    return len(trace.idle_gpus) > 0 or _has_job(trace)


def _has_job(trace: Trace) -> bool:
    others = is_before_attach(trace) or stated.is_stated(trace) or bool(trace.coverage.gaps)
    return has_calls(trace) or others


def standstill(trace: Trace, limits: Thresholds) -> Report | None:
    """The report on a job that hung before the trace began; None for another trace."""
    return before_attach.report(trace, limits=limits) if is_before_attach(trace) else None


def _whole_report(trace: Trace, limits: Thresholds, usd_per_gpu_hour: float | None) -> Report:
    """The report on one job, with its failures and the state of its GPUs."""
    if SCHEDULE_FACT in trace.facts:
        limits = replace(limits, warm_up_steps=0)
    trace = gpu_arrival.with_gaps(trace, limits)
    partial = with_gpu_arrivals(trace, _report(trace, limits, usd_per_gpu_hour), limits, usd_per_gpu_hour)
    return completed(trace, partial, limits)


def with_gpu_arrivals(
    trace: Trace, partial: Report, limits: Thresholds, usd_per_gpu_hour: float | None
) -> Report:
    """The report with the verdicts that the rounds on the GPUs show, where NCCL's profiler plugin recorded them."""
    if not len(trace.gpu_kernels) or not len(trace.collectives):
        return partial
    case = gpu_arrival.gpu_case(trace, limits, usd_per_gpu_hour)
    whole = gpu_arrival.joined(trace, case, partial, gpu_report(case)) if case else partial
    whole = gpu_arrival.with_replays(trace, whole)
    return replace(whole, verdicts=[_worded(verdict) for verdict in whole.verdicts])


def gpu_report(case: Case) -> Report:
    """The report on the rounds on GPUs, with GPUs that are late by little in most rounds if no finding explains it."""
    whole = report(findings(case))
    if not gpu_arrival.leaves_small_delays(case, whole.verdicts):
        return whole
    small = report(findings(gpu_arrival.of_small_delays(case)))
    return replace(whole, verdicts=whole.verdicts + gpu_arrival.steadily_late(small.verdicts, case))


def completed(trace: Trace, partial: Report, limits: Thresholds) -> Report:
    """The report with failed calls, ended processes, the state of the GPUs, and the evidence for its answer."""
    whole = process_exit.with_deaths(trace, failure.with_failures(trace, partial))
    whole = stated.with_statements(trace, gpu_driver.with_gpu_states(trace, whole))
    whole = replace(whole, verdicts=whole.verdicts + gpu_driver.held_down(trace, whole))
    whole = replace(whole, verdicts=with_owners(trace, with_pids(trace, whole.verdicts)))
    return concluded(whole, trace, limits)


def _report(trace: Trace, limits: Thresholds, usd_per_gpu_hour: float | None) -> Report:
    """The report by the kind of source: calls only, work and completion, or arrivals with time ledgers."""
    if stated.is_for(trace):
        return stated.empty_report(trace)
    if inference_engine.is_only(trace) and not is_before_attach(trace):
        return inference_engine.report(trace, limits)
    if is_before_attach(trace):
        standstill = before_attach.report(trace, limits=limits, usd_per_gpu_hour=usd_per_gpu_hour)
        if standstill or not len(trace.calls):
            return standstill or before_attach.without_standstill(trace)
    if is_single(trace) and not stated.is_stated(trace):
        return process.report(trace, limits=limits, usd_per_gpu_hour=usd_per_gpu_hour)
    case = case_of(trace, limits, usd_per_gpu_hour)
    if without_ledger.is_for(trace) or without_ledger.counts_only(trace):
        return without_ledger.report(
            trace,
            mismatch.verdicts(case, mismatch_findings(case)),
            limits=limits,
            usd_per_gpu_hour=usd_per_gpu_hour,
        )
    return gpu_report(case) if gpu_arrival.is_on_gpus(trace) else report(findings(case))


def report(case_findings: Findings) -> Report:
    """The report with a verdict for each finding."""
    case, named = case_findings.case, case_findings.named
    if claims := claimed_rank.verdicts(case):
        counts, evidence = of_case(case)
        worded = [_worded(verdict) for verdict in claims]
        return Report(case.trace.source, counts, worded, evidence=evidence, budget=budget_of_case(case))
    examined = _late.examined_totals(case)
    uneven = case_findings.uneven
    if uneven and named:
        _ = case.waits  # computed once, before two threads need it
    moving, late_ranks = both(
        lambda: [imbalance.moving(case_findings, uneven, examined)] if uneven else [],
        lambda: straggler.verdicts(case, named, examined),
        n=len(case.timeline.rows),
    )
    verdicts = [
        *mismatch.verdicts(case, case_findings.mismatches),
        *([] if case_findings.mismatches else hang.verdicts(case)),
        *late_ranks,
        *(
            device.verdict(case, p, slow, device_cost(case, p, slow.late), examined=examined)
            for p, slow in case_findings.device.items()
            if p not in named
        ),
        *(
            imbalance.gpu_work(case, p, slow, device_cost(case, p, slow.late), examined=examined)
            for p, slow in case_findings.gpu_work.items()
            if p not in named
        ),
        *([imbalance.stage(case, case_findings.stage)] if case_findings.stage else []),
        *moving,
        *inconclusive.often_last(case_findings, examined),
    ]
    once, benign = straggler.one_off_verdicts(case_findings, examined)
    verdicts += once
    if verdicts:
        verdicts += change.of_other_steps(case_findings)
    else:
        verdicts = (
            change.slow_links(case)
            or change.of_all_ranks(case)
            or inconclusive.doubtful(case_findings, examined)
            or inconclusive.absorbed(case_findings, examined)
        )
    counts, evidence = of_case(case)
    if not verdicts:
        evidence = replace(
            change.with_unclear_change(case, evidence), min_change_share=change.min_reported_share(case)
        )
    return Report(
        source=case.trace.source,
        examined=counts,
        evidence=evidence,
        budget=budget_of_case(case),
        verdicts=[_worded(verdict) for verdict in verdicts],
        benign=benign
        + _absorbed(case_findings)
        + _costless(case_findings, late_ranks)
        + _differing_gpus(case_findings)
        + _warm_up(case),
    )


def _worded(verdict: Verdict) -> Verdict:
    return replace(verdict, summary=text.summary(verdict))


def _absorbed(case_findings: Findings) -> list[dict[str, object]]:
    """Remarks on host delays that cost nothing."""
    return _of_host_delays(
        case_findings.case,
        "host delays absorbed by the queue of the rank's GPU",
        case_findings.absorption.proved,
    )


def _costless(case_findings: Findings, late_ranks: list[Verdict]) -> list[dict[str, object]]:
    """Remarks on recurring host delays without a verdict, as they cost little at most."""
    rank = case_findings.case.timeline.rank
    in_verdicts = {n for verdict in late_ranks for n in (*verdict.ranks, *(verdict.evidence.more_work or ()))}
    others = {
        process: late
        for process, late in case_findings.named.items()
        if int(rank[process]) not in in_verdicts
    }
    return _of_host_delays(case_findings.case, "host delays that cost little or nothing", others)


def _of_host_delays(
    case: Case, what: str, late_steps: Mapping[int, Sequence[LateStep]]
) -> list[dict[str, object]]:
    """A remark for each process with late steps."""
    return [
        {
            "what": what,
            "rank": int(case.timeline.rank[process]),
            "late_ms": round(float(np.median([step.late_ns for step in late])) / 1e6, 3),
            "n_steps": len(late),
        }
        for process, late in late_steps.items()
    ]


def _differing_gpus(case_findings: Findings) -> list[dict[str, object]]:
    """Remarks on GPUs that are slower by a small share of a step."""
    return [
        {
            "what": "a GPU that is slightly slower than its peers, within the variation of its model",
            "rank": int(case_findings.case.timeline.rank[process]),
            "late_ms": round(device.typical_ns / 1e6, 3),
            "n_steps": len(device.late),
        }
        for process, device in case_findings.differing.items()
    ]


def _warm_up(case: Case) -> list[dict[str, object]]:
    """The remark on steps left out at the start, where there are more than the fixed warm-up."""
    early = np.unique(case.table.step[case.table.step < case.judged.step.min(initial=_NO_STEP)])
    if len(early) <= case.limits.warm_up_steps:
        return []
    return [{"what": "slow steps during the warm-up", "n_steps": len(early)}]
