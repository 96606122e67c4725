"""Hand-made recordings become the right arrivals, communicators and ledgers."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stallscope.events.identity import split_hash
from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Category, CollectiveFlag, Datatype, OffCpuFlag, Op
from stallscope.importers import importer_for

from .recordings import MS, Recording, two_ranks

US = 1000


def read(made: Recording, tmp_path, **rest):
    folder = made.write(tmp_path / "recording", **rest)
    return importer_for(folder).read(folder)


def of(rows, pid):
    return rows[rows["pid"] == pid]


def at(us: float) -> int:
    return 10**9 + int(us * 1000)


def spent(row) -> dict[str, int]:
    return {Category(i + 1).name: int(ns) // US for i, ns in enumerate(row["ledger_ns"]) if ns}


def test_arrivals_have_the_arguments_of_the_call(tmp_path):
    trace = read(two_ranks(), tmp_path)
    rows = of(trace.collectives, 11)
    assert rows["ts_ns"].tolist() == [at(1000), at(2000), at(3000)]
    assert rows["seq"].tolist() == [0, 1, 2]
    assert rows["count"].tolist() == [1000, 1001, 1002]
    assert rows["count_bytes"].tolist() == [4000, 4004, 4008]
    assert set(rows["op"]) == {Op.ALL_REDUCE}
    assert set(rows["datatype"]) == {Datatype.FLOAT32}
    assert set(rows["comm_hash"]) == {0xBEEF}
    assert set(rows["comm_rank"]) == {0}
    assert set(rows["nranks"]) == {2}
    assert not (rows["flags"] & CollectiveFlag.LATE_ATTACH).any()


def test_ranks_are_those_of_the_communicator_and_of_the_truth(tmp_path):
    trace = read(two_ranks(), tmp_path)
    assert trace.processes[["pid", "rank", "nranks"]].tolist() == [(11, 0, 2), (12, 1, 2)]
    unnamed = Recording()
    for pid in (11, 12):
        unnamed.all_reduce(1000, pid, 0xA0)
    output = read(unnamed, tmp_path / "b", truth={"rank_pids": [12, 11]})
    assert output.processes[["pid", "rank"]].tolist() == [(11, 1), (12, 0)]
    assert (output.collectives["flags"] & CollectiveFlag.LATE_ATTACH).all()


def test_the_clock_ties_monotonic_to_wall_time(tmp_path):
    truth = {"clock": {"monotonic_ns": 5, "realtime_ns": 1000}, "hardware": "two boxes"}
    trace = read(two_ranks(), tmp_path, truth=truth)
    assert [(clock.monotonic_ns, clock.wall_ns) for clock in trace.clocks] == [(5, 1000)]
    assert "two boxes" in trace.source
    assert trace.facts == {"hardware": "two boxes"}


def test_the_injected_fault_is_not_read(tmp_path):
    plain = read(two_ranks(), tmp_path / "a", truth={})
    trace = read(two_ranks(), tmp_path / "b", truth={"culprit_ranks": [1], "cause": "x", "period_steps": 5})
    for name in ("collectives", "calls", "offcpu", "processes"):
        assert getattr(plain, name).tobytes() == getattr(trace, name).tobytes()
    assert plain.facts == trace.facts == {}


def test_the_ledger_has_the_time_of_each_category(tmp_path):
    """From 1000 us on: 50 us until the wait, 350 us in it, 600 us until the next arrival at 2000 us."""
    rows = of(read(two_ranks(), tmp_path).collectives, 11)
    assert spent(rows[0]) == {"ON_CPU": 900}
    assert spent(rows[1]) == {"ON_CPU": 900 + 650, "WAIT_GPU": 350}
    assert spent(rows[2]) == {"ON_CPU": 900 + 2 * 650, "WAIT_GPU": 700}
    assert rows["n_syncs"].tolist() == [0, 1, 2]
    assert rows["wait_enter_ns"].tolist() == [UNKNOWN, at(1050), at(2050)]
    assert rows["wait_leave_ns"].tolist() == [UNKNOWN, at(1400), at(2400)]


def test_a_second_synchronise_call_is_device_time(tmp_path):
    made = two_ranks()
    made.call(1500, 1600, 11, "cudaDeviceSynchronize")
    rows = of(read(made, tmp_path).collectives, 11)
    assert spent(rows[1]) == {"ON_CPU": 900 + 550, "WAIT_GPU": 350, "DEVICE": 100}


@pytest.mark.parametrize(
    ("state", "nr", "preempt", "wanted"),
    [
        (0, -1, False, "PREEMPTED"),
        (1, 230, False, "SLEEP"),
        (1, 230, True, "PREEMPTED"),
        (1, 202, False, "LOCK"),
        (1, 270, False, "NET"),
        (2, 16, False, "DRIVER"),
        (2, 17, False, "IO"),
        (4, 62, False, "STOPPED"),
        (8, 62, False, "STOPPED"),
        (8193, 202, False, "LOCK"),
        (258, 16, False, "DRIVER"),
        (1, 61, False, "OTHER_OFF"),
    ],
)
def test_time_off_the_cpu_has_its_reason(tmp_path, state, nr, preempt, wanted):
    made = two_ranks()
    made.off(1500, 1800, 11, state=state, nr=nr, preempt=preempt)
    made.off(2700, 2750, 12, state=1, nr=202)  # so that the recording knows system calls
    row = of(read(made, tmp_path).collectives, 11)[1]
    assert spent(row) == {"ON_CPU": 900 + 350, "WAIT_GPU": 350, wanted: 300}


def test_without_system_calls_a_block_is_a_block(tmp_path):
    made = two_ranks()
    made.off(1500, 1800, 11, state=1)
    rows = of(read(made, tmp_path).collectives, 11)
    assert spent(rows[1]) == {"ON_CPU": 900 + 350, "WAIT_GPU": 350, "OTHER_OFF": 300}
    assert (rows["flags"] & CollectiveFlag.NO_SYSCALLS).all()


def test_a_disk_request_of_the_process_makes_the_block_a_disk_wait(tmp_path):
    for issuer, wanted in ((11, "IO"), (12, "OTHER_OFF")):
        made = two_ranks()
        made.off(1500, 1800, 11, state=2)
        made.add(1490, issuer, "block_issue", "", 0xD15C, 8, 4096)
        made.add(1790, 0, "block_complete", "", 0xD15C, 8, 4096)
        row = of(read(made, tmp_path / str(issuer)).collectives, 11)[1]
        assert spent(row)[wanted] == 300


def test_time_from_waking_to_running_is_preempted(tmp_path):
    made = two_ranks()
    made.off(1500, 1800, 11, state=1, nr=230)
    made.add(1700, 5, "sched_wakeup", "", 11, 11)
    row = of(read(made, tmp_path).collectives, 11)[1]
    assert spent(row) == {"ON_CPU": 900 + 350, "WAIT_GPU": 350, "SLEEP": 200, "PREEMPTED": 100}


def test_long_intervals_are_recorded_individually(tmp_path):
    made = two_ranks()
    made.off(5000, 7500, 11, state=1, nr=230)
    made.off(8000, None, 12, state=1, nr=230)
    made.add(9000, 11, "enter", "cudaFree", 1)
    trace = read(made, tmp_path)
    slept = of(trace.offcpu, 11)[0]
    assert (slept["duration_ns"], slept["category"]) == (int(2.5 * MS), Category.SLEEP)
    assert (slept["by_pid"], slept["by_comm"], slept["flags"] & OffCpuFlag.PREEMPTED) == (5, b"other", 0)
    assert of(trace.offcpu, 12)["duration_ns"].tolist() == [UNKNOWN], "it has not come back"
    call = of(trace.calls, 11)[-1]
    assert (call["op"], call["duration_ns"], call["result"]) == (Op.FREE, UNKNOWN, UNKNOWN)
    assert trace.symbols[call["symbol"]] == "cudaFree"


def test_inside_a_group_the_arrival_is_that_of_its_end(tmp_path):
    made = two_ranks()
    for rank, pid in enumerate((11, 12)):
        made.call(5000, 5001, pid, "ncclGroupStart")
        made.all_reduce(5010, pid, 0xA0 + rank)
        made.all_reduce(5040, pid, 0xA0 + rank)
        made.call(5100, 5120, pid, "ncclGroupEnd")
        made.all_reduce(5200, pid, 0xA0 + rank)
    rows = of(read(made, tmp_path).collectives, 11)[3:]
    assert rows["ts_ns"].tolist() == [at(5100), at(5100), at(5200)]
    assert [bool(flags & CollectiveFlag.GROUPED) for flags in rows["flags"]] == [True, True, False]
    assert rows["seq"].tolist() == [3, 4, 5]


def test_sends_and_receives_are_numbered_by_peer(tmp_path):
    made = two_ranks(1)
    for i in range(2):
        made.call(5000 + 100 * i, 5010 + 100 * i, 11, "ncclSend", 1, 50, 7, 1, 0xA0)
        made.call(5020 + 100 * i, 5030 + 100 * i, 11, "ncclRecv", 1, 50, 7, 1, 0xA0)
        made.call(5000 + 100 * i, 5010 + 100 * i, 12, "ncclRecv", 1, 50, 7, 0, 0xA1)
    trace = read(made, tmp_path)
    sender = of(trace.collectives, 11)[1:]
    assert sender[["op", "peer_rank", "seq"]].tolist() == [
        (Op.SEND, 1, 0),
        (Op.RECV, 1, 0),
        (Op.SEND, 1, 1),
        (Op.RECV, 1, 1),
    ]
    assert of(trace.collectives, 12)[1:][["op", "peer_rank", "seq"]].tolist() == [
        (Op.RECV, 0, 0),
        (Op.RECV, 0, 1),
    ]


def test_a_split_has_the_same_identity_on_all_its_ranks(tmp_path):
    made = two_ranks(1)
    for rank, pid in enumerate((11, 12)):
        for n, handle in enumerate((0xC0, 0xD0)):
            begin = 4000 + 100 * n
            made.add(begin, pid, "enter", "ncclCommSplit", 0xA0 + rank, 3, rank)
            made.add(begin + 5, pid, "return", "ncclCommSplit", 0, handle + rank)
        made.all_reduce(5000, pid, 0xC0 + rank)
        made.all_reduce(5100, pid, 0xD0 + rank)
    trace = read(made, tmp_path)
    for pid in (11, 12):
        rows = of(trace.collectives, pid)
        assert rows["comm_hash"].tolist() == [0xBEEF, split_hash(0xBEEF, 0, 3), split_hash(0xBEEF, 1, 3)]
        assert rows["nranks"].tolist() == [2, 2, 2]
    parents = trace.communicators["parent_hash"].tolist()
    assert sorted(parents) == [0, 0, 0xBEEF, 0xBEEF, 0xBEEF, 0xBEEF]


def test_a_process_that_ends_is_noted(tmp_path):
    made = two_ranks()
    made.add(4000, 11, "sched_switch", "", 11, 5, 11, 5, 0x10, 0)
    made.add(9000, 12, "enter", "cudaMalloc", 1, 2)
    trace = read(made, tmp_path)
    assert trace.processes["ended_ns"].tolist() == [at(4000), UNKNOWN]
    assert trace.snapshots["alive"].tolist() == [0, 1]
    assert of(trace.snapshots, 12)["in_call"].tolist() == [Op.ALLOC]
    assert trace.ends_ns == (at(9000),)


def test_gpu_times_come_from_the_profiler(tmp_path):
    folder = two_ranks().write(tmp_path / "recording")
    observed = {
        "pid": [11, 11, 11, 12, 12],
        "id": [1, 2, 3, 1, 2],
        "event": ["coll", "kernel", "kernel", "coll", "kernel"],
        "t_start_ns": [at(1002), 0, 0, at(2003), 0],
        "gpu_start_ns": [0, 700, 690, 0, 900],
        "gpu_stop_ns": [0, 800, 820, 0, 950],
        "parent_id": [0, 1, 1, 0, 1],
    }
    pq.write_table(pa.table(observed), folder / "nccl_profiler.parquet")
    rows = importer_for(folder).read(folder).collectives
    assert of(rows, 11)[["gpu_start_ns", "gpu_end_ns"]].tolist() == [(690, 820), (-1, -1), (-1, -1)]
    assert of(rows, 12)[["gpu_start_ns", "gpu_end_ns"]].tolist() == [(-1, -1), (900, 950), (-1, -1)]


def test_calls_inside_calls_count_once(tmp_path):
    """cudaMalloc of the runtime calls cuMemAlloc of the driver."""
    made = two_ranks()
    made.add(1500, 11, "enter", "cudaMalloc", 1, 2)
    made.call(1520, 1580, 11, "cuMemAlloc_v2", 1, 2)
    made.add(1600, 11, "return", "cudaMalloc", 0)
    row = of(read(made, tmp_path).collectives, 11)[1]
    assert spent(row)["ALLOC"] == 100
    assert row["n_allocs"] == 1


def test_a_return_without_its_entry_does_no_harm(tmp_path):
    """The recording began while the call was under way."""
    made = two_ranks()
    made.add(50, 11, "return", "cudaStreamSynchronize", 0)
    rows = of(read(made, tmp_path).collectives, 11)
    assert spent(rows[2])["WAIT_GPU"] == 700


def test_a_call_that_never_returned_does_not_absorb_later_calls(tmp_path):
    """An exception left the call: the thread continues and makes other calls."""
    made = two_ranks()
    made.add(1500, 11, "enter", "cudaMalloc", 1, 2)
    rows = of(read(made, tmp_path).collectives, 11)
    assert spent(rows[2]) == {"ON_CPU": 900 + 2 * 650 - 500 - 50, "WAIT_GPU": 700, "ALLOC": 500 + 50}


def test_other_processes_are_not_ranks(tmp_path):
    made = two_ranks()
    made.call(1500, 1600, 99, "cudaMalloc", 1, 2)
    assert set(read(made, tmp_path).processes["pid"]) == {11, 12}
