"""The time ledger of a process from the kernel's raw events; it shares no arithmetic with the BPF ledger.

Raw events exist only while everything is recorded (Options.record_all); they are for checks of the ledger.
"""

import numpy as np

from stallscope.events.kernel import Kind
from stallscope.events.layout import Array
from stallscope.events.ledger import ThreadEvents, account
from stallscope.events.names import Category

_FOREVER = np.iinfo(np.int64).max // 4


def accounts(raw: Array, pid: int, at_ns: Array) -> Array:
    """ns (n, categories) that the process had spent at each moment. raw: kernel.RAW sorted by time."""
    events = raw[raw["pid"] == pid]
    threads = [
        thread for tid in np.unique(events["tid"]) for thread in _lifetimes(events[events["tid"] == tid])
    ]
    return account(threads, at_ns)


def _lifetimes(events: Array) -> list[ThreadEvents]:
    """The periods in which the ledger followed the thread."""
    born = np.flatnonzero(events["kind"] == Kind.BORN)
    return [_thread(lifetime) for lifetime in np.split(events, born[1:])] if len(born) else []


def _thread(events: Array) -> ThreadEvents:
    kinds, ts_ns = events["kind"], events["ts_ns"]
    dead = ts_ns[kinds == Kind.DEAD]
    calls = _pairs(events, Kind.ENTER, Kind.RETURN)
    offs = _pairs(events, Kind.OFF, Kind.ON)
    category = np.array([events["category"][i] for i, _ in offs], np.int64)
    off_ns, on_ns = _times(ts_ns, offs)
    woken_ns = on_ns.copy()
    for i in np.flatnonzero(kinds == Kind.WAKEUP):
        at = int(np.searchsorted(off_ns, ts_ns[i], side="right")) - 1
        if at >= 0 and ts_ns[i] <= on_ns[at]:
            woken_ns[at] = min(woken_ns[at], ts_ns[i])
            if events["category"][i] == Category.CHILD:
                category[at] = Category.CHILD
    return ThreadEvents(
        *_times(ts_ns, calls),
        np.array([events["category"][i] for i, _ in calls], np.int64),
        off_ns,
        on_ns,
        woken_ns,
        category,
        first_ns=int(ts_ns[0]),
        last_ns=int(dead[0]) if len(dead) else _FOREVER,
    )


def _pairs(events: Array, begin: Kind, end: Kind) -> list[tuple[int, int]]:
    """Indices of each begin and of the end that follows it, -1 without an end."""
    pairs: list[tuple[int, int]] = []
    for i in np.flatnonzero(np.isin(events["kind"], (begin, end))).tolist():
        if events["kind"][i] == begin:
            pairs.append((i, -1))
        elif pairs and pairs[-1][1] < 0:
            pairs[-1] = (pairs[-1][0], i)
    return pairs


def _times(ts_ns: Array, pairs: list[tuple[int, int]]) -> tuple[Array, Array]:
    begin = np.array([ts_ns[i] for i, _ in pairs], np.int64)
    end = np.array([ts_ns[j] if j >= 0 else _FOREVER for _, j in pairs], np.int64)
    return begin, end
