"""The whole diagnosis, step by step: a trace goes in, a report comes out."""

from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.arrays.parallel import both, keep_freed_memory
from stallscope.diagnose.causes import Explained
from stallscope.diagnose.causes._registry import cause
from stallscope.diagnose.cost.delays import (
    as_steps_grew,
    delays_by_process,
    delays_in_all,
    device_delays,
    grown_as_steps,
    total,
)
from stallscope.diagnose.gpu.device_findings import on_device
from stallscope.diagnose.gpu.driver_state import with_gpu_states
from stallscope.diagnose.gpu.slow_gpu import SlowDevice
from stallscope.diagnose.hangs import before_attach
from stallscope.diagnose.hangs.deadlock import Wedged, left_by_the_dead, wedged
from stallscope.diagnose.hangs.mismatch import Mismatch, mismatches
from stallscope.diagnose.hangs.missing_rank import Stuck, patience_ns, stuck
from stallscope.diagnose.lateness.imbalance import Moving, SlowStage, moving, slow_stage, with_more_work
from stallscope.diagnose.lateness.late_steps import LateStep, late_steps
from stallscope.diagnose.lateness.recurrence import alone, one_offs, recurring, unsure
from stallscope.diagnose.lateness.slowdown import slowdown
from stallscope.diagnose.processes import single
from stallscope.diagnose.processes.cuda_errors import with_failures
from stallscope.diagnose.processes.exits import with_deaths
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import CostSaid, Report, Verdict
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import jobs
from stallscope.diagnose.timeline.case import Case, case_of
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.timeline.unseen_ranks import n_unseen
from stallscope.diagnose.verdicts import late_verdicts, without_ledger
from stallscope.diagnose.verdicts.late_verdicts import Seen, between, cost_said
from stallscope.events.trace import Trace

_MANY_ROWS = 1 << 20
_NO_STEP = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Findings:
    """What a case shows, before it is put in words.

    odd: verdicts on rounds entered differently. late: all late steps. named: those of each rank to name. device: slow
    GPUs by process. stage: a stage with more work. uneven: late steps that no rank owns; is_on_device: of the GPUs.
    """

    case: Case
    odd: list[Verdict]
    late: list[LateStep]
    named: dict[int, list[LateStep]]
    device: dict[int, SlowDevice]
    stage: SlowStage | None
    uneven: Moving | None
    is_on_device: bool = False


def diagnose(
    trace: Trace, limits: Thresholds | None = None, *, usd_per_gpu_hour: float | None = None
) -> Report:
    """The report on a trace.

    usd_per_gpu_hour: price of a GPU hour; costs are in GPU seconds only where it is None.
    """
    limits = limits or Thresholds()
    if len(trace.collectives) >= _MANY_ROWS:
        keep_freed_memory()
    parts = jobs.parts(trace)
    reports = [_whole_report(part, limits, usd_per_gpu_hour) for part in parts]
    return jobs.told_apart(reports, parts) if len(parts) > 1 else reports[0]


def _whole_report(trace: Trace, limits: Thresholds, usd_per_gpu_hour: float | None) -> Report:
    """The report on one job, with what broke and what its GPUs told."""
    found = with_failures(trace, _report(trace, limits, usd_per_gpu_hour))
    return with_gpu_states(trace, with_deaths(trace, found))


def _report(trace: Trace, limits: Thresholds, usd_per_gpu_hour: float | None) -> Report:
    """The report by what the source tells: calls only, work and completion, or arrivals with ledgers."""
    if before_attach.is_for(trace):
        found = before_attach.report(trace, limits=limits, usd_per_gpu_hour=usd_per_gpu_hour)
        if found or not len(trace.calls):
            return found or before_attach.nothing(trace)
    if single.is_single(trace):
        return single.report(trace, limits=limits, usd_per_gpu_hour=usd_per_gpu_hour)
    case = case_of(trace, limits, usd_per_gpu_hour)
    if without_ledger.is_told(trace):
        return without_ledger.report(
            trace, mismatch_verdicts(case), limits=limits, usd_per_gpu_hour=usd_per_gpu_hour
        )
    return report(findings(case))


def findings(case: Case) -> Findings:
    """What a case with ledgers shows."""
    line, table, limits = case.line, case.judged, case.limits
    found, odd = both(
        lambda: late_steps(line, case.met, table, program=case.plan.program, usual=case.pace, limits=limits),
        lambda: mismatch_verdicts(case),
        n=len(line.rows),
    )
    named = recurring(found, line.n_processes, least_ns=case.pace.least_ns, limits=limits)
    gpus = on_device(case, found)
    unexplained = [late for late in found if late.process not in gpus.slow]
    uneven = moving(line, unexplained, named, table=table, least_ns=case.pace.least_ns, limits=limits)
    return Findings(
        case=case,
        odd=odd,
        late=found,
        named=named,
        device=gpus.slow,
        stage=slow_stage(line, case.plan, table, step_ns=case.step_ns, limits=limits) or gpus.stage,
        uneven=uneven or gpus.uneven,
        is_on_device=uneven is None,
    )


def report(found: Findings) -> Report:
    """The findings as verdicts."""
    case, named = found.case, found.named
    looked_at = late_verdicts.seen(case)
    uneven = found.uneven
    if uneven and named:
        _ = case.waits  # both need it
    everyones = _all_late(found)
    on_the_move, stragglers = both(
        lambda: [moving_verdict(found, uneven, looked_at)] if uneven else [],
        lambda: _stragglers(case, named, looked_at, everyones=everyones),
        n=len(case.line.rows),
    )
    verdicts = [
        *found.odd,
        *([] if found.odd else standstill(case)),
        *stragglers,
        *(
            late_verdicts.device(
                case,
                p,
                one,
                grown_as_steps(case, p, device_delays(case, p, one.late), among=everyones),
                looked_at=looked_at,
            )
            for p, one in found.device.items()
            if p not in named
        ),
        *([stage_verdict(case, found.stage)] if found.stage else []),
        *on_the_move,
    ]
    once, benign = _once(found, looked_at)
    verdicts += once
    if not verdicts:
        verdicts = alike(case) or unsure_verdicts(found, looked_at)
    return Report(
        source=case.trace.source,
        looked_at=counted(case),
        verdicts=[replace(verdict, summary=text.summary(verdict)) for verdict in verdicts],
        benign=benign + _warm_up(case),
    )


def mismatch_verdicts(case: Case) -> list[Verdict]:
    """One for each set of ranks that differ in a communicator: after a first time they are often off for good."""
    found = mismatches(case.line, case.plan, case.met, arrival_ns=case.arrival_ns)
    alike: dict[tuple[int, tuple[int, ...]], list[Mismatch]] = {}
    for one in sorted(found, key=lambda one: one.at_ns):
        alike.setdefault((one.comm, tuple(sorted(set(one.odd.tolist())))), []).append(one)
    stands_ns = _stands_still_ns(case) if found else 0
    return [_mismatch(case, some, stands_ns=stands_ns) for some in alike.values()]


def _stands_still_ns(case: Case) -> int:
    """For how long nobody has made a call at the end, where that is longer than is usual; else 0."""
    for_ns = case.now_ns - int(case.arrival_ns.max())
    return for_ns if for_ns >= patience_ns(case.line, case.arrival_ns, case.limits) else 0


def standstill(case: Case) -> list[Verdict]:
    """The hang at the end of the trace: of missing ranks, or of all."""
    now_ns = case.now_ns
    hang = stuck(case.line, case.clocks, case.trace, now_ns=now_ns, limits=case.limits) or left_by_the_dead(
        case.line, case.clocks, trace=case.trace, now_ns=now_ns, limits=case.limits
    )
    if hang:
        return [_hang(case, hang)]
    all_wait = wedged(case.line, case.plan, case.clocks, trace=case.trace, now_ns=now_ns, limits=case.limits)
    return [_wedged(case, all_wait)] if all_wait else []


def alike(case: Case) -> list[Verdict]:
    """All ranks slow alike: said only when nothing else is."""
    change = slowdown(case.line, case.judged, case.limits) if case.plan.has_steps.all() else None
    if change is None:
        return []
    on_host = change.host_share >= 0.5
    why = (
        "every rank slowed down alike: look at what they share (input, file system, network, code)"
        if on_host
        else "no rank is late on its host: device or fabric, rank unknown"
    )
    if not on_host and n_unseen(case.line, case.trace):
        why += ", or a rank that is not in this trace"
    return [
        Verdict(
            kind="inconclusive",
            summary="",
            n_rounds=case.met.n_rounds,
            since_ns=wall_ns(case.trace, int(case.line.node[0]), change.at_ns),
            n_incidents=1,
            confidence=0.5,
            abstained_because=why,
            advice=[
                "Record the GPUs' side too (NCCL profiler plugin, NVML clocks), which tells the ranks apart."
            ]
            if not on_host
            else [
                "Compare with the time before: deployment, data shard, shared file system, co-located jobs."
            ],
            evidence={
                "step_ms_before": round(change.before_ns / 1e6, 3),
                "step_ms_after": round(change.after_ns / 1e6, 3),
                "host_share": round(change.host_share, 3),
                "n_steps": change.n_steps,
            },
        )
    ]


def _wedged(case: Case, found: Wedged) -> Verdict:
    line = case.line
    ranks = sorted(int(line.rank[process]) for process in found.odd)
    row = line.rows[found.row]
    because = None if ranks else _why_nobody(found)
    evidence: dict[str, object] = {"waited_s": round(found.for_ns / 1e9, 1)}
    if ranks:
        evidence["crossed_order"] = True
    return Verdict(
        kind="hang",
        summary="",
        ranks=ranks,
        nodes=sorted({case.trace.nodes[int(line.node[process])] for process in found.odd}),
        comm_hash=f"{int(row['comm_hash']):016x}",
        first_round=int(row["seq"]),
        last_round=int(row["seq"]),
        n_rounds=case.met.n_rounds,
        since_ns=wall_ns(case.trace, case.first_node, found.since_ns),
        n_incidents=1,
        confidence=0.85 if ranks else 0.6,
        victims=sorted(int(line.rank[process]) for process in found.waiting),
        cost=_cost(case, found.for_ns, len(found.waiting)),
        advice=[_against_wedge(found, ranks)],
        abstained_because=because,
        evidence=evidence,
    )


def _against_wedge(found: Wedged, ranks: list[int]) -> str:
    if ranks:
        return "Its collectives on two communicators come in another order than those of the others: make it the same."
    if found.is_crossed:
        return "Issue the collectives of both communicators in the same order on all ranks."
    return "Look for Xid errors and NVLink or network faults on all hosts; dump the stacks before a restart."


def _why_nobody(found: Wedged) -> str:
    if found.is_crossed:
        return "they entered the rounds of two communicators in different orders, and no majority tells whose is odd"
    if not found.n_unseen:
        return "every rank has entered every round: the device or the fabric holds them"
    return f"the ranks in this trace have entered every round; {found.n_unseen} more of the communicator are not in it"


def counted(case: Case) -> dict[str, object]:
    return {
        "n_ranks": case.line.n_processes,
        "n_nodes": len(np.unique(case.line.node)),
        "n_communicators": len(np.unique(case.line.comm_hash)),
        "n_rounds": case.met.n_rounds,
        "n_steps": len(np.unique(case.judged.step)),
        "n_lost_records": sum(case.trace.lost.values()),
        "n_ranks_unseen": n_unseen(case.line, case.trace),
        "seconds": round(case.observed_ns / 1e9, 3),
    }


def _all_late(found: Findings) -> list[LateStep]:
    """The late steps of hosts and of GPUs."""
    return [*found.late, *(late for one in found.device.values() for late in one.late)]


def _stragglers(
    case: Case, named: dict[int, list[LateStep]], looked_at: Seen, *, everyones: list[LateStep]
) -> list[Verdict]:
    """One verdict per named rank, or one for a node all of whose ranks are named; the costliest first.

    everyones: all late steps of the trace.
    """
    delays = delays_by_process(case, [late for mine in named.values() for late in mine])
    delays = as_steps_grew(case, delays, everyones=everyones)
    groups = by_node(case, sorted(named))
    alone = [group[0] for group in groups if len(group) == 1]
    more = with_more_work(named, alone, n_processes=case.line.n_processes, limits=case.limits)
    if more:
        uneven = late_verdicts.with_more_work(case, more, delays, looked_at=looked_at)
        groups = [group for group in groups if group[0] not in more]
    verdicts = [
        *([uneven] if more else []),
        *(late_verdicts.straggler(case, group, delays, looked_at=looked_at) for group in groups),
    ]
    return costliest_first([verdict for verdict in verdicts if not is_nothing(case, verdict)])


def is_nothing(case: Case, verdict: Verdict) -> bool:
    """Small delays for which nobody was seen to wait."""
    if verdict.cost is None or verdict.cost.may_be_gpu_seconds > 0 or verdict.late_ms is None:
        return False
    return verdict.late_ms["median"] * 1e6 < case.limits.clear_factor * case.pace.least_ns


def costliest_first(verdicts: list[Verdict]) -> list[Verdict]:
    """Verdicts in order of what they cost; those of equal cost as they come."""
    return sorted(verdicts, key=lambda verdict: -(verdict.cost.may_be_gpu_seconds if verdict.cost else 0.0))


def by_node(case: Case, processes: list[int]) -> list[list[int]]:
    """Processes one by one, but together those of a node on which no other ranks are."""
    whole: list[list[int]] = []
    nodes, counts = np.unique(case.line.node, return_counts=True)
    for node, n_ranks in zip(nodes.tolist(), counts.tolist(), strict=True):
        own = [process for process in processes if case.line.node[process] == node]
        if len(own) == n_ranks > 1 and len(nodes) > 1:
            whole.append(own)
        else:
            whole.extend([process] for process in own)
    return whole


def stage_verdict(case: Case, stage: SlowStage) -> Verdict:
    ranks = sorted(int(case.line.rank[process]) for process in stage.processes)
    others = sorted(set(case.line.rank.tolist()) - set(ranks))
    rows = case.arrival_ns[case.judged.first_row]
    return Verdict(
        kind="imbalance",
        summary="",
        nodes=[],
        n_rounds=case.met.n_rounds,
        n_incidents=1,
        late_ms={"median": round(stage.excess_ns / 1e6, 3), "max": round(stage.excess_ns / 1e6, 3)},
        since_ns=wall_ns(case.trace, case.first_node, float(rows.min())),
        until_ns=wall_ns(case.trace, case.first_node, float(rows.max())),
        confidence=0.9,
        victims=others,
        # Calls on several communicators overlap: no more was waited than the stage took longer. Some of it is waited
        # for in any pipeline.
        cost=between(
            case,
            0.0,
            min(stage.wait_share * case.step_ns, stage.excess_ns) * stage.n_steps * len(others) / 1e9,
            observed_ns=case.observed_ns,
        ),
        advice=["Move work between the stages: no machine is bad, the slow stage has more to do."],
        evidence={
            "slow_stage": ranks,
            "wait_share": round(stage.wait_share, 3),
            "n_steps": stage.n_steps,
            "step_ms": round(case.step_ns / 1e6, 3),
        },
    )


def unsure_verdicts(found: Findings, looked_at: Seen) -> list[Verdict]:
    """Clear late steps of ranks that chance may have chosen: something is slow, nobody is accused."""
    case = found.case
    doubtful = unsure(
        found.late,
        found.named,
        least_ns=case.pace.least_ns,
        long_ns=case.limits.one_off_share * looked_at.observed_ns,
        limits=case.limits,
    )
    if not doubtful:
        return []
    delays = delays_in_all(case, [late for mine in doubtful.values() for late in mine])
    verdict = late_verdicts.moving(case, delays, looked_at=looked_at)
    ranks = sorted(int(case.line.rank[process]) for process in doubtful)
    because = "the late steps are too few, among so many ranks, to be more than chance"
    return [
        replace(
            verdict,
            kind="inconclusive",
            confidence=0.5,
            abstained_because=because,
            advice=[
                "Look again after more steps: a rank that is late for a reason of its own will be late again."
            ],
            evidence=verdict.evidence | {"suspects": ranks, "moves": False},
        )
    ]


def moving_verdict(found: Findings, uneven: Moving, looked_at: Seen) -> Verdict:
    case = found.case
    if not found.is_on_device:
        return late_verdicts.moving(case, delays_in_all(case, uneven.late), looked_at=looked_at)
    by_process: dict[int, list[LateStep]] = {}
    for late in uneven.late:
        by_process.setdefault(late.process, []).append(late)
    parts = [device_delays(case, process, mine) for process, mine in by_process.items()]
    return late_verdicts.moving_on_devices(case, total(parts), looked_at=looked_at)


def _once(found: Findings, looked_at: Seen) -> tuple[list[Verdict], list[dict[str, object]]]:
    """Delays seen once: a verdict when they took much of the time looked at and no other rank had the like; else a
    remark.
    """
    case, verdicts, remarks = found.case, [], []
    once = one_offs(found.late, case.limits)
    told = {id(late) for late in alone(once, found.late, named=found.named, node=case.line.node)}
    for late in once:
        if id(late) not in told or late.excess_ns < case.limits.one_off_share * looked_at.observed_ns:
            remarks.append(once_remark(case, late))
            continue
        delays = delays_by_process(case, [late])[late.process]
        verdicts.append(late_verdicts.once(case, late.process, delays, looked_at=looked_at))
    return verdicts, remarks


def once_remark(case: Case, late: LateStep) -> dict[str, object]:
    """A delay seen once, as a remark."""
    return {
        "what": "one delay, not repeated",
        "rank": int(case.line.rank[late.process]),
        "late_ms": round(late.late_ns / 1e6, 3),
        "at_ns": wall_ns(case.trace, case.first_node, float(case.arrival_ns[late.peak_row])),
    }


def _cost(case: Case, still_ns: int, n_waiting: int) -> CostSaid:
    """What a standstill cost that began with the last arrivals."""
    gpu_seconds, observed_ns = still_ns * n_waiting / 1e9, case.observed_ns + still_ns
    return cost_said(case, gpu_seconds, is_lower_bound=True, observed_ns=observed_ns)


def _hang(case: Case, hang: Stuck) -> Verdict:
    line = case.line
    ranks = sorted(hang.ranks)
    doing = list(hang.doing)
    evidence: dict[str, object] = {"doing": doing, "waited_s": round(hang.for_ns / 1e9, 1)}
    if hang.is_circle:
        evidence["is_circle"] = True
    why = cause("missing_rank")
    gone = all(not told["is_alive"] and "has_hung" not in told for told in doing)
    return Verdict(
        kind="hang",
        summary="",
        ranks=ranks,
        nodes=sorted({case.trace.nodes[node] for node in hang.nodes}),
        comm_hash=f"{int(line.comm_hash[hang.comm]):016x}",
        first_round=hang.seq,
        last_round=hang.seq,
        n_late_rounds=1,
        n_rounds=case.met.n_rounds,
        since_ns=wall_ns(case.trace, case.first_node, hang.since_ns),
        n_incidents=1,
        causes=[Explained(why, 1.0, float(hang.for_ns), evidence)],
        confidence=0.95 if not hang.is_circle else 0.7,
        victims=sorted(int(line.rank[process]) for process in hang.waiting),
        cost=_cost(case, hang.for_ns, len(hang.waiting)),
        advice=why.advice(
            {
                "is_alive": not gone,
                "is_out_of_memory": any(told.get("oom_killed") for told in doing),
                **{
                    name: next((told[name] for told in doing if name in told), None)
                    for name in ("at", "state", "exit_status", "failed_call")
                },
            }
        ),
        evidence=evidence,
    )


def _mismatch(case: Case, alike: list[Mismatch], *, stands_ns: int) -> Verdict:
    """alike: in order of time. stands_ns: for how long the job has stood still since."""
    line, found = case.line, alike[0]
    ranks = sorted(int(line.rank[process]) for process in found.odd)
    return Verdict(
        kind="mismatch",
        summary="",
        ranks=ranks,
        nodes=sorted({case.trace.nodes[int(line.node[process])] for process in found.odd}),
        comm_hash=f"{int(line.comm_hash[found.comm]):016x}",
        first_round=found.seq,
        last_round=max(one.seq for one in alike),
        n_late_rounds=len(alike),
        n_rounds=case.met.n_rounds,
        since_ns=wall_ns(case.trace, case.first_node, found.at_ns),
        n_incidents=1,
        confidence=0.9,
        victims=sorted({int(line.rank[process]) for process in found.present} - set(ranks)),
        cost=_cost(case, stands_ns, line.n_processes - len(ranks)) if stands_ns else None,
        advice=[
            "Compare the code path of these ranks in that step: a branch, a shape or a batch differs between ranks."
        ],
        evidence={"calls": list(found.calls)}
        | ({"waited_s": round(stands_ns / 1e9, 1)} if stands_ns else {}),
    )


def _warm_up(case: Case) -> list[dict[str, object]]:
    """The steps left out at the start, said when they were longer than the usual ones."""
    early = np.unique(case.table.step[case.table.step < case.judged.step.min(initial=_NO_STEP)])
    if len(early) <= case.limits.warm_up_steps:
        return []
    return [{"what": "slow steps at the start (warm-up), not judged", "n_steps": len(early)}]
