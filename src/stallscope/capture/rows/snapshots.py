"""The kernel's table of processes at a moment, as rows of SNAPSHOTS.

The accounts are sums of time stamps, so now has to be added to the account of a process's present state. The state of a
process is the state of its most active GPU thread, the largest byte of its word.
"""

import numpy as np

from stallscope.capture.probes.program import State
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array


def snapshots(state: State, *, node: int) -> Array:
    """One row of SNAPSHOTS for each process of Program.processes().

    The row of a process whose state changed during the reading is off by the reading time, some microseconds.
    """
    states, indices = state.rows, np.arange(len(state.pids))
    rows = layout.empty(layout.SNAPSHOTS, len(states))
    rows["ts_ns"], rows["node"], rows["pid"], rows["alive"] = state.now_ns, node, state.pids, 1
    by_slot = states["word"].astype("<u8").reshape(-1, 1).view(np.uint8)
    most_active = by_slot.argmax(axis=1)
    rows["category"] = by_slot[indices, most_active]
    rows["ledger_ns"] = _accounts(states, rows["category"], state.now_ns)
    rows["n_collectives"], rows["n_completed"] = states["n_collectives"], states["n_synced"]
    slot = states["slots"][indices, most_active]
    rows["syscall_nr"] = np.where(slot["off"] > 0, slot["syscall_nr"], UNKNOWN)
    _fill_calls(rows, slot)
    return rows


def _accounts(states: Array, category: Array, now_ns: Array) -> Array:
    """ns (n, categories): the sums, and the time since the present state began."""
    accounts = states["ns"].view(np.int64).copy()
    accounts[np.arange(len(states)), category] += now_ns
    return accounts[:, 1:]


def _fill_calls(rows: Array, slot: Array) -> None:
    """The outermost call that the most active thread is inside, and since when."""
    is_waiting = slot["class_op"] > 0
    is_inside = is_waiting | (slot["nccl_op"] > 0)
    rows["in_call"] = np.where(is_waiting, slot["class_op"], slot["nccl_op"])
    since = np.where(is_waiting, slot["class_since_ns"], slot["nccl_since_ns"])
    rows["in_call_since_ns"] = np.where(is_inside, since, UNKNOWN)
