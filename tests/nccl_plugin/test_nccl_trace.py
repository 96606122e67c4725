"""Records of the profiler plugin of a simulated job: the diagnosis names the late GPU, the late host, or no rank."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from stallscope.capture.gpu.nccl_ring import COLL, RECORD, RecordFlag, RingComm
from stallscope.capture.gpu.nccl_trace import Recorded, nccl_trace
from stallscope.diagnose import diagnose
from stallscope.diagnose.gpu.gpu_rounds import gpu_arrivals
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Clock, Trace

_MS = 1e6
N_RANKS, N_ROUNDS = 4, 480


@dataclass(frozen=True)
class Fault:
    """Extra work in each round of a period. rank: None for none. on_host: on the CPU, otherwise on the GPU. lag_ms: by
    which the host is behind the other hosts from the start. rounds: first and last round of the fault.
    """

    rank: int | None = None
    period: int = 4
    on_host: bool = False
    extra_ms: float = 20.0
    lag_ms: float = 0.0
    rounds: tuple[int, int] = (0, N_ROUNDS)

    def strikes(self, number: int) -> bool:
        """Whether the fault acts in a round."""
        return self.rounds[0] <= number < self.rounds[1] and number % self.period == 0


def job(
    fault: Fault,
    *,
    runs_ahead: bool,
    seed: int = 1,
    n_ranks: int = N_RANKS,
    host_ms: float = 0.5,
    transfer_ms: Callable[[int], float] = lambda number: 0.5,
) -> dict[int, Recorded]:
    """The records of each rank. Hosts that do not run ahead wait for the end of each round. host_ms: of a round.

    transfer_ms: of a round, by its number.
    """
    chance = np.random.default_rng(seed)
    host, free = (np.arange(n_ranks) == fault.rank) * fault.lag_ms * _MS, 0.0
    clocks = 1e15 + chance.integers(-200_000, 200_000, n_ranks)  # of the GPUs
    rows = np.zeros((n_ranks, N_ROUNDS), RECORD)
    for number in range(N_ROUNDS):
        is_late = (np.arange(n_ranks) == fault.rank) & fault.strikes(number)
        host = host + host_ms * _MS * (1 + 0.1 * chance.random(n_ranks))
        host += is_late * fault.on_host * fault.extra_ms * _MS
        work = 2 * _MS * (1 + 0.02 * chance.standard_normal(n_ranks))
        extra = is_late * (not fault.on_host) * fault.extra_ms * _MS
        start = np.maximum(free + work + extra, host + 20_000)
        free = start.max() + transfer_ms(number) * _MS
        row = rows[:, number]
        row["seq"], row["host_ns"], row["noticed_ns"] = number, 1e12 + host, 1e12 + start + 5_000
        row["start_ns"], row["stop_ns"] = clocks + start, clocks + free
        host = np.maximum(host, free - (30 * _MS if runs_ahead else 0))
    rows["comm_hash"], rows["count"], rows["kind"], rows["func"] = 0xABC, 4096, COLL, b"AllReduce"
    rows["flags"], rows["rank"] = RecordFlag.HAS_GPU_TIMES, np.arange(n_ranks)[:, None]
    comms = [RingComm(0xABC, rank, n_ranks, 1, "world", is_open=True) for rank in range(n_ranks)]
    return {100 + rank: Recorded(rows[rank], [comms[rank]], b"python") for rank in range(n_ranks)}


def trace_of(recorded: dict[int, Recorded]) -> Trace:
    return nccl_trace(recorded, node="n1", clock=Clock(0, 10**12, 10**18))


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("period", [1, 4, 12])
def test_a_gpu_that_is_late_is_named(period: int, runs_ahead: bool):
    rank = period % N_RANKS
    report = diagnose(trace_of(job(Fault(rank, period), runs_ahead=runs_ahead)))
    (verdict,) = report.verdicts
    assert verdict.kind in (
        "straggler",
        "device",
    )  # by the start of its kernels, or by its own time between kernels
    assert (verdict.ranks, verdict.pids) == ([rank], [100 + rank])
    assert [cause.cause.name for cause in verdict.causes] == ["gpu_slow"]
    assert verdict.late_ms is not None and verdict.late_ms["median"] == pytest.approx(20, abs=1)


@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("period", [1, 12])
def test_a_late_gpu_among_few_is_named(period: int, n_ranks: int):
    """Also if it is late by as much in every round: the rounds have NCCL's numbers, so they cannot be off by one."""
    report = diagnose(trace_of(job(Fault(1, period), runs_ahead=True, n_ranks=n_ranks)))
    (verdict,) = report.verdicts
    assert verdict.ranks == [1] and [cause.cause.name for cause in verdict.causes] == ["gpu_slow"]


@pytest.mark.parametrize("period", [4, 12])
def test_a_host_that_is_late_is_not_a_late_gpu(period: int):
    report = diagnose(trace_of(job(Fault(1, period, on_host=True), runs_ahead=False)))
    (verdict,) = report.verdicts
    assert (verdict.kind, verdict.ranks) == ("straggler", [1])
    assert "gpu_slow" not in [cause.cause.name for cause in verdict.causes]


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_job_without_a_late_gpu_is_healthy(seed: int, runs_ahead: bool):
    report = diagnose(trace_of(job(Fault(), runs_ahead=runs_ahead, seed=seed)))
    assert report.verdicts == [] and report.answer == "healthy"


def test_records_that_begin_at_different_rounds_meet_in_the_same_rounds():
    recorded = job(Fault(2), runs_ahead=True)
    recorded[101].records = recorded[101].records[7:]
    recorded[103].records = recorded[103].records[3:]
    rows = gpu_arrivals(trace_of(recorded).gpu_kernels)
    assert len(rows) == N_RANKS * (N_ROUNDS - 7)
    _, sizes = np.unique(rows["seq"], return_counts=True)
    assert set(sizes) == {N_RANKS}
    ends = [np.ptp(rows["wait_leave_ns"][rows["seq"] == seq]) for seq in range(8, 400)]
    assert max(ends) < 10_000  # kernels of a round end together: the clocks of the GPUs are aligned


def test_parts_of_one_kernel_are_one_collective_and_open_kernels_are_counted():
    recorded = job(Fault(), runs_ahead=False)
    rows = recorded[102].records
    parts = np.repeat(rows[:1], 2)
    parts["start_ns"] += np.array([0, 9], np.uint64)
    parts["stop_ns"] -= np.array([5, 0], np.uint64)
    last = rows[-1:].copy()
    last["flags"] = 0
    recorded[102].records = np.concatenate([parts, rows[1:-1], last])
    trace = trace_of(recorded)
    own = trace.gpu_kernels[trace.gpu_kernels["pid"] == 102]
    assert len(own) == N_ROUNDS
    assert (own["start_ns"][0], own["end_ns"][0]) == (rows["start_ns"][0], rows["stop_ns"][0])
    assert own["start_ns"][-1] == UNKNOWN
    assert trace.coverage.omitted == {"collectives without GPU times": 1}
    assert len(gpu_arrivals(trace.gpu_kernels)) == N_RANKS * (N_ROUNDS - 1)  # the last round is not whole


def test_a_record_without_a_collective_is_inconclusive():
    report = diagnose(trace_of({7: Recorded(np.empty(0, RECORD))}))
    assert report.answer == "inconclusive"


def test_replays_without_numbers_leave_the_answer_inconclusive():
    """NCCL does not count the replays of a graph if the job did not ask for it: all have the same number."""
    recorded = job(Fault(2, 1), runs_ahead=True)
    for each in recorded.values():
        each.records["seq"] = 7
    report = diagnose(trace_of(recorded))
    assert report.answer == "inconclusive" and report.verdicts == []
    assert "STALLSCOPE_NCCL_GRAPHS=1" in report.gaps[0].action


def test_a_number_that_two_collectives_share_is_no_round():
    recorded = job(Fault(), runs_ahead=True)
    for each in recorded.values():
        each.records["seq"][10:14] = 10
    rows = gpu_arrivals(trace_of(recorded).gpu_kernels)
    assert len(rows) == N_RANKS * (N_ROUNDS - 4)
    assert diagnose(trace_of(recorded)).answer == "healthy"


def with_earlier_times(recorded: dict[int, Recorded], n_earlier: int) -> dict[int, Recorded]:
    """Each operation with the times of the kernel some operations before it, noticed at once: NCCL did not count the
    replays of a graph before them.
    """
    for each in recorded.values():
        rows = each.records[n_earlier:].copy()
        for name in ("start_ns", "stop_ns"):
            rows[name] = each.records[name][:-n_earlier]
        rows["noticed_ns"] = rows["host_ns"] + 5_000
        each.records = rows
    return recorded


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize("n_earlier", [1, 48])
def test_a_late_gpu_is_named_from_the_times_of_earlier_kernels(
    n_earlier: int, n_ranks: int, runs_ahead: bool
):
    recorded = job(Fault(1, 12), runs_ahead=runs_ahead, n_ranks=n_ranks)
    (verdict,) = diagnose(trace_of(with_earlier_times(recorded, n_earlier))).verdicts
    assert verdict.ranks == [1] and [cause.cause.name for cause in verdict.causes] == ["gpu_slow"]
    assert verdict.n_late_rounds == pytest.approx((N_ROUNDS - n_earlier) / 12, abs=1)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_times_of_earlier_kernels_accuse_no_rank_of_a_healthy_job(runs_ahead: bool):
    recorded = job(Fault(), runs_ahead=runs_ahead)
    assert diagnose(trace_of(with_earlier_times(recorded, 48))).answer == "healthy"


def test_gpus_are_aligned_by_the_ends_of_their_kernels():
    """The thread of one rank notices all starts 5 ms late: its GPU is not late."""
    recorded = job(Fault(), runs_ahead=True)
    recorded[101].records["noticed_ns"] += 5_000_000
    rows = gpu_arrivals(trace_of(recorded).gpu_kernels)
    ends = [np.ptp(rows["wait_leave_ns"][rows["seq"] == seq]) for seq in range(8, 400)]
    assert max(ends) < 10_000
    assert diagnose(trace_of(recorded)).answer == "healthy"


@pytest.mark.parametrize("on_host", [False, True])
def test_lateness_before_replays_of_a_graph_is_not_charged_to_the_host(on_host: bool):
    """NCCL starts the events of a replay when the GPU reaches it: the host's call is not known."""
    recorded = job(Fault(1, 12, on_host=on_host), runs_ahead=not on_host)
    for each in recorded.values():
        each.records["host_ns"] = each.records["noticed_ns"] - 10_000
        each.records["flags"] |= np.uint8(RecordFlag.IS_REPLAY)
    (verdict,) = diagnose(trace_of(recorded)).verdicts
    assert verdict.ranks == [1] and verdict.causes[0].evidence.before_replays
    assert "whether its host or its GPU was late" in verdict.summary
    assert "stallscope trace" in verdict.advice[0]
