"""Counts of the examined data, and the evidence that follows from them: of a case, or of records without a ledger."""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.report.budget import Budget, budget_of
from stallscope.diagnose.report.evidence import SLOWNESS, Evidence
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.rounds import clock_error_ns
from stallscope.diagnose.timeline.unseen_ranks import n_unseen
from stallscope.events.layout import ARRAYS, UNKNOWN, Array
from stallscope.events.names import GpuKernelFlag
from stallscope.events.trace import Coverage, Trace

_MIN_GPU_ROUNDS = 16  # fewer rounds on the GPUs show no pattern


def of_case(case: Case) -> tuple[dict[str, object], Evidence]:
    """The counts and the evidence of matched rounds."""
    timeline, trace = case.timeline, case.trace
    evidence = Evidence(
        n_ranks=timeline.n_processes,
        n_ranks_unseen=max(n_unseen(timeline, trace), _n_without_record(case)),
        n_rounds=case.matched.n_rounds,
        n_whole_rounds=int((case.matched.n_arrived >= timeline.n_members[timeline.comm_of_round]).sum()),
        n_steps=len(np.unique(case.judged.step)),
        matching_error_ms=round(case.matched.matching_error_ns / 1e6, 3) or None,
        has_pattern=bool(case.programs.has_steps.all()),
        step_ms=case.step_ns / 1e6,
        n_records=n_records(trace),
        n_lost_records=sum(trace.lost.values()),
        hosts_run_ahead=not _has_gpu_times(case) and case.hosts_run_ahead,
        coverage=trace.coverage,
    )
    counts: dict[str, object] = {
        "n_ranks": evidence.n_ranks,
        "n_nodes": len(np.unique(timeline.node)),
        "n_communicators": len(np.unique(timeline.comm_hash)),
        "n_rounds": evidence.n_rounds,
        "n_steps": evidence.n_steps,
        "n_lost_records": evidence.n_lost_records,
        "n_ranks_unseen": evidence.n_ranks_unseen,
        "seconds": round(case.observed_ns / 1e9, 3),
    }
    return counts, _with_clocks(evidence, case)


def _has_gpu_times(case: Case) -> bool:
    """Whether the source shows when collectives ran on the GPUs, in enough rounds of every process."""
    timeline, kernels = case.timeline, case.trace.gpu_kernels
    if bool((timeline.rows["gpu_start_ns"] != UNKNOWN).any()):
        return True
    flags = kernels["flags"]
    is_known = (flags & GpuKernelFlag.HAS_GPU_TIMES != 0) & (flags & GpuKernelFlag.IS_NETWORK == 0)
    recorded = kernels[is_known & (kernels["seq"] != UNKNOWN)]
    if not len(recorded):
        return False
    # A plugin in some processes only compares no GPUs.
    process, n_processes = numbered(recorded["node"], recorded["pid"])
    number, _ = numbered(recorded["comm_hash"], recorded["op"], recorded["seq"])
    members = np.unique(np.stack([number, process]), axis=1)
    is_compared = np.bincount(members[0])[members[0]] > 1
    n_rounds = np.bincount(members[1][is_compared], minlength=n_processes)
    first = np.unique(process, return_index=True)[1]
    shown = set(recorded[["node", "pid"]][first][n_rounds >= _MIN_GPU_ROUNDS].tolist())
    return set(zip(timeline.node.tolist(), timeline.pid.tolist(), strict=True)) <= shown


def _n_without_record(case: Case) -> int:
    """The ranks that the launcher started (WORLD_SIZE) and that have neither a call nor a communicator in the trace."""
    timeline, trace = case.timeline, case.trace
    known = set(zip(timeline.node.tolist(), timeline.pid.tolist(), strict=True))
    sizes = [
        n for node, pid, n in trace.processes[["node", "pid", "nranks"]].tolist() if (node, pid) in known
    ]
    silent = trace.communicators[np.isin(trace.communicators["comm_hash"], timeline.comm_hash)]
    return max(sizes, default=0) - len(known | set(silent[["node", "pid"]].tolist()))


def _with_clocks(evidence: Evidence, case: Case) -> Evidence:
    """The evidence with the alignment of the nodes' clocks, in the rounds that span nodes."""
    of_round = clock_error_ns(case.timeline, case.clocks)
    if of_round is None or not of_round.any():
        return evidence
    nodes = np.unique(case.timeline.node)
    n_apart = int((~np.isfinite(case.clocks.error_ns[nodes])).sum())
    aligned = of_round[np.isfinite(of_round)]
    error_ms = round(float(aligned.max()) / 1e6, 3) if len(aligned) else None
    is_apart = len(aligned) < len(of_round)
    return replace(evidence, clock_error_ms=error_ms, n_clocks_apart=n_apart if is_apart else 0)


def budget_of_case(case: Case) -> Budget:
    """The time budget of the ranks of a case."""
    edges = np.unique(np.concatenate([case.timeline.first[:-1], case.timeline.first[1:] - 1]))
    return budget_of(case.trace, case.limits, edges=case.timeline.rows[edges])


def of_records(trace: Trace) -> tuple[dict[str, object], Evidence]:
    """The counts and the evidence of a source without a ledger: completion of calls, or spans of work."""
    rows, spans = trace.collectives, trace.spans
    pairs = np.unique(rows[rows["seq"] != UNKNOWN][["comm_hash", "seq"]])
    ends = np.concatenate([rows["ts_ns"], spans["ts_ns"] + spans["duration_ns"]])
    begins = np.concatenate([rows["ts_ns"], spans["ts_ns"]])
    unseen = n_without_data(trace)
    n_ranks = max(len(trace.processes), len(np.unique(rows[["node", "pid"]])))
    n_steps = len(np.unique(spans["step"][spans["step"] != UNKNOWN]))
    evidence = Evidence(
        n_ranks=n_ranks - unseen,
        n_ranks_unseen=unseen + _n_not_listed(trace, n_ranks),
        n_rounds=len(pairs),
        n_whole_rounds=len(pairs),
        n_steps=n_steps if len(spans) else None,
        n_records=n_records(trace),
        n_lost_records=sum(trace.lost.values()),
        coverage=trace.coverage if len(spans) else _hangs_only(trace.coverage),
    )
    counts: dict[str, object] = {
        "n_ranks": evidence.n_ranks,
        "n_nodes": len(trace.nodes),
        "n_communicators": len(np.unique(trace.communicators["comm_hash"])),
        "n_rounds": evidence.n_rounds,
        "n_steps": n_steps,
        "n_lost_records": evidence.n_lost_records,
        "n_ranks_unseen": evidence.n_ranks_unseen,
        "seconds": round(float(ends.max() - begins.min()) / 1e9, 3) if len(ends) else 0.0,
    }
    return counts, evidence


def n_records(trace: Trace) -> int:
    """All rows of a trace."""
    return sum(len(getattr(trace, table.name)) for table in ARRAYS)


def n_without_data(trace: Trace) -> int:
    """Processes that the source names without a call, a span or a state."""
    tables = (trace.collectives, trace.calls, trace.spans, trace.snapshots)
    known = {process for table in tables for process in _processes(table)}
    return len(set(_processes(trace.processes)) - known)


def _n_not_listed(trace: Trace, n_listed: int) -> int:
    """Ranks of the largest communicator that the source does not name."""
    sizes = np.concatenate([trace.communicators["nranks"], trace.processes["nranks"]])
    return max(int(sizes.max(initial=0)) - n_listed, 0)


def _processes(table: Array) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = np.unique(table[["node", "pid"]]).tolist()
    return pairs


def _hangs_only(coverage: Coverage) -> Coverage:
    return replace(coverage, blind_spots=tuple(dict.fromkeys([*coverage.blind_spots, SLOWNESS])))
