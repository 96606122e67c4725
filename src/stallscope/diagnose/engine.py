"""The whole diagnosis, step by step: a trace goes in, a report comes out."""

from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose import single, text, told
from stallscope.diagnose.blame import (
    Cells,
    LateStep,
    Pace,
    cells,
    judged,
    late_steps,
    one_offs,
    pace,
    recurring,
)
from stallscope.diagnose.causes import Excess, Explained, explained
from stallscope.diagnose.causes.registry import cause
from stallscope.diagnose.clocks import Clocks, aligned, wall_ns
from stallscope.diagnose.cost import Cost, cost
from stallscope.diagnose.device import SlowDevice, device_excess_ns, released_late, slow_devices
from stallscope.diagnose.excess import excess_ns, held_ns, ledger_excess_ns
from stallscope.diagnose.hang import Mismatch, Stuck, mismatches, stuck
from stallscope.diagnose.imbalance import Moving, SlowStage, moving, slow_stage
from stallscope.diagnose.period import period_steps
from stallscope.diagnose.programs import Programs, programs
from stallscope.diagnose.rounds import Rounds, rounds
from stallscope.diagnose.slowdown import slowdown
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import Timeline, timeline
from stallscope.diagnose.verdict import CostSaid, Report, Verdict
from stallscope.diagnose.wedged import Wedged, wedged
from stallscope.events.layout import Array
from stallscope.events.names import N_CATEGORIES, CollectiveFlag
from stallscope.events.trace import Trace

_MOST_EXPLAINED = 200  # late steps whose ledger is looked at: the largest ones


@dataclass(frozen=True)
class Case:
    """What all steps of the diagnosis share. table: all steps; judged: those that are not warm-up."""

    trace: Trace
    line: Timeline
    clocks: Clocks
    plan: Programs
    met: Rounds
    table: Cells
    judged: Cells
    pace: Pace
    limits: Thresholds
    usd_per_gpu_hour: float | None

    @property
    def arrival_ns(self) -> Array:
        """Arrivals of all rows on one clock, that of the first node."""
        return self.clocks.arrival_ns

    @property
    def first_node(self) -> int:
        """The node whose clock arrival_ns are on."""
        return int(self.line.node.min())

    @property
    def step_ns(self) -> float:
        """The usual step."""
        return self.pace.step_ns


def diagnose(
    trace: Trace, limits: Thresholds | None = None, *, usd_per_gpu_hour: float | None = None
) -> Report:
    """The report on a trace.

    usd_per_gpu_hour: price of a GPU hour; costs are in GPU seconds only where it is None.
    """
    limits = limits or Thresholds()
    if single.is_single(trace):
        return single.report(trace, limits=limits, usd_per_gpu_hour=usd_per_gpu_hour)
    case = _case(trace, limits, usd_per_gpu_hour)
    odd = [
        _mismatch(case, one) for one in mismatches(case.line, case.plan, case.met, arrival_ns=case.arrival_ns)
    ]
    if told.is_told(trace):
        return told.report(trace, odd, limits=limits, usd_per_gpu_hour=usd_per_gpu_hour)
    line, table = case.line, case.judged
    found = late_steps(line, case.met, table, usual=case.pace, limits=limits)
    named = recurring(found, line.n_processes, least_ns=case.pace.least_ns, limits=limits)
    device = _slow_devices(case, found)
    stage = slow_stage(line, case.plan, table, step_ns=case.step_ns, limits=limits)
    unexplained = [late for late in found if late.process not in device]
    uneven = moving(line, unexplained, named, table=table, least_ns=case.pace.least_ns, limits=limits)
    verdicts = [
        *odd,
        *([] if odd else _standstill(case)),
        *_stragglers(case, named),
        *(_device(case, process, one) for process, one in device.items() if process not in named),
        *([_stage(case, stage)] if stage else []),
        *([_moving(case, uneven)] if uneven else []),
    ]
    once, benign = _once(case, one_offs(found, limits))
    verdicts += once
    if not verdicts:
        verdicts = _alike(case)
    return Report(
        source=trace.source,
        looked_at=_looked_at(case),
        verdicts=[replace(verdict, summary=text.summary(verdict)) for verdict in verdicts],
        benign=benign + _warm_up(case),
    )


def _slow_devices(case: Case, found: list[LateStep]) -> dict[int, SlowDevice]:
    """GPUs that are slow by their own times; without such times, by when their ranks are released."""
    excess = device_excess_ns(case.line, case.plan)
    if excess.any():
        return slow_devices(case.judged, excess, usual=case.pace, limits=case.limits, found=found)
    return released_late(
        case.line, case.judged, case.met, clocks=case.clocks, step_ns=case.step_ns, limits=case.limits
    )


def _standstill(case: Case) -> list[Verdict]:
    """The hang at the end of the trace: of missing ranks, or of all."""
    now_ns = _now_ns(case)
    hang = stuck(case.line, case.clocks, case.trace, now_ns=now_ns, limits=case.limits)
    if hang:
        return [_hang(case, hang)]
    all_wait = wedged(case.line, case.plan, case.clocks, trace=case.trace, now_ns=now_ns, limits=case.limits)
    return [_wedged(case, all_wait)] if all_wait else []


def _alike(case: Case) -> list[Verdict]:
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
    because = None if ranks else "every rank has entered every round: the device or the fabric holds them"
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
        cost=_said(case, found.for_ns * len(found.waiting) / 1e9, is_lower_bound=True),
        advice=[
            "That rank issues its collectives on two communicators in another order than the others: make it the same."
            if ranks
            else "Look for Xid errors and NVLink or network faults on all hosts; dump the stacks before a restart."
        ],
        abstained_because=because,
        evidence=evidence,
    )


def _case(trace: Trace, limits: Thresholds, usd_per_gpu_hour: float | None) -> Case:
    line = timeline(trace)
    clocks = aligned(line)
    plan = programs(line)
    met = rounds(line, clocks, limits)
    excess = (excess_ns(line, plan, line.self_ns), excess_ns(line, plan, line.host_ns))
    table = cells(line, plan, met, excess=excess, held_ns=held_ns(line, plan, excess[1]))
    counted = judged(table, line, limits)
    return Case(
        trace=trace,
        line=line,
        clocks=clocks,
        plan=plan,
        met=met,
        table=table,
        judged=counted,
        pace=pace(line, counted, limits),
        limits=limits,
        usd_per_gpu_hour=usd_per_gpu_hour,
    )


def _now_ns(case: Case) -> int:
    """The last moment any node's capture ran, on the common clock."""
    tied = case.clocks.offsets
    ends = [
        case.clocks.common_ns(node, end)
        for node, end in enumerate(case.trace.ends_ns)
        if end >= 0 and node in tied
    ]
    return max([*ends, int(case.arrival_ns.max(initial=0))])


def _looked_at(case: Case) -> dict[str, object]:
    return {
        "n_ranks": case.line.n_processes,
        "n_nodes": len(np.unique(case.line.node)),
        "n_communicators": len(np.unique(case.line.comm_hash)),
        "n_rounds": case.met.n_rounds,
        "n_steps": len(np.unique(case.judged.step)),
        "n_lost_records": sum(case.trace.lost.values()),
        "seconds": round(_observed_ns(case) / 1e9, 3),
    }


def _observed_ns(case: Case) -> float:
    if not len(case.line.rows):
        return 0.0
    return float(case.arrival_ns.max() - case.arrival_ns.min())


def _stragglers(case: Case, named: dict[int, list[LateStep]]) -> list[Verdict]:
    """One verdict per named rank, or one for a node all of whose ranks are named; the costliest first."""
    groups = _by_node(case, sorted(named))
    verdicts = [_straggler(case, group, [late for p in group for late in named[p]]) for group in groups]
    return sorted(verdicts, key=lambda verdict: -(verdict.cost.gpu_seconds if verdict.cost else 0.0))


def _by_node(case: Case, processes: list[int]) -> list[list[int]]:
    whole: list[list[int]] = []
    nodes, counts = np.unique(case.line.node, return_counts=True)
    for node, n_ranks in zip(nodes.tolist(), counts.tolist(), strict=True):
        own = [process for process in processes if case.line.node[process] == node]
        if len(own) == n_ranks > 1 and len(nodes) > 1:
            whole.append(own)
        else:
            whole.extend([process] for process in own)
    return whole


def _straggler(case: Case, processes: list[int], late: list[LateStep]) -> Verdict:
    late = sorted(late, key=lambda one: case.arrival_ns[one.peak_row])
    first_process = processes[0]
    own = [one for one in late if one.process == first_process]
    spent = cost(case.line, case.met, case.arrival_ns, late=own, step_ns=case.step_ns, limits=case.limits)
    sizes = np.array([one.excess_ns for one in own])
    steps = np.array([one.step for one in own])
    parts = _causes(case, late)
    victims, said = _victims(case, spent, processes)
    return replace(
        _where(case, processes, late),
        kind="straggler",
        late_ms=_late_ms(late),
        period_steps=period_steps(steps, sizes),
        n_incidents=_n_incidents(steps),
        causes=parts,
        confidence=_confidence(case, own, parts),
        victims=victims,
        cost=said,
        advice=_advice(parts),
        evidence=_steps_said(case, own) | ({"is_whole_node": True} if len(processes) > 1 else {}),
    )


def _causes(case: Case, late: list[LateStep]) -> list[Explained]:
    return explained(_excess(case, late), case.limits.cause_share)


def _excess(case: Case, late: list[LateStep]) -> Excess:
    largest = sorted(late, key=lambda one: -one.excess_ns)[:_MOST_EXPLAINED]
    ledger, counts = np.zeros(N_CATEGORIES), np.zeros(4)
    calls, offcpu = np.zeros(len(case.trace.calls), bool), np.zeros(len(case.trace.offcpu), bool)
    for one in largest:
        more, called = ledger_excess_ns(case.line, case.plan, one.first_row, one.peak_row)
        ledger, counts = ledger + more, counts + called
        calls |= _within(case, case.trace.calls, one)
        offcpu |= _within(case, case.trace.offcpu, one)
    flags = case.line.rows["flags"]
    return Excess(
        total_ns=float(sum(one.excess_ns for one in largest)),
        ledger_ns=ledger,
        n_steps=len(largest),
        n_syncs=counts[0],
        n_allocs=counts[1],
        n_copies=counts[2],
        n_launches=counts[3],
        calls=case.trace.calls[calls],
        offcpu=case.trace.offcpu[offcpu],
        knows_syscalls=not bool((flags & CollectiveFlag.NO_SYSCALLS).any()),
        symbols=case.trace.symbols,
    )


def _within(case: Case, table: Array, late: LateStep) -> Array:
    """Rows of calls or offcpu of the late process that overlap the late interval."""
    begin = case.line.rows["ts_ns"][max(late.first_row - 1, 0)]
    end = case.line.rows["ts_ns"][late.peak_row]
    mine = (table["pid"] == case.line.pid[late.process]) & (table["node"] == case.line.node[late.process])
    return mine & (table["ts_ns"] < end) & (table["ts_ns"] + np.maximum(table["duration_ns"], 0) > begin)


def _late_ms(late: list[LateStep]) -> dict[str, float]:
    values = np.array([one.late_ns for one in late]) / 1e6
    return {"median": round(float(np.median(values)), 3), "max": round(float(values.max()), 3)}


def _n_incidents(steps: Array) -> int:
    """Runs of late steps with at most one good step between them."""
    return int((np.diff(np.unique(steps)) > 2).sum()) + 1 if len(steps) else 0


def _confidence(case: Case, late: list[LateStep], parts: list[Explained]) -> float:
    """How sure the name is: it grows with the recurrence, and falls with what is uncertain in the records."""
    agreement = float(np.median([min(one.excess_ns / max(one.late_ns, 1.0), 1.0) for one in late]))
    sure = (1 - 0.5 ** len(late)) * (0.5 + 0.5 * agreement)
    if sum(case.trace.lost.values()):
        sure *= 0.9
    if bool((case.line.rows["flags"] & CollectiveFlag.LATE_ATTACH).any()):
        sure *= 0.95
    if not parts or parts[0].cause.name == "unknown":
        sure *= 0.9
    return round(min(sure, 0.99), 3)


def _where(case: Case, processes: list[int], late: list[LateStep]) -> Verdict:
    """The place and time part of a verdict."""
    line = case.line
    first, last = late[0], late[-1]
    begin = case.arrival_ns[first.peak_row] - first.late_ns
    comms = np.bincount(line.comm[[one.peak_row for one in late]])
    comm = int(np.argmax(comms))
    own_rounds = line.rows["seq"][[one.peak_row for one in late if line.comm[one.peak_row] == comm]]
    judged_rows = np.isin(line.process, processes) & (line.comm == comm)
    return Verdict(
        kind="",
        summary="",
        ranks=[int(line.rank[process]) for process in processes],
        nodes=sorted({case.trace.nodes[int(line.node[process])] for process in processes}),
        comm_hash=f"{int(line.comm_hash[comm]):016x}",
        first_round=int(own_rounds.min()),
        last_round=int(own_rounds.max()),
        n_late_rounds=sum(one.n_rounds for one in late),
        n_rounds=len(np.unique(line.rows["seq"][judged_rows])),
        since_ns=wall_ns(case.trace, case.first_node, begin),
        until_ns=wall_ns(case.trace, case.first_node, float(case.arrival_ns[last.peak_row])),
    )


def _victims(case: Case, spent: Cost, processes: list[int]) -> tuple[list[int], CostSaid]:
    lost = spent.lost_ns.copy()
    lost[processes] = 0
    total_s = float(lost.sum()) / 1e9
    felt = np.flatnonzero(lost > 0.1 * max(float(lost.max(initial=0.0)), 1.0))
    ranks = sorted(int(case.line.rank[process]) for process in felt)
    return ranks, _said(case, total_s, is_lower_bound=spent.is_lower_bound)


def _said(case: Case, gpu_seconds: float, *, is_lower_bound: bool) -> CostSaid:
    price, hours = case.usd_per_gpu_hour, _observed_ns(case) / 3.6e12
    usd = None if price is None else round(gpu_seconds / 3600 * price, 4)
    return CostSaid(
        gpu_seconds=round(gpu_seconds, 3),
        usd=usd,
        usd_per_hour=round(usd / hours, 4) if usd is not None and hours > 0 else None,
        is_lower_bound=is_lower_bound,
    )


def _advice(parts: list[Explained]) -> list[str]:
    return parts[0].cause.advice(parts[0].evidence) if parts else []


def _steps_said(case: Case, late: list[LateStep]) -> dict[str, object]:
    return {
        "n_late_steps": len(late),
        "n_steps": len(np.unique(case.judged.step)),
        "step_ms": round(case.step_ns / 1e6, 3),
    }


def _device(case: Case, process: int, slow: SlowDevice) -> Verdict:
    peers = int((case.plan.program == case.plan.program[process]).sum()) - 1
    lost_s = sum(one.excess_ns for one in slow.late) * peers / 1e9
    total = float(sum(one.excess_ns for one in slow.late))
    why = cause("gpu_shared" if slow.is_irregular else "gpu_slow")
    values = np.array([one.excess_ns for one in slow.late]) / 1e6
    evidence: dict[str, object] = {
        "seen_by": slow.seen_by,
        "excess_ms_quartiles": [round(float(np.quantile(values, q)), 3) for q in (0.25, 0.5, 0.75)],
    }
    part = Explained(why, 1.0, total, evidence)
    victims = [int(r) for p, r in enumerate(case.line.rank) if p != process]
    return replace(
        _where(case, [process], slow.late),
        kind="device",
        late_ms=_late_ms(slow.late),
        n_incidents=_n_incidents(np.array([one.step for one in slow.late])),
        causes=[part],
        confidence=round(min(1 - 0.5 ** len(slow.late), 0.9 if slow.is_irregular else 0.95), 3),
        victims=victims,
        cost=_said(case, lost_s, is_lower_bound=True),
        advice=why.advice(evidence),
        evidence=_steps_said(case, slow.late),
    )


def _stage(case: Case, stage: SlowStage) -> Verdict:
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
        cost=_said(
            case, stage.wait_share * case.step_ns * stage.n_steps * len(others) / 1e9, is_lower_bound=True
        ),
        advice=["Move work between the stages: no machine is bad, the slow stage has more to do."],
        evidence={
            "slow_stage": ranks,
            "wait_share": round(stage.wait_share, 3),
            "n_steps": stage.n_steps,
            "step_ms": round(case.step_ns / 1e6, 3),
        },
    )


def _moving(case: Case, uneven: Moving) -> Verdict:
    late = sorted(uneven.late, key=lambda one: case.arrival_ns[one.peak_row])
    spent = np.zeros(case.line.n_processes)
    for one in late:
        spent += cost(
            case.line, case.met, case.arrival_ns, late=[one], step_ns=case.step_ns, limits=case.limits
        ).lost_ns
    parts = _causes(case, late)
    counts = {
        str(int(case.line.rank[p])): sum(one.process == p for one in late) for p in {o.process for o in late}
    }
    return replace(
        _where(case, [], late),
        kind="imbalance",
        late_ms=_late_ms(late),
        n_incidents=_n_incidents(np.array([one.step for one in late])),
        causes=parts,
        confidence=0.8,
        cost=_said(case, float(spent.sum()) / 1e9, is_lower_bound=True),
        advice=[
            "No machine is bad: the late rank changes. Even out the work per step, or let all ranks pause together."
        ],
        evidence={"late_steps_by_rank": counts, "moves": True, "n_steps": uneven.n_steps}
        | {"n_late_steps": len({one.step for one in late}), "step_ms": round(case.step_ns / 1e6, 3)},
    )


def _once(case: Case, found: list[LateStep]) -> tuple[list[Verdict], list[dict[str, object]]]:
    """Delays seen once: a verdict when they took much of the time looked at, else a remark."""
    verdicts, remarks = [], []
    for late in found:
        rank = int(case.line.rank[late.process])
        if late.excess_ns < case.limits.one_off_share * _observed_ns(case):
            at = wall_ns(case.trace, case.first_node, float(case.arrival_ns[late.peak_row]))
            remarks.append(
                {
                    "what": "one delay, not repeated",
                    "rank": rank,
                    "late_ms": round(late.late_ns / 1e6, 3),
                    "at_ns": at,
                }
            )
            continue
        verdict = _straggler(case, [late.process], [late])
        verdicts.append(
            replace(verdict, confidence=0.6, n_incidents=1, evidence=verdict.evidence | {"is_one_off": True})
        )
    return verdicts, remarks


def _hang(case: Case, hang: Stuck) -> Verdict:
    line = case.line
    ranks = sorted(int(line.rank[process]) for process in hang.missing)
    doing = list(hang.doing)
    evidence: dict[str, object] = {"doing": doing, "waited_s": round(hang.for_ns / 1e9, 1)}
    if hang.is_circle:
        evidence["is_circle"] = True
    why = cause("missing_rank")
    gone = all(not told["is_alive"] for told in doing)
    return Verdict(
        kind="hang",
        summary="",
        ranks=ranks,
        nodes=sorted({case.trace.nodes[int(line.node[process])] for process in hang.missing}),
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
        cost=_said(case, hang.for_ns * len(hang.waiting) / 1e9, is_lower_bound=True),
        advice=why.advice({"is_alive": not gone}),
        evidence=evidence,
    )


def _mismatch(case: Case, found: Mismatch) -> Verdict:
    line = case.line
    ranks = sorted(int(line.rank[process]) for process in found.odd)
    return Verdict(
        kind="mismatch",
        summary="",
        ranks=ranks,
        nodes=sorted({case.trace.nodes[int(line.node[process])] for process in found.odd}),
        comm_hash=f"{int(line.comm_hash[found.comm]):016x}",
        first_round=found.seq,
        last_round=found.seq,
        n_rounds=case.met.n_rounds,
        since_ns=wall_ns(case.trace, case.first_node, found.at_ns),
        n_incidents=1,
        confidence=0.9,
        victims=sorted({int(line.rank[process]) for process in found.present} - set(ranks)),
        advice=[
            "Compare the code path of these ranks in that step: a branch, a shape or a batch differs between ranks."
        ],
        evidence={"calls": list(found.calls)},
    )


def _warm_up(case: Case) -> list[dict[str, object]]:
    """The steps left out at the start, said when they were longer than the usual ones."""
    early = np.setdiff1d(case.table.step, case.judged.step)
    if len(early) <= case.limits.warm_up_steps:
        return []
    return [{"what": "slow steps at the start (warm-up), not judged", "n_steps": len(early)}]
