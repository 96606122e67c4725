"""The intervals off the CPU of the threads of a recording, and their categories."""

from dataclasses import dataclass

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, OffCpuFlag
from stallscope.events.syscalls import blocked_category
from stallscope.importers.recorded_events import LONG_NS, OPEN_NS, Raw

_STOPPED_BITS, _DEAD_BITS, _BLOCKED_BITS, _UNINTERRUPTIBLE = 0x4 | 0x8, 0x10 | 0x20 | 0x80, 0x1 | 0x2, 0x2


def own_disk_requests(block: Raw, pid: int) -> tuple[Array, Array]:
    """Begin and end of the disk requests that a process issued, sorted by begin."""
    issued = block.where((block.kind == "block_issue") & (block.pid == pid))
    done = block.where(block.kind == "block_complete")
    ends = []
    for request, ts_ns in zip(issued.arguments[0].tolist(), issued.ts_ns.tolist(), strict=True):
        later = done.ts_ns[(done.arguments[0] == request) & (done.ts_ns >= ts_ns)]
        ends.append(int(later[0]) if len(later) else ts_ns)
    return issued.ts_ns, np.array(ends, np.int64)


@dataclass(frozen=True)
class OffCpu:
    """Intervals off the CPU of one thread, with the raw reason; `category` is filled in later."""

    columns: dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self.columns[name] = value


def off_cpu(switches: Raw, wakeups: Raw, *, pid: int, tid: int, last_ns: int) -> tuple[OffCpu, int]:
    """Off-CPU intervals of a thread, and the moment it ended (a large number while it lives)."""
    left, came = switches.arguments[2] == tid, switches.arguments[3] == tid
    leaving = switches.where(left)
    on_ns = switches.ts_ns[came]
    state = leaving.arguments[4].astype(np.int64)
    is_dead = (state & _DEAD_BITS) > 0
    end_ns = int(leaving.ts_ns[is_dead][0]) if is_dead.any() else int(OPEN_NS)
    leaving, state = leaving.where(~is_dead), state[~is_dead]
    back = np.searchsorted(on_ns, leaving.ts_ns, side="right")
    is_off = back >= len(on_ns)
    on = (
        np.where(is_off, OPEN_NS, on_ns[np.where(is_off, 0, back)])
        if len(on_ns)
        else np.full(len(back), OPEN_NS)
    )
    woken_ns = wakeups.ts_ns[wakeups.arguments[1] == tid]
    wake = np.searchsorted(woken_ns, leaving.ts_ns, side="left")
    has_wake = wake < len(woken_ns)
    woken = np.where(has_wake, woken_ns[np.where(has_wake, wake, 0)], on) if len(woken_ns) else on
    return OffCpu(
        {
            "off_ns": leaving.ts_ns,
            "on_ns": on,
            "woken_ns": np.minimum(woken, on),
            "state": state,
            "preempt": leaving.preempt,
            "syscall_nr": leaving.arguments[5].astype(np.int64),
            "by_pid": leaving.arguments[1].astype(np.int64),
            "by_comm": leaving.comm,
        }
    ), end_ns


def off_categories(off: OffCpu, has_syscalls: bool, *, io_begin_ns: Array, io_end_ns: Array) -> Array:
    """The category of each interval: disk, stopped, preempted, or the category of its system call."""
    state, is_blocked = off["state"], (off["state"] & _BLOCKED_BITS) > 0
    is_uninterruptible = (state & _UNINTERRUPTIBLE) > 0
    if has_syscalls:
        category = blocked_category(off["syscall_nr"], is_interruptible=~is_uninterruptible)
    else:
        category = np.full(len(state), int(Category.OTHER_OFF))
    on_disk = is_uninterruptible & _overlaps(off["off_ns"], off["on_ns"], io_begin_ns, io_end_ns)
    category = np.where(on_disk, int(Category.IO), category)
    category = np.where((state & _STOPPED_BITS) > 0, int(Category.STOPPED), category)
    runnable = off["preempt"] | (~is_blocked & ((state & _STOPPED_BITS) == 0))
    return np.where(runnable, int(Category.PREEMPTED), category)


def _overlaps(begin_ns: Array, end_ns: Array, other_begin_ns: Array, other_end_ns: Array) -> Array:
    """Whether each interval touches one of the others (sorted by begin)."""
    if not len(other_begin_ns):
        return np.zeros(len(begin_ns), bool)
    latest_end = np.maximum.accumulate(other_end_ns)
    last = np.searchsorted(other_begin_ns, end_ns, side="left") - 1
    return (last >= 0) & (latest_end[np.maximum(last, 0)] >= begin_ns)


def offcpu_rows(off: OffCpu, pid: int, tid: int) -> Array:
    """The intervals of a millisecond or more as rows."""
    long = off["on_ns"] - off["off_ns"] >= LONG_NS
    rows = layout.empty(layout.OFFCPU, int(long.sum()))
    is_open = off["on_ns"][long] >= OPEN_NS
    rows["ts_ns"], rows["pid"], rows["tid"] = off["off_ns"][long], pid, tid
    rows["duration_ns"] = np.where(is_open, UNKNOWN, off["on_ns"][long] - off["off_ns"][long])
    rows["runnable_ns"] = np.where(is_open, UNKNOWN, off["on_ns"][long] - off["woken_ns"][long])
    rows["category"] = off["category"][long]
    preempted = rows["category"] == Category.PREEMPTED
    rows["flags"] = np.where(preempted, int(OffCpuFlag.PREEMPTED), 0)
    rows["syscall_nr"] = off["syscall_nr"][long]
    rows["by_pid"] = off["by_pid"][long]
    rows["by_comm"] = np.char.encode(off["by_comm"][long], "utf-8") if long.any() else b""
    return rows
