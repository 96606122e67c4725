"""The CUDA calls of the threads of a recording: outermost calls, waits, counts, slow calls."""

from dataclasses import dataclass

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.ledger import waits_or_device
from stallscope.events.names import Category, Op
from stallscope.importers.recorded_events import LONG_NS, OPEN_NS, Raw

_SHORT_COPY_NS = 100_000  # a copy to the host this short did not wait
_CALL_CLASSES = (
    (Op.SYNC, Category.WAIT_GPU, ("Synchronize",)),
    (Op.ALLOC, Category.ALLOC, ("cudaMalloc", "cuMemAlloc", "HostAlloc", "cudaMallocHost", "HostRegister")),
    (Op.FREE, Category.ALLOC, ("cudaFree", "cuMemFree")),
    (Op.COPY, Category.COPY, ("cudaMemcpy", "cuMemcpy")),
)


@dataclass(frozen=True)
class Calls:
    """Outermost calls of one class table, over the threads of one process, sorted by entry."""

    enter_ns: Array
    leave_ns: Array
    tid: Array
    op: Array
    category: Array
    symbol: Array
    result: Array
    is_to_host: Array


def outermost_calls(own: Raw) -> Calls:
    """Traced calls of one thread, without calls made inside another call."""
    category, op = _classes(own.symbol)
    made = own.where(category > 0)
    category, op = category[category > 0], op[category > 0]
    begins, ends, has_returned = _outermost(made.kind == "enter", made.symbol)
    is_open = ends < 0
    end = np.where(is_open, 0, ends)
    return Calls(
        enter_ns=made.ts_ns[begins],
        leave_ns=np.where(is_open, OPEN_NS, made.ts_ns[end]),
        tid=made.tid[begins],
        op=op[begins],
        category=category[begins],
        symbol=made.symbol[begins],
        result=np.where(has_returned, made.arguments[0][end].astype(np.int32), UNKNOWN),
        is_to_host=_is_to_host(made.where(begins)),
    )


def _outermost(is_enter: Array, symbol: Array) -> tuple[Array, Array, Array]:
    """Outermost calls among the entries and returns of one thread: rows of entry and end, and if it returned.

    A call that never returned (left by an exception, or the record is lost) ends with the next call that cannot be
    inside it: only driver calls are made inside others. The end is -1 while a call is open. A return without its
    entry, as of a call in progress when the recording began, is ignored.
    """
    calls: list[tuple[int, int, bool]] = []
    inside: list[str] = []
    begin = 0
    for i, (enters, name) in enumerate(zip(is_enter.tolist(), symbol.tolist(), strict=True)):
        if enters:
            if inside and (name.startswith("cuda") or name in inside):
                calls.append((begin, i, False))
                inside = []
            if not inside:
                begin = i
            inside.append(name)
        elif name in inside:
            inside = inside[: inside.index(name)]
            if not inside:
                calls.append((begin, i, True))
    if inside:
        calls.append((begin, -1, False))
    outermost = np.array(calls, np.int64).reshape(-1, 3)
    return outermost[:, 0], outermost[:, 1], outermost[:, 2].astype(bool)


def _is_to_host(made: Raw) -> Array:
    """Copies from device to host: cudaMemcpyKind 2 (driver_types.h), or a driver call named for it."""
    by_kind = np.char.startswith(made.symbol, "cudaMemcpy") & (made.arguments[3] == 2)
    return by_kind | np.char.startswith(made.symbol, "cuMemcpyDtoH")


def _classes(symbol: Array) -> tuple[Array, Array]:
    names, inverse = np.unique(symbol, return_inverse=True)
    category, op = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    for i, name in enumerate(names.tolist()):
        for op_class, its_category, parts in _CALL_CLASSES:
            if name.startswith("cu") and any(part in name for part in parts) and not category[i]:
                category[i], op[i] = its_category, op_class
    return category[inverse], op[inverse]


def joined(calls: list[Calls]) -> Calls:
    """All threads' calls in one, sorted by entry."""
    columns = [np.concatenate([getattr(part, name) for part in calls]) for name in Calls.__dataclass_fields__]
    order = np.argsort(columns[0], kind="stable")
    return Calls(*(column[order] for column in columns))


def with_waits(calls: list[Calls], enqueued_ns: Array) -> list[Calls]:
    """The calls with each synchronise call classified: a wait for others, or for the own device.

    A copy to the host waits for the work enqueued before it: if that includes a collective, it is a wait as well.
    """
    every = joined(calls)
    is_sync = every.op == Op.SYNC
    enter_ns, leave_ns = every.enter_ns[is_sync], every.leave_ns[is_sync]
    every.category[is_sync] = waits_or_device(enter_ns, leave_ns, enqueued_ns)
    waiting = every.is_to_host & _is_pending(every.enter_ns, leave_ns, enqueued_ns)
    every.category[waiting] = Category.WAIT_GPU
    own_masks = [every.tid == (part.tid[0] if len(part.tid) else -1) for part in calls]
    return [Calls(*(getattr(every, name)[mask] for name in Calls.__dataclass_fields__)) for mask in own_masks]


def _is_pending(at_ns: Array, synced_ns: Array, enqueued_ns: Array) -> Array:
    """Whether a collective was enqueued before each moment and after the last synchronise call before it ended."""
    ends = np.sort(synced_ns)
    last = np.searchsorted(ends, at_ns, side="right") - 1
    since = np.where(last >= 0, ends[np.maximum(last, 0)], np.iinfo(np.int64).min) if len(ends) else at_ns * 0
    return np.searchsorted(enqueued_ns, at_ns, side="right") > np.searchsorted(
        enqueued_ns, since, side="right"
    )


def add_counts(collectives: Array, calls: Calls) -> None:
    """Add to each collective the number of calls of each class so far."""
    for column, ops in (("n_syncs", (Op.SYNC,)), ("n_allocs", (Op.ALLOC, Op.FREE)), ("n_copies", (Op.COPY,))):
        entered = calls.enter_ns[np.isin(calls.op, ops)]
        collectives[column] = np.searchsorted(entered, collectives["ts_ns"], side="right")


def add_last_wait(collectives: Array, calls: Calls) -> None:
    """Add to each collective the last wait that ended before the collective."""
    waits = (calls.category == Category.WAIT_GPU) & (calls.leave_ns < OPEN_NS)
    waits &= (calls.op == Op.SYNC) | (calls.leave_ns - calls.enter_ns >= _SHORT_COPY_NS)
    enter_ns, leave_ns = calls.enter_ns[waits], calls.leave_ns[waits]
    order = np.argsort(leave_ns, kind="stable")
    last = np.searchsorted(leave_ns[order], collectives["ts_ns"], side="right") - 1
    if len(order):
        for column, times in (("wait_enter_ns", enter_ns), ("wait_leave_ns", leave_ns)):
            collectives[column] = np.where(last >= 0, times[order][np.maximum(last, 0)], UNKNOWN)


def slow_calls(calls: Calls, pid: int, symbols: tuple[str, ...]) -> Array:
    """The calls of a millisecond or more as rows."""
    slow = calls.leave_ns - calls.enter_ns >= LONG_NS
    numbers = {name: i for i, name in enumerate(symbols)}
    rows = layout.empty(layout.CALLS, int(slow.sum()))
    rows["ts_ns"], rows["pid"], rows["tid"] = calls.enter_ns[slow], pid, calls.tid[slow]
    is_open = calls.leave_ns[slow] >= OPEN_NS
    rows["duration_ns"] = np.where(is_open, UNKNOWN, calls.leave_ns[slow] - calls.enter_ns[slow])
    rows["op"], rows["result"] = calls.op[slow], calls.result[slow]
    rows["symbol"] = [numbers[name] for name in calls.symbol[slow].tolist()]
    return rows
