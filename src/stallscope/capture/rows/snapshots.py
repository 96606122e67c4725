"""The kernel's table of processes at a moment, as rows of SNAPSHOTS."""

import numpy as np

from stallscope.capture.probes.program import State, states_of_slots
from stallscope.capture.rows.accounts import accounts
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category


def snapshots(state: State, *, node: int, moved_ns: Array | None = None) -> Array:
    """One row of SNAPSHOTS for each process of Program.processes().

    moved_ns: the correction of each ledger, UnprobedWaits.moved_ns().

    The row of a process whose state changed during the reading is off by the reading time, some microseconds.
    """
    states, indices = state.rows, np.arange(len(state.pids))
    rows = layout.empty(layout.SNAPSHOTS, len(states))
    rows["ts_ns"], rows["node"], rows["pid"], rows["alive"] = state.now_ns, node, state.pids, 1
    by_slot = states_of_slots(states)
    most_active = by_slot.argmax(axis=1)
    rows["category"] = by_slot[indices, most_active]
    rows["ledger_ns"] = accounts(state)
    if moved_ns is not None:
        rows["ledger_ns"] += moved_ns
        rows["estimated_ns"] = moved_ns[:, Category.DEVICE - 1]
    rows["n_collectives"], rows["n_completed"] = states["n_collectives"], states["n_synced"]
    slot = states["slots"][indices, most_active]
    rows["syscall_nr"] = np.where(slot["off"] > 0, slot["syscall_nr"], UNKNOWN)
    _fill_calls(rows, slot)
    return rows


def _fill_calls(rows: Array, slot: Array) -> None:
    """The outermost call that the most active thread is inside, and since when."""
    is_waiting = slot["class_op"] > 0
    is_inside = is_waiting | (slot["nccl_op"] > 0)
    rows["in_call"] = np.where(is_waiting, slot["class_op"], slot["nccl_op"])
    since = np.where(is_waiting, slot["class_since_ns"], slot["nccl_since_ns"])
    rows["in_call_since_ns"] = np.where(is_inside, since, UNKNOWN)
