"""Replays of CUDA graphs with the times of other kernels, as NCCL 2.28 reported them on two H200."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stallscope.diagnose import diagnose
from stallscope.diagnose.gpu.gpu_rounds import gpu_arrivals
from stallscope.diagnose.gpu.replay_times import with_replay_times
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, GpuKernelFlag, Op
from stallscope.events.trace import Clock, Trace

RECORDED = Path(__file__).parents[1] / "data/recorded/graph_replays.npz"
"""120 replays of a graph of four collectives, on two ranks, after an eager collective on their communicator. The GPU of
rank 1 is 20 ms late before each 12th replay.
"""

PER_REPLAY, PERIOD = 4, 12
HOSTS = ("ahead", "waits")


def recorded(hosts: str) -> Array:
    with np.load(RECORDED) as file:
        columns = {
            name.removeprefix(f"{hosts}_"): file[name] for name in file.files if name.startswith(hosts)
        }
    rows = layout.empty(layout.GPU_KERNELS, len(columns["ts_ns"]))
    for name, values in columns.items():
        rows[name] = values
    return rows


def trace(kernels: Array) -> Trace:
    processes = layout.empty(layout.PROCESSES, 2)
    processes["pid"], processes["rank"], processes["nranks"] = np.unique(kernels["pid"]), (0, 1), 2
    end_ns = int(kernels["ts_ns"].max())
    return Trace(
        gpu_kernels=kernels,
        processes=processes,
        nodes=("n1",),
        clocks=(Clock(0, 0, 10**18),),
        ends_ns=(end_ns,),
    )


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_rank_that_reaches_each_12th_replay_late_is_named(hosts: str):
    (verdict,) = diagnose(trace(recorded(hosts))).verdicts
    assert verdict.ranks == [1]
    assert verdict.n_late_rounds == pytest.approx(120 / PERIOD, abs=1)
    assert verdict.period_steps == PERIOD * PER_REPLAY  # a graph's collectives are steps of their own
    assert verdict.late_ms is not None and verdict.late_ms["median"] == pytest.approx(22, abs=1)


def on_hosts(
    whole: Trace,
    category: Category,
    spent_ns: int,
    *,
    before_ns: int = 0,
    lead_s: float = 0.0,
    until: float = 1.0,
) -> Trace:
    """The trace with the first arrival of each host, and with snapshots of their ledgers.

    The host of rank 1 spends a time in a category during the replays, and before_ns before them. Both hosts spend 40 %
    of their time on the CPU. lead_s: by which the snapshots of rank 1 begin earlier. until: the share of the time in
    which the host spends spent_ns.
    """
    begin_ns, end_ns = int(whole.gpu_kernels["ts_ns"].min()), whole.ends_ns[0]
    hosts, pids = layout.empty(layout.COLLECTIVES, 2), whole.processes["pid"]
    hosts["ts_ns"], hosts["pid"], hosts["comm_rank"], hosts["op"] = begin_ns, pids, (0, 1), Op.ALL_REDUCE
    hosts["comm_hash"], hosts["nranks"], hosts["seq"] = 0x77, 2, 0
    parts = []
    for rank, pid in enumerate(pids.tolist()):
        own = layout.empty(layout.SNAPSHOTS, 12)
        own["pid"], first_ns = pid, begin_ns - 10**9 - int(lead_s * 1e9) * rank
        own["ts_ns"] = [first_ns, *np.linspace(begin_ns, end_ns, 11).astype(np.int64)]
        since_ns = own["ts_ns"] - first_ns
        own["ledger_ns"][:, Category.ON_CPU - 1] = 0.4 * since_ns
        own["ledger_ns"][:, Category.WAIT_GPU - 1] += (0.6 * since_ns).astype(np.int64)
        if rank == 1:
            spent = np.minimum(np.linspace(0, 1, 11) / until, 1.0) * spent_ns
            own["ledger_ns"][1:, category - 1] += before_ns + spent.astype(np.int64)
        parts.append(own)
    return replace(whole, collectives=hosts, snapshots=np.concatenate(parts), source="probes")


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(
    ("category", "spent_ns", "others", "expected"),
    [
        (Category.SLEEP, 200_000_000, {}, ("straggler", "host_sleep")),
        (Category.ON_CPU, 200_000_000, {}, ("straggler", "host_compute")),
        (Category.SLEEP, 40_000_000, {}, ("device", "gpu_slow")),
        (Category.WAIT_GPU, 200_000_000, {}, ("device", "gpu_slow")),
        (Category.IO, 0, {"before_ns": 900_000_000}, ("device", "gpu_slow")),
        (Category.IO, 0, {"lead_s": 3.0}, ("device", "gpu_slow")),
    ],
    ids=["sleep", "compute", "little", "waits", "before", "earlier snapshots"],
)
def test_the_ledgers_of_hosts_show_whether_a_host_reaches_its_replays_late(
    hosts: str, category: Category, spent_ns: int, others: dict[str, float], expected: tuple[str, str]
):
    """As on two H200, where the graph was captured before the trace: hosts have no arrivals at its replays."""
    kernels = recorded(hosts)
    kernels["flags"] |= np.uint8(GpuKernelFlag.IS_REPLAY)
    (verdict,) = diagnose(on_hosts(trace(kernels), category, spent_ns, **others)).verdicts
    assert verdict.ranks == [1] and (verdict.kind, verdict.causes[0].cause.name) == expected


def on_two_nodes(whole: Trace, apart_ns: int) -> Trace:
    """The trace with rank 1 on a node of its own, whose clock shows a later time by apart_ns."""
    pid, tables = whole.processes["pid"][1], {}
    for name in ("processes", "gpu_kernels", "collectives", "snapshots"):
        tables[name] = rows = getattr(whole, name).copy()
        is_there = rows["pid"] == pid
        rows["node"][is_there] = 1
        for column in {"ts_ns", "noticed_ns"} & set(rows.dtype.names):
            rows[column][is_there] += np.where(rows[column][is_there] == UNKNOWN, 0, apart_ns)
    ends_ns, clocks = (
        (whole.ends_ns[0], whole.ends_ns[0] + apart_ns),
        (*whole.clocks, Clock(1, apart_ns, 10**18)),
    )
    return replace(whole, **tables, nodes=("n1", "n2"), clocks=clocks, ends_ns=ends_ns)


@pytest.mark.parametrize("apart_ns", [0, 300_000_000, 10**13, -(10**13)])
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(
    ("category", "expected"),
    [(Category.SLEEP, ("straggler", "host_sleep")), (Category.WAIT_GPU, ("device", "gpu_slow"))],
    ids=["sleep", "waits"],
)
def test_hosts_of_machines_with_different_boot_times_are_compared_on_one_clock(
    hosts: str, category: Category, expected: tuple[str, str], apart_ns: int
):
    kernels = recorded(hosts)
    kernels["flags"] |= np.uint8(GpuKernelFlag.IS_REPLAY)
    whole = on_two_nodes(on_hosts(trace(kernels), category, 200_000_000), apart_ns)
    (verdict,) = diagnose(whole).verdicts
    assert verdict.ranks == [1] and (verdict.kind, verdict.causes[0].cause.name) == expected


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_busy_host_is_not_blamed_for_replays_that_are_not_late(hosts: str):
    """It reaches the first collectives 1.2 ms late, which is less than the threshold, and later its GPU is slow."""
    kernels = recorded(hosts)
    kernels["flags"] |= np.uint8(GpuKernelFlag.IS_REPLAY)
    first, own = (kernels[kernels["comm_rank"] == rank] for rank in (0, 1))
    first.sort(order="seq")
    number = own["seq"] - own["seq"].min()
    peer_ns = first["ts_ns"][np.searchsorted(first["seq"], own["seq"])]
    late_ns = (number % PER_REPLAY + 1) * 1_200_000
    own["ts_ns"] = np.where(number < 60 * PER_REPLAY, peer_ns + late_ns, own["ts_ns"])
    whole = on_hosts(trace(np.concatenate([first, own])), Category.ON_CPU, 300_000_000, until=0.5)
    (verdict,) = diagnose(whole).verdicts
    assert verdict.ranks == [1] and (verdict.kind, verdict.causes[0].cause.name) == ("device", "gpu_slow")


@pytest.mark.parametrize("hosts", HOSTS)
def test_replays_that_no_rank_reaches_late_are_healthy(hosts: str):
    rows = recorded(hosts)
    by_rank = [rows[rows["comm_rank"] == rank] for rank in (0, 1)]
    for own in by_rank:  # both ranks reach a replay when rank 0 does
        own["ts_ns"] = by_rank[0]["ts_ns"][np.searchsorted(by_rank[0]["seq"], own["seq"])]
    report = diagnose(trace(np.concatenate(by_rank)))
    assert report.verdicts == [] and report.answer == "healthy", report.gaps


def test_a_collective_between_replays_is_left_out_where_replays_are_marked():
    """The time of its call is not the time at which the GPU reaches it."""
    rows = recorded("ahead")
    rows["flags"] |= np.uint8(GpuKernelFlag.IS_REPLAY)
    is_eager = rows["seq"] == rows["seq"].min() + 100
    rows["flags"][is_eager] &= ~np.uint8(GpuKernelFlag.IS_REPLAY)
    arrivals = gpu_arrivals(rows)
    assert len(arrivals) == len(rows) - 2 and set(rows["seq"][is_eager]).isdisjoint(arrivals["seq"])


def test_rounds_with_the_times_of_other_kernels_on_some_ranks_leave_the_answer_open():
    rows = recorded("ahead")
    is_own = rows["comm_rank"] == 0
    rows["start_ns"][is_own] = rows["ts_ns"][is_own] + 10_000
    rows["end_ns"][is_own] = rows["start_ns"][is_own] + 50_000
    report = diagnose(trace(rows))
    assert report.answer == "inconclusive" and report.verdicts == []
    (gap,) = [gap for gap in report.gaps if "times of other kernels" in gap.reason]
    assert gap.reason.startswith(f"{len(rows)} collectives")


def test_times_of_the_operations_themselves_are_kept():
    rows = recorded("ahead")
    rows["start_ns"] = rows["ts_ns"] + 10_000
    rows["end_ns"] = rows["start_ns"] + 50_000
    same, is_by_call = with_replay_times(rows)
    assert same is rows and not is_by_call.any()


def test_operations_of_one_kernel_have_equal_times_of_their_own():
    """NCCL runs the operations of a group in one kernel."""
    rows = recorded("ahead")
    rows = rows[np.lexsort((rows["seq"], rows["comm_rank"]))]
    group = np.arange(len(rows)) // PER_REPLAY
    rows["ts_ns"] = rows["ts_ns"][group * PER_REPLAY] + np.arange(len(rows)) % PER_REPLAY * 2_000
    rows["start_ns"] = rows["ts_ns"][group * PER_REPLAY] + 10_000
    rows["end_ns"] = rows["start_ns"] + 50_000
    assert not with_replay_times(rows)[1].any()


def test_a_long_group_of_one_kernel_keeps_its_times():
    """The host takes longer to call 64 operations than the GPU pauses; the kernel starts after the last call."""
    n_steps, n_calls = 40, 64
    rows = layout.empty(layout.GPU_KERNELS, 2 * n_steps * n_calls)
    rank, step, call = np.unravel_index(np.arange(len(rows)), (2, n_steps, n_calls))
    rows["pid"], rows["comm_rank"], rows["nranks"], rows["comm_hash"] = 100 + rank, rank, 2, 0xABC
    rows["seq"], rows["op"], rows["peer_rank"] = step * n_calls + call, Op.ALL_GATHER, UNKNOWN
    rows["flags"] = GpuKernelFlag.HAS_GPU_TIMES
    rows["ts_ns"] = 10**12 + step * 30_000_000 + call * 20_000
    called_ns = 10**12 + step * 30_000_000 + (n_calls - 1) * 20_000
    rows["start_ns"] = called_ns + 50_000 + (rank == 1) * 20_000_000
    rows["end_ns"] = called_ns + 21_000_000
    rows["noticed_ns"] = rows["start_ns"] + 5_000 + call * 100
    same, is_by_call = with_replay_times(rows)
    assert same is rows and not is_by_call.any()
    arrivals = gpu_arrivals(rows)
    late_ns = [arrivals["ts_ns"][arrivals["comm_rank"] == each] for each in (0, 1)]
    assert np.median(late_ns[1] - late_ns[0]) == pytest.approx(20e6, abs=1e5)


def test_a_graph_with_one_operation_has_the_times_of_other_kernels():
    """Equal times without other operations between them, as in a group, but noticed before later calls."""
    rows = recorded("ahead")
    rows = rows[(rows["seq"] - rows["seq"].min()) % PER_REPLAY == 1]
    rows = rows[np.lexsort((rows["seq"], rows["comm_rank"]))]
    first = np.arange(len(rows)) // 64 * 64
    rows["start_ns"], rows["end_ns"] = rows["start_ns"][first], rows["end_ns"][first]
    assert with_replay_times(rows)[1].all()
