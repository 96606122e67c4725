"""States in the kernel's form, made by hand: sums of time stamps, one byte per thread."""

import numpy as np

from stallscope.capture.probes.program import State
from stallscope.capture.rows.snapshots import snapshots
from stallscope.events import kernel
from stallscope.events.names import Category, Op

NOW = 10_000


def state(**fields: object) -> np.ndarray:
    """One process, born at 1000, and ON_CPU since."""
    row = np.zeros(1, kernel.PROCESS)
    row["born_ns"] = 1000
    row["word"] = int(Category.ON_CPU)
    row["ns"][0, Category.ON_CPU] = np.uint64(2**64 - 1000)
    row["slots"][0, :]["syscall_nr"] = -1
    for name, value in fields.items():
        row[name] = value
    return row


def told(*rows: np.ndarray) -> np.ndarray:
    pids = np.arange(len(rows)) + 50
    return snapshots(State(pids, np.concatenate(rows), np.full(len(rows), NOW)), node=3)


def test_the_present_state_is_charged_up_to_now():
    """ON_CPU from 1000 to 4000, ALLOC from 4000 on."""
    row = state(word=int(Category.ALLOC))
    row["ns"][0, Category.ON_CPU] = 4000 - 1000
    row["ns"][0, Category.ALLOC] = np.uint64(2**64 - 4000)
    (snapshot,) = told(row)
    expected = np.zeros(len(Category) - 1, np.int64)
    expected[Category.ON_CPU - 1], expected[Category.ALLOC - 1] = 3000, NOW - 4000
    assert snapshot["ledger_ns"].tolist() == expected.tolist()
    assert snapshot["ledger_ns"].sum() == NOW - 1000
    assert snapshot["category"] == Category.ALLOC


def test_the_most_active_thread_speaks_for_the_process():
    row = state(word=Category.LOCK | Category.WAIT_GPU << 8 | Category.NET << 16)
    row["slots"][0, 1]["class_op"], row["slots"][0, 1]["class_since_ns"] = Op.SYNC, 7000
    row["slots"][0, 1]["off"], row["slots"][0, 1]["syscall_nr"] = Category.LOCK, 202
    row["slots"][0, 0]["nccl_op"], row["slots"][0, 0]["nccl_since_ns"] = Op.GROUP, 6000
    (snapshot,) = told(row)
    assert snapshot["category"] == Category.WAIT_GPU
    assert (snapshot["in_call"], snapshot["in_call_since_ns"]) == (Op.SYNC, 7000)
    assert snapshot["syscall_nr"] == 202


def test_a_running_thread_inside_nccl_is_in_a_call_without_a_system_call():
    row = state()
    row["slots"][0, 0]["nccl_op"], row["slots"][0, 0]["nccl_since_ns"] = Op.COMM_INIT, 6000
    row["slots"][0, 0]["syscall_nr"] = 230  # of an earlier sleep
    (snapshot,) = told(row)
    assert (snapshot["in_call"], snapshot["in_call_since_ns"]) == (Op.COMM_INIT, 6000)
    assert snapshot["syscall_nr"] == -1


def test_a_process_outside_calls_has_no_call_in_its_snapshot():
    (snapshot,) = told(state())
    assert (snapshot["in_call"], snapshot["in_call_since_ns"], snapshot["alive"]) == (Op.NONE, -1, 1)


def test_each_process_has_its_own_snapshot_row():
    first, second = state(n_collectives=7, n_synced=5), state(n_collectives=9, n_synced=9)
    rows = told(first, second)
    assert rows["pid"].tolist() == [50, 51]
    assert rows["n_collectives"].tolist() == [7, 9]
    assert rows["n_completed"].tolist() == [5, 9]
    assert set(rows["node"].tolist()) == {3}


def test_there_are_no_snapshots_without_processes():
    none = State(np.zeros(0, np.int64), np.zeros(0, kernel.PROCESS), np.zeros(0, np.int64))
    assert len(snapshots(none, node=0)) == 0
