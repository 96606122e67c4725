"""Verdicts from the rounds on the GPUs, in addition to the verdicts from the arrivals of the hosts.

A rank that is late on the GPU but not on its host is late because of its GPU, or of the work queued there. Ranks that
wait for it have long kernels, and the late rank a short kernel. Where all kernels begin together and take longer than
before, the fabric is slow; where only the kernels of a group take longer, its link. Between machines, the transfers
of NCCL's proxies show the slow connection.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, medians
from stallscope.diagnose.arrays.row_order import flagged
from stallscope.diagnose.causes import Explained, explained, leading
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.evidence_fields import CauseEvidence, merged
from stallscope.diagnose.gpu.delays_of_step import with_sums
from stallscope.diagnose.gpu.gpu_rounds import (
    are_calls_known,
    gpu_trace,
    is_pause,
    n_unnumbered,
    n_without_times,
)
from stallscope.diagnose.gpu.host_before_replays import host_excess
from stallscope.diagnose.gpu.pipeline_stages import is_late_by_stage
from stallscope.diagnose.lateness.late_steps import pace
from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.case import Case, case_of
from stallscope.diagnose.verdicts import gpu_network
from stallscope.events.layout import Array
from stallscope.events.names import Category, CollectiveFlag, GpuKernelFlag
from stallscope.events.trace import Gap, Trace

_NAMES_A_RANK = ("straggler", "device")
_OF_ALL_RANKS = ("change", "inconclusive")
_MIN_ROUNDS = 16  # fewer rounds show no pattern
_SMALL = 0.01  # of the least lateness that is reported for a host, for a GPU that is late in most rounds
_MAX_COVERED = 0.9  # share of the time up to which the plugin recorded only windows of it
_SPINNING = (
    "host_compute",
    "launch_bound",
    "unknown",
)  # causes of a host that waits for room in its launch queue
_MOSTLY_REPLAYS = 0.5  # share of a rank's operations
_BY_HOST = 0.5  # share of a rank's lateness before replays that its host spent in excess of its peers
_WAITS_FOR_HOST = 0.5  # share of a host's lateness for which its GPU waits for it
_PASSED_ON = 0.05  # share of a host's lateness that its GPU may pass on where the queue absorbs it
_COUNT_REPLAYS = "Set STALLSCOPE_NCCL_GRAPHS=1 in the job's environment, which makes NCCL count the replays."
_WITHOUT_GRAPHS = (
    "Record the job without CUDA graphs: NCCL then reports the times of each collective's own kernel."
)
_STAGES = Gap(
    "a GPU is later than the GPUs of other stages of its pipeline, whose work differs",
    "Compare the time of each stage's kernels with an earlier run, or record a job with several pipelines.",
)
_SEEN_BY = "start of the collectives' kernels on the GPUs"


def is_only(trace: Trace) -> bool:
    """Whether a trace has operations on the GPUs, and no arrivals of hosts."""
    return len(trace.gpu_kernels) > 0 and not len(trace.collectives)


def with_replays(trace: Trace, report: Report) -> Report:
    """The report on GPUs only: the time before a replay of a CUDA graph is the host's or the GPU's."""
    return replace(report, verdicts=[_before_replays(trace, verdict) for verdict in report.verdicts])


def _before_replays(trace: Trace, verdict: Verdict) -> Verdict:
    first = verdict.causes[0] if len(verdict.causes) == 1 else None
    if len(verdict.ranks) != 1 or first is None or first.cause.name != "not_recorded":
        return verdict
    if not _are_mostly_replays(_kernels_of(trace, verdict.ranks[0])):
        return verdict
    evidence = merged(first.evidence, CauseEvidence(before_replays=True))
    part = replace(first, evidence=evidence)
    return replace(verdict, causes=[part], advice=part.cause.advice(evidence), summary="")


def _are_mostly_replays(kernels: Array) -> bool:
    is_replay = kernels["flags"] & GpuKernelFlag.IS_REPLAY != 0
    return bool(len(kernels)) and float(is_replay.mean()) >= _MOSTLY_REPLAYS


def _kernels_of(trace: Trace, rank: int) -> Array:
    """The operations of a rank; of several processes that claim the rank, the operations of the first process."""
    for node, pid in trace.processes[["node", "pid"]][trace.processes["rank"] == rank].tolist():
        rows = trace.gpu_kernels
        if len(own := rows[(rows["node"] == node) & (rows["pid"] == pid)]):
            return own
    return trace.gpu_kernels[:0]


def gpu_case(trace: Trace, limits: Thresholds, usd_per_gpu_hour: float | None) -> Case | None:
    """The rounds of a job on its GPUs; None with too few rounds."""
    on_gpus = gpu_trace(trace)
    rows = on_gpus.collectives
    if len(np.unique(rows[["comm_hash", "seq"]])) < _MIN_ROUNDS:
        return None
    return _case_of(on_gpus, limits, usd_per_gpu_hour)


def is_on_gpus(trace: Trace) -> bool:
    """Whether the collectives of a trace arrive when their kernels start: see gpu_trace()."""
    flags = trace.collectives["flags"]
    return len(flags) > 0 and bool(flagged(flags, CollectiveFlag.NUMBERED).all())


def leaves_small_delays(case: Case, on_gpus: Sequence[Verdict]) -> bool:
    """Whether a rank may be late by little in most rounds, and no verdict explains its lateness.

    A slowdown of the whole job explains no difference between ranks. Uneven work does.
    """
    if any(verdict.ranks or verdict.kind not in _OF_ALL_RANKS for verdict in on_gpus):
        return False
    table = case.judged
    typical_ns = by_group(table.process, table.late_ns, case.timeline.n_processes, medians)
    return bool((typical_ns >= _SMALL * case.limits.min_late_ns).any())


def of_small_delays(case: Case) -> Case:
    """The case on GPUs with a lower limit of lateness: kernels start without the delays of a scheduler.

    Single small delays are normal, as the clocks of GPUs vary. A GPU that is late in most rounds is slow.
    """
    limits = replace(case.limits, min_late_ns=int(_SMALL * case.limits.min_late_ns))
    return _case_of(case.trace, limits, case.usd_per_gpu_hour)


def steadily_late(verdicts: Sequence[Verdict], case: Case) -> list[Verdict]:
    """The verdicts on a rank whose GPU works longer in most rounds, or for a share of the time that counts: small
    delays of a host are not reported.
    """
    return [
        verdict
        for verdict in verdicts
        if verdict.kind in _NAMES_A_RANK and _names_gpu(verdict) and _is_steady(verdict, case)
    ]


def _is_steady(verdict: Verdict, case: Case) -> bool:
    n_late, n_steps = verdict.evidence.n_late_steps or 0, verdict.evidence.n_steps or 1
    late_ns = 1e6 * verdict.late_ms["median"] if verdict.late_ms else 0.0
    is_costly = n_late * late_ns >= case.limits.late_step_share * n_steps * case.step_ns
    return is_costly or n_late >= case.limits.steady_share * n_steps


def _names_gpu(verdict: Verdict) -> bool:
    return bool(verdict.causes) and verdict.causes[0].cause.name == "gpu_slow"


def _case_of(on_gpus: Trace, limits: Thresholds, usd_per_gpu_hour: float | None) -> Case:
    """The case on GPUs. GPUs of a model differ: a GPU that is late in most steps needs the share of a late step."""
    limits = replace(limits, steady_step_share=max(limits.steady_step_share, limits.late_step_share))
    case = case_of(on_gpus, limits, usd_per_gpu_hour, is_numbered=True)
    pauses = is_pause(case.timeline.interval_ns)
    tables = (with_sums(table, case.matched.late_ns).without(pauses) for table in (case.table, case.judged))
    table, judged = tables
    return replace(case, table=table, judged=judged, pace=pace(case.timeline, judged, limits))


def with_gaps(trace: Trace, limits: Thresholds) -> Trace:
    """The trace with a gap for each reason why many collectives on the GPUs form no rounds: they have no number or no
    times of their own.
    """
    min_n = limits.lost_share * len(trace.gpu_kernels)
    gaps = trace.coverage.gaps
    if (n := n_unnumbered(trace.gpu_kernels)) > min_n:
        reason = (
            f"{n:,} replays of collectives in CUDA graphs have no round numbers: the GPUs cannot be compared"
        )
        gaps += (Gap(reason, _COUNT_REPLAYS),)
    if (n := n_without_times(trace.gpu_kernels)) > min_n:
        reason = (
            f"{n:,} collectives on the GPUs cannot be compared: some ranks have the times of other kernels"
        )
        gaps += (Gap(reason, _WITHOUT_GRAPHS),)
    return replace(trace, coverage=replace(trace.coverage, gaps=gaps))


def joined(trace: Trace, case: Case, on_hosts: Report, on_gpus: Report) -> Report:
    """The report from the hosts with the verdicts that only the GPUs show.

    A rank that the hosts show as late keeps that verdict: its GPU starts late because its host does. Where a graph
    replays the collectives, hosts hardly arrive: then the rounds on the GPUs are the evidence for the answer.
    """
    if on_hosts.examined.get("n_steps", 0) < _MIN_ROUNDS <= on_gpus.examined.get("n_steps", 0):
        on_hosts = replace(on_hosts, examined=on_gpus.examined, evidence=on_gpus.evidence)
    by_gpu = held_by_gpu(trace, on_gpus.verdicts)
    of_hosts = [each for each in on_hosts.verdicts if is_of_host(trace, case, each, by_gpu)]
    named = {rank for verdict in of_hosts for rank in verdict.ranks}
    new = verdicts(trace, case, on_gpus.verdicts, named)
    if not new:
        is_hidden = any(_is_by_stage(case, verdict) for verdict in on_gpus.verdicts)
        return _with_gap(replace(on_hosts, verdicts=of_hosts), _STAGES if is_hidden else None)
    return replace(on_hosts, verdicts=[*(each for each in of_hosts if not is_undecided(each)), *new])


def held_by_gpu(trace: Trace, on_gpus: Sequence[Verdict]) -> set[int]:
    """The ranks whose kernels were enqueued in time, and waited on the GPU."""
    ranks = {verdict.ranks[0] for verdict in on_gpus if len(verdict.ranks) == 1 and _names_gpu(verdict)}
    return {rank for rank in ranks if are_calls_known(_kernels_of(trace, rank))}


def is_of_host(trace: Trace, case: Case, verdict: Verdict, by_gpu: set[int]) -> bool:
    """Whether a verdict from the hosts holds where the rounds on the GPUs are known. by_gpu: see held_by_gpu()."""
    return not is_of_full_queue(trace, case, verdict, by_gpu) and not _is_absorbed(trace, case, verdict)


def _is_absorbed(trace: Trace, case: Case, verdict: Verdict) -> bool:
    """Whether the launch queues absorb the delays of late hosts: their GPUs, which were recorded all the time, hardly
    wait for them.
    """
    if verdict.kind != "straggler" or not verdict.ranks or _covered(trace) < _MAX_COVERED:
        return False
    return set(verdict.ranks) <= _kept_busy(trace, case, verdict, most=_PASSED_ON)


def _kept_busy(trace: Trace, case: Case, verdict: Verdict, *, most: float) -> set[int]:
    """The ranks of a verdict whose GPUs hardly wait for their late hosts. most: share of the hosts' lateness."""
    limit = most * _late_share(trace, verdict)
    return {rank for rank, share in _idle_shares(case).items() if share < limit} & set(verdict.ranks)


def _late_share(trace: Trace, verdict: Verdict) -> float:
    """The share of the time for which the hosts of a verdict were late."""
    late_ns = (verdict.evidence.n_late_steps or 0) * 1e6 * (verdict.late_ms or {"median": 0.0})["median"]
    hosts = trace.collectives
    spans_ns = [int(np.ptp(hosts["ts_ns"][hosts["node"] == node])) for node in np.unique(hosts["node"])]
    return late_ns / max([*spans_ns, 1])


def _idle_shares(case: Case) -> dict[int, float]:
    """By rank, the share of the recorded time for which its GPU waited for its host; inf where calls are unknown."""
    timeline, idle = case.timeline, Category.OTHER_OFF - 1
    is_counted = ~timeline.is_first & ~is_pause(timeline.interval_ns)
    idle_ns = np.diff(timeline.rows["ledger_ns"][:, idle], prepend=0) * is_counted
    out = {}
    for process, rank in enumerate(timeline.rank.tolist()):
        own = timeline.process == process
        share = float(idle_ns[own].sum()) / max(float(timeline.interval_ns[own & is_counted].sum()), 1.0)
        out[rank] = share if are_calls_known(_kernels_of(case.trace, rank)) else math.inf
    return out


def is_of_full_queue(trace: Trace, case: Case, verdict: Verdict, by_gpu: set[int]) -> bool:
    """Whether hosts are late because their GPUs are: a host spins in a launch until its launch queue has room.

    by_gpu: see held_by_gpu().
    """
    if not verdict.causes or verdict.causes[0].cause.name not in _SPINNING:
        return False
    if verdict.kind == "imbalance" and not verdict.ranks:
        return sum(_idle_shares(case).values()) < _WAITS_FOR_HOST * _late_share(trace, verdict)
    if verdict.kind != "straggler":
        return False
    ranks = set(verdict.ranks)
    return ranks <= by_gpu or ranks <= by_gpu | _kept_busy(trace, case, verdict, most=_WAITS_FOR_HOST)


def verdicts(trace: Trace, case: Case, on_gpus: Sequence[Verdict], named: set[int]) -> list[Verdict]:
    """The verdicts of the GPUs on ranks that are not named yet; otherwise, if no rank is named, on the network or the
    fabric.

    A late host slows down the rounds of all ranks, so these rounds do not show a slow fabric where a rank is late. The
    transfers between machines still show a slow connection.
    """
    of_ranks = [
        verdict
        for verdict in on_gpus
        if verdict.kind in _NAMES_A_RANK and not named & set(verdict.ranks) and _is_of_device(case, verdict)
    ]
    late = [on_device(verdict, trace, case) for verdict in of_ranks if not _is_by_host(trace, verdict)]
    if late or named:
        return late
    fabric = [verdict for verdict in on_gpus if verdict.kind in ("link", "change")]
    return gpu_network.verdicts(trace, case) or ([] if of_ranks else fabric)


def _is_of_device(case: Case, verdict: Verdict) -> bool:
    """Whether the delays can be a fault of a GPU: not a single delay (an evaluation), or the schedule of a pipeline."""
    return (verdict.n_late_rounds or 0) > 1 and not _is_by_stage(case, verdict)


def _is_by_stage(case: Case, verdict: Verdict) -> bool:
    """Whether all ranks of a verdict are late only against other stages of their pipeline."""
    late_ns = 1e6 * verdict.late_ms["median"] if verdict.late_ms else 0.0
    processes = np.flatnonzero(np.isin(case.timeline.rank, verdict.ranks)).tolist()
    kernels = case.trace.gpu_kernels
    is_late = [is_late_by_stage(case, kernels, process, late_ns) for process in processes]
    return bool(is_late) and all(is_late)


def _with_gap(report: Report, gap: Gap | None) -> Report:
    if gap is None or report.evidence is None:
        return report
    coverage = replace(report.evidence.coverage, gaps=(*report.evidence.coverage.gaps, gap))
    return replace(report, evidence=replace(report.evidence, coverage=coverage))


def _is_by_host(trace: Trace, verdict: Verdict) -> bool:
    """Whether a rank's kernels are late because its host enqueues them late: the arrivals of the hosts show how late.

    Hosts that never wait for each other drift apart, so that a rank may be late in most rounds without a fault.
    """
    if len(verdict.ranks) != 1 or not verdict.causes or verdict.causes[0].cause.name != "not_recorded":
        return False
    kernels = _kernels_of(trace, verdict.ranks[0])
    return are_calls_known(kernels) and not _are_mostly_replays(kernels)


def is_undecided(verdict: Verdict) -> bool:
    """Whether the arrivals of hosts do not show which GPU, link or fabric is slow."""
    share = verdict.evidence.host_share
    is_on_gpus = verdict.kind == "change" and share is not None and share < 0.5
    return not verdict.ranks and (is_on_gpus or verdict.kind in ("inconclusive", "link"))


def on_device(verdict: Verdict, trace: Trace, case: Case) -> Verdict:
    """The verdict on a rank whose kernels start late, and whose recorded arrivals on the host are in time."""
    if by_host := _by_host_before_replays(verdict, trace, case):
        return by_host
    evidence = CauseEvidence(seen_by=_SEEN_BY)
    excess_ns = sum(part.excess_ns for part in verdict.causes)
    part = Explained(cause("gpu_slow"), 1.0, excess_ns, evidence)
    cost = verdict.cost
    if cost and _covered(trace) < _MAX_COVERED:
        cost = replace(cost, is_lower_bound=True, at_most_gpu_seconds=None, at_most_usd=None)
    return replace(
        verdict, kind="device", causes=[part], cost=cost, advice=part.cause.advice(evidence), summary=""
    )


def _late_steps_of(case: Case, process: tuple[int, int], verdict: Verdict) -> tuple[Array, Array]:
    """The late steps of a process, by the threshold of the verdict on it: their times on the common clock, and their
    lateness; int64, float64 (n,).
    """
    if verdict.late_ms is not None and verdict.late_ms["median"] * 1e6 < case.limits.min_late_ns:
        case = of_small_delays(case)
    late = [each for each in case.late_steps if case.process_key(each.process) == process]
    rows = np.array([each.peak_row for each in late], np.int64)
    return case.arrival_ns[rows], np.array([each.late_ns for each in late])


def _by_host_before_replays(verdict: Verdict, trace: Trace, case: Case) -> Verdict | None:
    """The verdict on the host of a rank that reaches replays of graphs late, where hosts do not arrive at replays."""
    kernels = _kernels_of(trace, verdict.ranks[0]) if len(verdict.ranks) == 1 else trace.gpu_kernels[:0]
    if not _are_mostly_replays(kernels):
        return None
    process = (int(kernels["node"][0]), int(kernels["pid"][0]))
    hosts = trace.collectives
    if len(hosts[(hosts["node"] == process[0]) & (hosts["pid"] == process[1])]) >= _MIN_ROUNDS:
        return None
    at_ns, late_ns = _late_steps_of(case, process, verdict)
    excess = host_excess(trace, process, case.clocks, at_ns=at_ns, late_ns=late_ns)
    parts = explained(excess) if excess else []
    if sum(part.share for part in parts if part.cause.name != "unknown") < _BY_HOST:
        return None
    advice = [line for part in leading(parts) for line in part.cause.advice(part.evidence)]
    return replace(verdict, kind="straggler", causes=parts, advice=advice, summary="")


def _covered(trace: Trace) -> float:
    """The share of the job's seconds in which the plugin recorded operations."""
    recorded, all_seconds = (
        len(np.unique(rows["ts_ns"] // 10**9)) for rows in (trace.gpu_kernels, trace.collectives)
    )
    return recorded / max(all_seconds, 1)
