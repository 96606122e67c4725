"""Arrivals, communicators, slow calls and losses: real probes on a library with NCCL's and CUDA's names."""

import ctypes
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stallscope.capture.probes.libbpf import Library
from stallscope.capture.probes.operations import SYMBOLS, Hook
from stallscope.capture.probes.program import MODES, Options, Program, correct_torn_rows
from stallscope.capture.rows import records
from stallscope.errors import CannotTrace
from stallscope.events import kernel, layout
from stallscope.events.kernel import Kind
from stallscope.events.layout import Array
from stallscope.events.names import Category, CollectiveFlag, Datatype, OffCpuFlag, Op

from ..patience import until

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

MASK = (1 << 64) - 1
ID = bytes(range(1, 129))
INIT = "made = P(); lib.ncclCommInitRank(ctypes.byref(made), 4, Id({id!r}), 2)"
SOME = "P(0), P(0), Z(16)"


def mixed(value: int, word: int) -> int:
    value = (value ^ word) * 0x100000001B3 & MASK
    return value ^ value >> 29


def id_hash(unique_id: bytes) -> int:
    """FNV-1a over 8-byte words, high bits folded down."""
    value = 0xCBF29CE484222325
    for word in struct.unpack("<16Q", unique_id):
        value = mixed(value, word)
    return value


def init(unique_id: bytes = ID) -> str:
    return INIT.format(id=unique_id)


def told(program: Program, pid: int) -> tuple[Array, Array]:
    """Arrivals and events of one process."""
    arrivals, events = program.arrivals.drain(), program.events.drain()
    return arrivals[arrivals["pid"] == pid], events[events["pid"] == pid]


def born(events: Array) -> Array:
    return records.of_kind(events, Kind.COMM_BORN)


@pytest.mark.parametrize("mode", MODES)
def test_an_arrival_has_the_communicator_rank_and_arguments(
    tracing: Callable[..., Program], puppet, mode: str
):
    functions = (
        "ncclCommInitRank",
        "ncclAllReduce",
        "cudaSetDevice",
    )  # each costs 0.1 s to detach in perf mode
    program = tracing(modes=(mode,), only=functions)
    puppet.does(
        "lib.cudaSetDevice(3)",
        init(),
        f"[lib.ncclAllReduce({SOME}, 9, 2, comm(made), P(77)) for _ in range(3)]",
    )
    arrivals, events = told(program, puppet.pid)
    assert program.mode == mode
    assert arrivals["seq"].tolist() == [0, 1, 2]
    last = arrivals[-1]
    assert last["comm_hash"] == id_hash(ID) == born(events)[0]["comm_hash"]
    assert (last["comm_rank"], last["nranks"], last["device"]) == (2, 4, 3)
    assert (last["op"], last["datatype"], last["reduce_op"]) == (Op.ALL_REDUCE, Datatype.BFLOAT16, 3)
    assert (last["count"], last["stream"], last["peer_rank"], last["flags"]) == (16, 77, -1, 0)
    row = records.collectives(arrivals, node=5)[-1]
    assert (row["count_bytes"], row["node"], row["comm_rank"]) == (32, 5, 2)


def test_bytes_are_exact_for_every_type_of_nccl(tracing: Callable[..., Program], puppet):
    """Sizes by nccl.h: ncclInt8, Uint8, Int32, Uint32, Int64, Uint64, Float16, 32, 64, Bfloat16, Float8e4m3, e5m2."""
    sizes = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]
    program = tracing()
    puppet.does(
        init(),
        f"[lib.ncclAllReduce(P(0), P(0), Z(1001), kind, 0, comm(made), P(0)) for kind in range({len(sizes)})]",
        "lib.ncclAllReduce(P(0), P(0), Z(1 << 40), 7, 0, comm(made), P(0))",
    )
    rows = records.collectives(told(program, puppet.pid)[0], node=0)
    assert rows["count_bytes"].tolist() == [*(1001 * size for size in sizes), 4 << 40]


def test_arguments_on_the_stack_are_read(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(init(), f"lib.ncclReduce({SOME}, 7, 1, 3, comm(made), P(55))")
    (arrival,) = told(program, puppet.pid)[0]
    assert (arrival["comm_hash"], arrival["peer_rank"], arrival["stream"]) == (id_hash(ID), 3, 55)


def test_a_call_inside_a_call_counts_once(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        init(), "lib.ncclBcast(P(0), Z(16), 7, 1, comm(made), P(0))", "lib.cudaMemcpy(2000, 0, Z(64), 1)"
    )
    arrivals, events = told(program, puppet.pid)
    assert len(born(events)) == 1
    assert arrivals["op"].tolist() == [Op.BROADCAST]
    (call,) = records.of_kind(events, Kind.CALL)
    assert (SYMBOLS[call["symbol"]], call["count_bytes"]) == ("cudaMemcpy", 64)


def test_calls_into_a_file_attached_twice_are_recorded_once(
    tracing: Callable[..., Program], puppet, library: Path, hooks: list[Hook]
):
    program = tracing()
    program.attach(f"/proc/self/root{library}", hooks)
    puppet.does(init(), f"[lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0)) for _ in range(100)]")
    arrivals, events = told(program, puppet.pid)
    assert arrivals["seq"].tolist() == list(range(100))
    assert len(born(events)) == 1


def test_calls_in_a_group_arrive_together_at_its_end(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        init(),
        "lib.ncclGroupStart(); lib.ncclGroupStart()",
        "[lib.ncclSend(P(0), Z(8), 7, peer, comm(made), P(0)) for peer in (0, 1, 3)]",
        "[lib.ncclRecv(P(0), Z(8), 7, peer, comm(made), P(0)) for peer in (0, 1, 3)]",
        "lib.ncclGroupEnd()",
    )
    before_ns = time.monotonic_ns()
    assert not len(told(program, puppet.pid)[0])
    puppet.does("lib.ncclGroupEnd()")
    arrivals, _ = told(program, puppet.pid)
    assert arrivals["op"].tolist() == [Op.SEND] * 3 + [Op.RECV] * 3
    assert arrivals["peer_rank"].tolist() == [0, 1, 3] * 2
    assert len(set(arrivals["ts_ns"].tolist())) == 1 and arrivals["ts_ns"][0] > before_ns
    assert (arrivals["flags"] == CollectiveFlag.GROUPED).all()


def test_all_calls_of_a_large_group_are_recorded(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        init(),
        "lib.ncclGroupStart()",
        "[lib.ncclSend(P(0), Z(8), 7, peer, comm(made), P(0)) for peer in range(100)]",
        "lib.ncclGroupEnd()",
    )
    arrivals, _ = told(program, puppet.pid)
    assert sorted(arrivals["peer_rank"].tolist()) == list(range(100))
    assert program.losses()["ungrouped"] == 100 - 64


CAPTURE = (
    "graph, runs = P(), P(); lib.cudaStreamBeginCapture(P(5), 0)",
    f"[lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(5)) for _ in range(3)]",
    "[lib.ncclSend(P(0), Z(8), 7, 1, comm(made), P(5)) for _ in range(2)]",
    "lib.cudaStreamEndCapture(P(5), ctypes.byref(graph))",
    "lib.cudaGraphInstantiate(ctypes.byref(runs), graph, ctypes.c_ulonglong(0))",
)
LAUNCH = "lib.cudaGraphLaunch(runs, P(9))"


def test_a_graph_launch_records_the_arrivals_of_its_collectives(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(init(), *CAPTURE)
    assert told(program, puppet.pid)[0]["seq"].tolist() == [0, 1, 2, 0, 1]
    puppet.does(LAUNCH, LAUNCH, f"lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0))")
    arrivals, _ = told(program, puppet.pid)
    assert arrivals["op"].tolist() == [Op.ALL_REDUCE, Op.SEND] * 2 + [Op.ALL_REDUCE]
    assert arrivals["seq"].tolist() == [3, 2, 6, 4, 9]
    assert arrivals["flags"].tolist() == [CollectiveFlag.GRAPH] * 4 + [0]
    assert (arrivals["comm_hash"] == id_hash(ID)).all()
    assert arrivals["stream"][:4].tolist() == [9] * 4
    (row,) = program.processes().rows
    assert row["n_collectives"] == 5 + 2 * 5 + 1


def test_a_failed_graph_capture_adds_no_arrivals(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(init(), *(line.replace("P(5)", "P(13)") for line in CAPTURE), LAUNCH)
    assert told(program, puppet.pid)[0]["seq"].tolist() == [0, 1, 2, 0, 1]


def test_sends_and_receives_are_numbered_by_peer(tracing: Callable[..., Program], puppet):
    program = tracing()
    call = "lib.nccl{}(P(0), Z(8), 7, {}, comm(made), P(0))"
    puppet.does(
        init(), *(call.format(op, peer) for op, peer in (("Send", 1), ("Send", 3), ("Send", 1), ("Recv", 1)))
    )
    puppet.does(f"lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0))")
    arrivals, _ = told(program, puppet.pid)
    assert arrivals["seq"].tolist() == [0, 0, 1, 0, 0]


def test_seq_restarts_when_a_handle_is_reused(tracing: Callable[..., Program], puppet):
    program = tracing()
    twice = f"[lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0)) for _ in range(2)]"
    again = f"made.value = first.value; lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0))"
    puppet.does(init(), twice, "first = P(made.value); lib.ncclCommDestroy(comm(made))", again)
    arrivals, events = told(program, puppet.pid)
    ended = records.communicators_ended(events)
    assert arrivals["seq"].tolist() == [0, 1, 0]
    assert (ended.pids.tolist(), ended.comm_hashes.tolist()) == ([puppet.pid], [id_hash(ID)])
    assert arrivals["comm_hash"][2] == 0 and arrivals["flags"][2] == CollectiveFlag.LATE_ATTACH


def test_a_communicator_older_than_the_trace_has_unknown_ranks(tracing: Callable[..., Program], puppet):
    puppet.does(init())
    program = tracing()
    puppet.does(f"lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0))")
    (arrival,) = told(program, puppet.pid)[0]
    assert (arrival["comm_hash"], arrival["comm_rank"], arrival["nranks"]) == (0, -1, -1)
    assert arrival["flags"] == CollectiveFlag.LATE_ATTACH
    assert arrival["comm"] != 0


def test_every_function_that_creates_communicators_is_recorded(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        init(),
        f"other = P(); lib.ncclCommInitRankConfig(ctypes.byref(other), 4, Id({ID!r}), 1, P(0))",
        f"ids = (Id * 2)(Id({ID!r}), Id({ID[::-1]!r}))",
        "lib.ncclCommInitRankScalable(ctypes.byref(other), 8, 5, 2, ids, P(0))",
        "lib.ncclCommShrink(comm(made), (ctypes.c_int * 2)(0, 3), 2, ctypes.byref(other), P(0), 0)",
        "handles = (P * 2)(); lib.ncclCommInitAll(handles, 2, (ctypes.c_int * 2)(6, 4))",
    )
    made = born(told(program, puppet.pid)[1])
    assert made["comm_rank"].tolist() == [2, 1, 5, 1, 0, 1]
    assert made["nranks"].tolist() == [4, 4, 8, 2, 2, 2]
    assert made["comm_hash"][:3].tolist() == [id_hash(ID)] * 3
    assert made["device"][4:].tolist() == [6, 4]
    assert made["comm_hash"][4] == made["comm_hash"][5] not in (0, id_hash(ID))
    assert made["parent_hash"][3] == id_hash(ID)


def test_a_split_is_known_by_parent_count_and_colour(tracing: Callable[..., Program], puppet):
    program = tracing()
    split = "child = P(); lib.ncclCommSplit(comm(made), {}, {}, ctypes.byref(child), P(0))"
    puppet.does(init(), split.format(7, 1), split.format(7, 1), split.format(-1, 0))
    puppet.does("child = P(made.value)", f"lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0))")
    _, first, second, outside = born(told(program, puppet.pid)[1])
    expected = [mixed(mixed(mixed(0xCBF29CE484222325, id_hash(ID)), n), 7) for n in range(2)]
    assert [first["comm_hash"], second["comm_hash"]] == expected
    assert (first["parent_hash"], first["parent_rank"], first["color"], first["key"]) == (
        id_hash(ID),
        2,
        7,
        1,
    )
    assert (first["comm_rank"], first["nranks"]) == (-1, -1)
    assert (outside["comm"], outside["comm_hash"], outside["color"]) == (0, 0, -1)


def test_slow_and_failed_calls_are_recorded(tracing: Callable[..., Program], puppet):
    program = tracing(slow_call_ns=80_000_000)
    before_ns = time.monotonic_ns()
    puppet.does(
        "lib.cudaStreamSynchronize(90000, 0)", "lib.cudaMalloc(1000, 0)", "lib.cudaFree(2)", "lib.cudaFree(0)"
    )
    calls = records.calls(records.of_kind(told(program, puppet.pid)[1], Kind.CALL), node=0)
    assert calls["op"].tolist() == [Op.SYNC, Op.FREE]
    assert calls["result"].tolist() == [0, 2]
    assert 90_000_000 <= calls["duration_ns"][0] < time.monotonic_ns() - before_ns


def test_a_long_off_cpu_interval_is_recorded_with_its_category(tracing: Callable[..., Program], puppet):
    program, before_ns = tracing(slow_off_ns=10_000_000), time.monotonic_ns()
    puppet.does("lib.cudaFree(0)", "import time; time.sleep(0.03)", "lib.cudaFree(0)")
    rows = records.offcpu(records.of_kind(told(program, puppet.pid)[1], Kind.OFF_CPU), node=0)
    slept = rows[rows["category"] == Category.SLEEP]
    assert len(slept) == 1
    assert 30_000_000 <= slept["duration_ns"][0] < time.monotonic_ns() - before_ns
    assert slept["runnable_ns"][0] >= 0


def test_the_waker_of_a_thread_is_recorded(tracing: Callable[..., Program], puppet):
    program = tracing(slow_off_ns=10_000_000)
    puppet.does("import os, time; r, w = os.pipe(); lib.cudaFree(0)")
    puppet.does(
        "child = os.fork() or (time.sleep(0.03), os.write(w, b'x'), os._exit(0))",
        "os.read(r, 1)",
        "os.wait()",
    )
    rows = records.offcpu(records.of_kind(told(program, puppet.pid)[1], Kind.OFF_CPU), node=0)
    by_child = rows[(rows["flags"] & OffCpuFlag.WOKEN_BY_CHILD) > 0]
    assert by_child["category"].tolist()[0] == Category.CHILD
    assert by_child["waker_pid"][0] not in (puppet.pid, os.getpid(), -1)


def test_an_open_call_is_visible(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(init(), f"lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0))")
    before_ns = time.monotonic_ns()
    puppet.tell("lib.cudaStreamSynchronize(600000000, 0)")  # the fixture ends it

    def current() -> tuple[np.void, np.void]:
        state = program.processes()
        (row,) = state.rows[state.pids == puppet.pid]
        return row, row["slots"][row["slots"]["tid"] == puppet.pid][0]

    until(lambda: current()[1]["class_op"] == Op.SYNC)
    row, slot = current()
    assert (slot["call"], slot["class_op"], slot["nccl_op"]) == (Category.WAIT_GPU, Op.SYNC, Op.NONE)
    assert before_ns <= slot["class_since_ns"] <= time.monotonic_ns()
    assert row["n_collectives"] == 1
    assert row["begun"] == row["ended"]


def test_records_that_overflow_the_ring_are_counted(tracing: Callable[..., Program], puppet):
    program = tracing(ring_bytes=1 << 16)
    puppet.does(init(), f"[lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0)) for _ in range(1000)]")
    arrivals, _ = told(program, puppet.pid)
    lost = program.losses()["lost_arrival"]
    assert lost > 0 and len(arrivals) + lost == 1000
    assert program.counters()[kernel.Counter.LOST_ARRIVAL].sum() == lost
    puppet.does(f"lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0))")
    assert told(program, puppet.pid)[0]["seq"].tolist() == [1000]


def test_more_threads_than_slots_are_followed_in_turn(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        init(),
        "import threading, time",
        "many = [threading.Thread(target=lambda: (lib.cudaFree(0), time.sleep(0.3))) for _ in range(12)]",
        "[(each.start(), time.sleep(0.01)) for each in many]; [each.join() for each in many]",
    )
    # A thread leaves the kernel's list a moment after its join returns.
    while len(list(Path(f"/proc/{puppet.pid}/task").iterdir())) > 1:
        time.sleep(0.01)
    puppet.does(f"lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0))")
    (arrival,) = told(program, puppet.pid)[0]
    assert arrival["n_threads"] == 1
    total = arrival["ledger_ns"].sum()
    assert 0 < total < arrival["ts_ns"]


def test_only_wanted_processes_are_traced(tracing: Callable[..., Program], puppet):
    program = tracing(pids=frozenset())
    puppet.does(init())
    assert not len(told(program, puppet.pid)[1])
    program.follow([puppet.pid])
    puppet.does(init())
    assert len(born(told(program, puppet.pid)[1])) == 1


def test_the_end_of_a_process_is_recorded_and_frees_its_slot(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        "import threading",
        "t = threading.Thread(target=lib.cudaFree, args=(0,)); t.start(); t.join()",
        init(),
    )
    assert puppet.pid in program.processes().pids
    puppet.process.kill()
    puppet.process.wait()
    events = told(program, puppet.pid)[1]
    assert len(events[events["kind"] == Kind.EXIT]) == 1
    assert puppet.pid not in program.processes().pids


def test_no_records_are_produced_without_processes(tracing: Callable[..., Program]):
    program = tracing(pids=frozenset())
    assert not len(program.processes().rows)
    assert not len(program.arrivals.drain())


def test_costs_are_counted_while_measured(tracing: Callable[..., Program], puppet):
    program = tracing()
    program.measure()
    puppet.does(init(), "[lib.cudaFree(0) for _ in range(200)]")
    cost = program.costs()["cuda_session" if program.mode == "session" else "cuda_enter"]
    assert cost.n_runs >= 200 and cost.run_ns > 0 and cost.n_verified > 0


@pytest.mark.pure
def test_a_missing_bpf_object_is_reported_with_a_remedy(bpf_object: Path, tmp_path: Path):
    with pytest.raises(CannotTrace, match="make bpf"):
        Program.load(Options(), tmp_path / "nothing.o")


@pytest.mark.pure
def test_an_object_of_another_version_is_refused(
    bpf_object: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    other = np.dtype([(name, kernel.ARRIVAL[name]) for name in kernel.ARRIVAL.names if name != "spare"])
    monkeypatch.setitem(kernel.STRUCTS, "arrival", other)
    with pytest.raises(CannotTrace, match="struct arrival"):
        Program.load(Options(), bpf_object)


def test_tables_have_the_columns_of_the_layout(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(init(), f"lib.ncclAllReduce({SOME}, 7, 0, comm(made), P(0))")
    arrivals, events = program.arrivals.drain(), program.events.drain()
    tables = records.tables(arrivals, events, node=1)
    for table in (layout.COLLECTIVES, layout.CALLS, layout.OFFCPU, layout.COMMUNICATORS):
        assert tables[table.name].dtype == layout.dtype(table)
    assert len(tables["collectives"]) == len(tables["communicators"]) == 1


@pytest.mark.pure
def test_a_change_half_done_is_mended():
    now, moved_at = 10_000_000, 9_999_000
    rows = np.zeros(2, kernel.PROCESS)
    rows["born_ns"], rows["begun"], rows["ended"] = 4_000_000, [7, 8], [6, 8]
    rows["word"] = Category.WAIT_GPU
    accounts = rows["ns"].view(np.int64)
    accounts[:, Category.ON_CPU], accounts[:, Category.WAIT_GPU] = 5_000_000, 1_000_000 - moved_at
    accounts[0, Category.ON_CPU] -= moved_at  # swapped from ON_CPU to WAIT_GPU, and the sums not yet
    accounts[0, Category.WAIT_GPU] += moved_at
    whole = correct_torn_rows(rows, np.full(2, now))["ns"].view(np.int64)
    assert whole[1].tolist() == accounts[1].tolist()
    assert abs(whole[0] - whole[1]).max() <= now - moved_at


LIVE = """
import sys, time
from stallscope.capture.probes.operations import Hook
from stallscope.capture.probes.program import Program
program = Program.load()
program.attach(sys.argv[1], [Hook(*eval(word)) for word in sys.argv[2:]])
print("attached", flush=True)
time.sleep(60)
"""


def link_ids() -> set[int]:
    """The numbers of all BPF links on this machine."""
    library, result, following = Library(), set(), ctypes.create_string_buffer(128)
    while True:
        struct.pack_into("=I", following, 0, max(result, default=0))
        try:
            library.bpf(31, following)  # BPF_LINK_GET_NEXT_ID
        except FileNotFoundError:
            return result
        result.add(struct.unpack_from("=I", following, 4)[0])


def links_of(pid: int) -> set[int]:
    """The numbers of the BPF links that a process holds."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/fdinfo").iterdir()]
    return {
        int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("link_id:")
    }


def test_no_probe_outlives_a_killed_tracer(bpf_object: Path, library: Path, hooks: list[Hook], puppet):
    command = [sys.executable, "-c", LIVE, str(library), *(repr(tuple(hook)) for hook in hooks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout is not None and tracer.stdout.readline() == "attached\n"
        puppet.does(init())
        held = links_of(tracer.pid)
        tracer.kill()
    until(lambda: not link_ids() & held)
    assert len(held) >= 7
    puppet.does(init())
