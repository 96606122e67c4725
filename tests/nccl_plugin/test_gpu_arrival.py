"""Hosts that run ahead arrive at the same time. The rounds on the GPUs, whole or in windows, show the late GPU."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose import Report, Stream, Thresholds, diagnose
from stallscope.diagnose.engine import gpu_report
from stallscope.diagnose.gpu.gpu_rounds import gpu_arrivals
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.verdicts import gpu_arrival
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, Datatype, Op
from stallscope.events.trace import Clock, Trace
from stallscope.exporters import hub_batches

from .test_nccl_trace import N_RANKS, N_ROUNDS, Fault, job, trace_of

_S = 10**9
_CALLS = 4  # a step
_WHOLE = (_S, _S)
_WINDOWS = (5 * _S, int(0.7 * _S))
"""The plugin records the second part of each first part of the time."""


def hosts(ts_ns: Array, pid: int, *, late_ns: Array | int = 0) -> Array:
    """The arrivals of the host of one rank, as probes record them, on a communicator with a hash of its own.

    late_ns: the part of each interval in which the host slept.
    """
    rows = layout.empty(layout.COLLECTIVES, len(ts_ns))
    rows["ts_ns"], rows["pid"], rows["tid"] = ts_ns, pid, pid
    rows["comm_hash"], rows["comm_rank"], rows["nranks"] = 0x77, pid - 100, N_RANKS
    rows["seq"], rows["op"], rows["count"] = np.arange(len(rows)), Op.ALL_REDUCE, 4096
    rows["datatype"] = np.where(rows["seq"] % _CALLS, Datatype.FLOAT32, Datatype.INT32)
    slept_ns = np.cumsum(np.broadcast_to(late_ns, len(rows)))
    rows["ledger_ns"][:, Category.SLEEP - 1] = slept_ns
    rows["ledger_ns"][:, Category.ON_CPU - 1] = np.maximum(ts_ns - ts_ns[0] - slept_ns, 0)
    return rows


def trace(
    fault: Fault,
    *,
    runs_ahead: bool = True,
    windows: tuple[int, int] = _WHOLE,
    seed: int = 1,
    host_ms: float = 0.5,
    transfer_ms: Callable[[int], float] = lambda number: 0.5,
) -> Trace:
    """A trace of the agent: arrivals of the hosts, and the operations on the GPUs in the plugin's windows."""
    recorded = job(fault, runs_ahead=runs_ahead, seed=seed, host_ms=host_ms, transfer_ms=transfer_ms)
    rows = []
    for pid, process in recorded.items():
        host_ns = process.records["host_ns"].astype(np.int64)
        is_late = (pid - 100 == fault.rank) & (np.arange(N_ROUNDS) % fault.period == 0) & fault.on_host
        rows.append(hosts(host_ns - 3_000, pid, late_ns=20_000_000 * is_late))
        is_on = (host_ns - 10**12) % windows[0] < windows[1]
        process.records = process.records[is_on]
    collectives = np.concatenate(rows)
    end_ns = int(collectives["ts_ns"].max())
    clocks = tuple(Clock(0, at, at + 10**18) for at in (10**12, end_ns))
    whole = trace_of(recorded)
    return replace(whole, collectives=collectives, clocks=clocks, ends_ns=(end_ns,), source="probes")


def named(report: Report) -> list[tuple[str, list[int], list[str]]]:
    return [
        (verdict.kind, verdict.ranks, [part.cause.name for part in verdict.causes])
        for verdict in report.verdicts
    ]


@pytest.mark.parametrize("windows", [_WHOLE, _WINDOWS], ids=["whole", "windows"])
@pytest.mark.parametrize("period", [1, 4, 12])
def test_the_late_gpu_is_named_although_all_hosts_arrive_in_time(period: int, windows: tuple[int, int]):
    report = diagnose(trace(Fault(2, period), windows=windows))
    assert named(report) == [("device", [2], ["gpu_slow"])]
    (verdict,) = report.verdicts
    assert verdict.late_ms is not None and verdict.late_ms["median"] == pytest.approx(20, abs=0.5)
    assert verdict.cost is not None
    if windows is _WINDOWS:  # the time between the windows costs an unknown amount
        assert verdict.cost.is_lower_bound and verdict.cost.at_most_gpu_seconds is None


@pytest.mark.parametrize("has_hosts", [True, False], ids=["trace", "plugin record"])
@pytest.mark.parametrize(("extra_ms", "expected"), [(0.3, [2]), (0.16, [2]), (0.05, [])])
def test_a_gpu_that_works_longer_by_a_tenth_in_every_round_is_named(
    extra_ms: float, expected: list[int], has_hosts: bool
):
    """Far less than the least lateness of a host that is reported; GPUs of a model differ by 2 %."""
    whole = trace(Fault(2, 1, extra_ms=extra_ms))
    report = diagnose(whole if has_hosts else replace(whole, collectives=whole.collectives[:0]))
    assert [rank for verdict in report.verdicts for rank in verdict.ranks] == expected
    if not expected:
        assert report.answer == "healthy", report.gaps


@pytest.mark.parametrize(("kind", "leaves"), [("change", True), ("imbalance", False), ("stage", False)])
def test_uneven_work_explains_small_delays_of_a_gpu(kind: str, leaves: bool):
    case = gpu_arrival.gpu_case(trace(Fault(2, 1, extra_ms=0.3)), Thresholds(), None)
    assert case is not None
    assert gpu_arrival.leaves_small_delays(case, [Verdict(kind, "", [])]) is leaves
    assert not gpu_arrival.leaves_small_delays(case, [Verdict("device", "", [1])])


@pytest.mark.parametrize("rounds", [(100, 300), (300, N_ROUNDS)])
def test_a_gpu_that_is_slow_for_a_part_of_the_time_is_named(rounds: tuple[int, int]):
    report = diagnose(trace(Fault(2, 1, extra_ms=1.0, rounds=rounds)))
    assert named(report) == [("device", [2], ["gpu_slow"])]


def test_a_single_delay_of_a_gpu_is_not_a_slow_gpu():
    """One rank evaluates the model."""
    report = diagnose(trace(Fault(0, 1, extra_ms=600.0, rounds=(300, 301))))
    assert report.verdicts == [] and report.answer == "healthy", report.gaps


def test_a_fabric_that_is_slow_in_bursts_is_reported():
    whole = trace(Fault(), transfer_ms=lambda number: 0.5 if number // 10 % 3 else 3.0)
    (verdict,) = diagnose(whole).verdicts
    assert (verdict.kind, verdict.ranks, verdict.evidence.suspects) == ("link", [], [0, 1, 2, 3])
    assert verdict.late_ms is not None and verdict.late_ms["median"] == pytest.approx(2.5, abs=0.2)


def with_transfers(whole: Trace, peers: Callable[[int], list[int]]) -> Trace:
    """The trace in which each rank also sends to its peers before each collective."""
    kernels, parts = whole.gpu_kernels, [whole.gpu_kernels]
    for rank in range(N_RANKS):
        for peer in peers(rank):
            rows = kernels[kernels["pid"] == 100 + rank].copy()
            rows["peer_rank"], rows["seq"], rows["op"] = peer, UNKNOWN, Op.SEND
            rows["start_ns"] -= 100_000
            rows["end_ns"] = rows["start_ns"] + 10_000
            parts.append(rows)
    merged = np.concatenate(parts)
    return replace(whole, gpu_kernels=merged[np.argsort(merged["ts_ns"], kind="stable")])


def test_stages_of_a_pipeline_are_not_compared():
    stages = with_transfers(trace(Fault(2, 1)), lambda rank: [rank + 1] if rank + 1 < N_RANKS else [])
    report = diagnose(stages)
    assert report.verdicts == [] and report.answer == "inconclusive"
    assert "other stages" in report.gaps[0].reason
    experts = with_transfers(trace(Fault(2, 1)), lambda rank: [r for r in range(N_RANKS) if r != rank])
    assert named(diagnose(experts)) == [("device", [2], ["gpu_slow"])]


def test_small_delays_of_a_gpu_in_some_rounds_are_normal():
    report = diagnose(trace(Fault(2, 4, extra_ms=0.4)))
    assert report.verdicts == [] and report.answer == "healthy", report.gaps


def test_a_host_that_is_behind_from_the_start_does_not_make_its_gpu_slow():
    """Hosts that limit the pace and never wait for each other."""
    report = diagnose(trace(Fault(2, extra_ms=0.0, lag_ms=2.5), host_ms=3.0))
    assert [verdict for verdict in report.verdicts if verdict.kind == "device"] == []


@pytest.mark.parametrize("windows", [_WHOLE, _WINDOWS], ids=["whole", "windows"])
@pytest.mark.parametrize("seed", range(2))
def test_gpus_without_a_fault_are_healthy(seed: int, windows: tuple[int, int]):
    report = diagnose(trace(Fault(), windows=windows, seed=seed))
    assert report.verdicts == [] and report.answer == "healthy", report.gaps


def test_a_late_host_keeps_the_verdict_of_its_host():
    report = diagnose(trace(Fault(1, 4, on_host=True), runs_ahead=False))
    assert named(report) == [("straggler", [1], ["host_sleep"])]


def test_a_late_host_whose_gpu_has_work_queued_delays_no_rank():
    """Its queue holds 30 ms of work, and it is late by 15 ms."""
    whole = trace(Fault(1, 40, on_host=True, extra_ms=15.0))
    hosts_only = diagnose(replace(whole, gpu_kernels=whole.gpu_kernels[:0]))
    assert [verdict.ranks for verdict in hosts_only.verdicts] == [[1]]
    assert diagnose(whole).answer == "healthy"
    stream = Stream(limits=Thresholds(), clock=iter(range(10**18, 10**19, _S)).__next__)
    assert [change.kind for change in [*stream.feed(whole), *stream.finish()]] == []


@pytest.mark.parametrize("kind", ["link", "change"])
def test_a_slower_fabric_is_not_reported_where_a_host_is_late(kind: str):
    """The rounds of all ranks take longer because they wait for the late host."""
    whole, fabric = trace(Fault(1, 4, on_host=True), runs_ahead=False), Verdict(kind, "", [])
    case = gpu_arrival.gpu_case(whole, Thresholds(), None)
    assert case is not None
    on_gpus = gpu_report(case).verdicts
    assert [(verdict.kind, verdict.ranks) for verdict in on_gpus] == [("straggler", [1])]
    assert gpu_arrival.verdicts(whole, case, [*on_gpus, fabric], set()) == []
    assert gpu_arrival.verdicts(whole, case, [fabric], set()) == [fabric]


def test_transfers_count_as_waits_and_not_as_work_of_the_gpu():
    """A rank that receives for a long time before a collective works no longer than its peers."""
    whole = trace(Fault())
    kernels = whole.gpu_kernels
    receives = kernels[kernels["pid"] == 101].copy()
    receives["peer_rank"], receives["seq"], receives["op"] = 0, UNKNOWN, Op.RECV
    receives["start_ns"] -= 1_500_000
    receives["end_ns"] = receives["start_ns"] + 1_400_000
    before, after = (
        gpu_arrivals(rows)["ledger_ns"][:, Category.DEVICE - 1]
        for rows in (kernels, np.concatenate([kernels, receives]))
    )
    assert len(before) == len(after) and after.max() <= before.max()
    assert (after < before - 100_000_000).sum() > N_ROUNDS / 2


def test_a_round_that_a_rank_did_not_record_is_left_out():
    kernels = trace(Fault()).gpu_kernels
    kernels = kernels[(kernels["pid"] != 103) | (kernels["seq"] % 10 != 0)]
    rows = gpu_arrivals(kernels)
    assert len(rows) == N_RANKS * N_ROUNDS * 9 // 10 and not (rows["seq"] % 10 == 0).any()


@pytest.mark.parametrize("windows", [_WHOLE, _WINDOWS], ids=["whole", "windows"])
def test_an_incident_opens_while_the_rows_arrive(windows: tuple[int, int]):
    whole = trace(Fault(2, 4), windows=windows)
    stream, opened = Stream(limits=Thresholds(), clock=iter(range(10**18, 10**19, _S)).__next__), []
    for begin in range(10**12, whole.ends_ns[0] + _S, _S):
        parts = {
            name: rows[(rows["ts_ns"] >= begin) & (rows["ts_ns"] < begin + _S)]
            for name, rows in (("collectives", whole.collectives), ("gpu_kernels", whole.gpu_kernels))
        }
        processes = whole.processes if begin == 10**12 else whole.processes[:0]
        opened += stream.feed(replace(whole, **parts, processes=processes, ends_ns=(begin + _S,)))
    opened += stream.finish()
    changes = [change for change in opened if change.kind == "opened"]
    assert [(change.verdict.kind, change.verdict.ranks) for change in changes] == [("device", [2])]


@pytest.mark.parametrize("fault", [Fault(), Fault(2, 12)], ids=["healthy", "late"])
def test_rounds_on_the_gpus_are_the_evidence_where_hosts_hardly_arrive(fault: Fault):
    """A graph that replays the collectives leaves only the first calls of the hosts."""
    whole = trace(fault)
    rows = whole.collectives
    report = diagnose(replace(whole, collectives=rows[rows["seq"] < 4]))
    assert report.answer == ("found" if fault.rank else "healthy"), report.gaps
    assert report.examined["n_steps"] > N_ROUNDS / 2


@pytest.mark.parametrize("recorded", [(), (100, 101), (100, 101, 102, 103)])
def test_a_healthy_answer_needs_the_times_of_all_gpus_where_hosts_run_ahead(recorded: tuple[int, ...]):
    whole = trace(Fault())
    report = diagnose(
        replace(whole, gpu_kernels=whole.gpu_kernels[np.isin(whole.gpu_kernels["pid"], recorded)])
    )
    if len(recorded) == N_RANKS:
        assert report.answer == "healthy", report.gaps
    else:
        assert report.answer == "inconclusive" and report.verdicts == []
        assert [gap for gap in report.gaps if "stallscope plugin" in gap.action], report.gaps


def with_full_queue(whole: Trace, rank: int) -> Trace:
    """The host of a rank spins in launches, since its GPU is slow: it arrives late by the time on the CPU."""
    rows = whole.collectives.copy()
    own = (rows["pid"] == 100 + rank) & (rows["seq"] % 4 == 0)
    spun_ns = np.cumsum(np.where(rows["pid"] == 100 + rank, own * 4_000_000, 0))
    rows["ledger_ns"][:, Category.ON_CPU - 1] += np.where(rows["pid"] == 100 + rank, spun_ns, 0)
    rows["ts_ns"] += own * 4_000_000
    return replace(whole, collectives=rows)


def test_a_host_that_spins_because_its_gpu_is_slow_leaves_the_verdict_to_the_gpu():
    whole = with_full_queue(trace(Fault(2, 4)), 2)
    hosts_only = diagnose(replace(whole, gpu_kernels=whole.gpu_kernels[:0]))
    assert named(hosts_only) == [("straggler", [2], ["host_compute"])]
    assert named(diagnose(whole)) == [("device", [2], ["gpu_slow"])]


def test_a_host_is_not_blamed_where_its_gpu_never_waits_for_it():
    """A slow link before the collective fills the queue, for example."""
    whole = with_full_queue(trace(Fault(2, 4)), 2)
    (spinning,) = diagnose(replace(whole, gpu_kernels=whole.gpu_kernels[:0])).verdicts
    spinning = replace(spinning, n_late_rounds=100_000)  # a late step may have many late rounds
    busy = trace(Fault())
    late = trace(Fault(2, 4, on_host=True), runs_ahead=False)
    for each, is_full in ((busy, True), (late, False)):
        case = gpu_arrival.gpu_case(each, Thresholds(), None)
        assert case is not None
        assert gpu_arrival.is_of_full_queue(each, case, spinning, set()) is is_full


def test_a_host_that_enqueues_late_keeps_its_verdict_whatever_its_cause():
    """The kernels start late because their calls are late."""
    whole = trace(Fault(1, 4, on_host=True), runs_ahead=False)
    whole.collectives["ledger_ns"][:, Category.SLEEP - 1] = 0
    assert named(diagnose(whole)) == [("straggler", [1], ["unknown"])]


def test_a_hub_gets_calls_and_starts_on_the_same_clock():
    """The host's times, by which arrivals on the GPUs of several machines are compared."""
    rows = trace(Fault()).gpu_kernels
    rows["noticed_ns"][0] = UNKNOWN
    sent = hub_batches.on_wall_clock(layout.GPU_KERNELS, rows, Clock(0, 10**12, 10**18), ())
    assert sent["noticed_ns"][0] == UNKNOWN
    assert ((sent["noticed_ns"] - sent["ts_ns"]) == (rows["noticed_ns"] - rows["ts_ns"]))[1:].all()
    assert (sent["start_ns"] == rows["start_ns"]).all()
