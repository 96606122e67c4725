"""Recording folders: events.parquet (calls and scheduler events by eBPF), truth.json (clock and hardware),
and optionally nccl_profiler.parquet (when kernels start on the GPU).

The ledger is computed from the raw events. Recordings made without system call numbers cannot distinguish a sleep
from a lock or a socket; then a blocked thread is in other_off, unless it waited for a disk request of its own
process.
Statements on faults in truth.json are never read.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.identity import split_hash
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.ledger import ThreadEvents, account, waits_or_device
from stallscope.events.names import DATATYPE_BYTES, N_CATEGORIES, Category, CollectiveFlag, OffCpuFlag, Op
from stallscope.events.syscalls import blocked_category
from stallscope.events.trace import Clock, Trace
from stallscope.importers.parquet import table
from stallscope.importers.registry import Importer, Unread

_COLUMNS = (
    *("ts_ns", "pid", "tid", "cpu", "kind", "symbol"),
    *("a0", "a1", "a2", "a3", "a4", "a5", "a6", "preempt", "comm"),
)
_TEXT_COLUMNS = ("kind", "symbol", "comm", "event")
_PROFILER_COLUMNS = ("pid", "id", "event", "t_start_ns", "gpu_start_ns", "gpu_stop_ns", "parent_id")
_SHORT_COPY_NS = 100_000  # a copy to the host this short did not wait
_LONG_NS = 1_000_000  # longer calls and off-CPU intervals get individual records

# symbol -> operation, and which argument holds count, datatype, reduce operation, peer or root, communicator
# (nccl.h 2.28; a6 is the 7th argument or the first stack word).
_COLLECTIVES: dict[str, tuple[Op, int, int, int | None, int | None, int]] = {
    "ncclAllReduce": (Op.ALL_REDUCE, 2, 3, 4, None, 5),
    "ncclAllGather": (Op.ALL_GATHER, 2, 3, None, None, 4),
    "ncclReduceScatter": (Op.REDUCE_SCATTER, 2, 3, 4, None, 5),
    "ncclBroadcast": (Op.BROADCAST, 2, 3, None, 4, 5),
    "ncclBcast": (Op.BROADCAST, 1, 2, None, 3, 4),
    "ncclReduce": (Op.REDUCE, 2, 3, 4, 5, 6),
    "ncclAlltoAll": (Op.ALL_TO_ALL, 2, 3, None, None, 4),
    "ncclGather": (Op.GATHER, 2, 3, None, 4, 5),
    "ncclScatter": (Op.SCATTER, 2, 3, None, 4, 5),
    "ncclSend": (Op.SEND, 1, 2, None, 3, 4),
    "ncclRecv": (Op.RECV, 1, 2, None, 3, 4),
}
_CALL_CLASSES = (
    (Op.SYNC, Category.WAIT_GPU, ("Synchronize",)),
    (Op.ALLOC, Category.ALLOC, ("cudaMalloc", "cuMemAlloc", "HostAlloc", "cudaMallocHost", "HostRegister")),
    (Op.FREE, Category.ALLOC, ("cudaFree", "cuMemFree")),
    (Op.COPY, Category.COPY, ("cudaMemcpy", "cuMemcpy")),
)
_OPEN_NS = np.int64(1) << np.int64(62)
_LARGEST_ID = (1 << 32) - 1  # of a process or thread
_STOPPED_BITS, _DEAD_BITS, _BLOCKED_BITS, _UNINTERRUPTIBLE = 0x4 | 0x8, 0x10 | 0x20 | 0x80, 0x1 | 0x2, 0x2
_NO_COLOUR = 0xFFFFFFFF


@dataclass(frozen=True)
class _Raw:
    """The columns of events.parquet; `arguments` is uint64 (7, n)."""

    ts_ns: Array
    pid: Array
    tid: Array
    kind: Array
    symbol: Array
    arguments: Array
    preempt: Array
    comm: Array
    has_syscalls: bool

    def where(self, mask: Array) -> "_Raw":
        return _Raw(
            ts_ns=self.ts_ns[mask],
            pid=self.pid[mask],
            tid=self.tid[mask],
            kind=self.kind[mask],
            symbol=self.symbol[mask],
            arguments=self.arguments[:, mask],
            preempt=self.preempt[mask],
            comm=self.comm[mask],
            has_syscalls=self.has_syscalls,
        )


@dataclass(frozen=True)
class _Calls:
    """Outermost calls of one class table, over the threads of one process, sorted by entry."""

    enter_ns: Array
    leave_ns: Array
    tid: Array
    op: Array
    category: Array
    symbol: Array
    result: Array
    is_to_host: Array


def _accepts(path: Path, head: bytes) -> bool:
    return path.is_dir() and (path / "events.parquet").is_file()


def _read(files: Sequence[Path], unread: Unread) -> Trace:
    path = files[0]
    raw = _raw(path / "events.parquet")
    facts, clock, known_ranks = _truth(path / "truth.json")
    pids = [
        int(pid)
        for pid in np.unique(raw.pid[np.isin(raw.symbol, list(_COLLECTIVES)) & (raw.kind == "enter")])
    ]
    if not pids:
        raise BadTrace(
            f"{path / 'events.parquet'} holds no NCCL collective: there is nothing to compare across ranks"
        )
    switches = raw.where(raw.kind == "sched_switch")
    symbols = ("", *sorted(set(raw.symbol[raw.kind == "enter"].tolist())))
    block = raw.where(np.isin(raw.kind, ["block_issue", "block_complete"]))
    wakeups = raw.where(raw.kind == "sched_wakeup")
    parts = [_process(raw, pid, switches, wakeups, block, symbols) for pid in pids]
    communicators = np.concatenate([part["communicators"] for part in parts])
    collectives = np.concatenate([part["collectives"] for part in parts])
    _complete_splits(communicators, collectives)
    _add_gpu_times(collectives, path / "nccl_profiler.parquet")
    for part, pid in zip(parts, pids, strict=True):
        _name_rank(part["processes"], communicators, known_ranks.get(pid, UNKNOWN))
    return Trace(
        collectives=collectives[np.argsort(collectives["ts_ns"], kind="stable")],
        communicators=communicators,
        calls=np.concatenate([part["calls"] for part in parts]),
        offcpu=np.concatenate([part["offcpu"] for part in parts]),
        snapshots=np.concatenate([part["snapshots"] for part in parts]),
        processes=np.concatenate([part["processes"] for part in parts]),
        nodes=("recorded-host",),
        symbols=symbols,
        clocks=(clock,) if clock else (),
        ends_ns=(int(raw.ts_ns[-1]),),
        source=f"recorded kernel events of a real job ({facts.get('hardware', 'hardware not stated')})",
        facts=facts,
    )


def _raw(path: Path) -> _Raw:
    columns = _table(path, _COLUMNS)
    if not len(columns["ts_ns"]):
        raise BadTrace(f"{path} holds no events")
    order = np.argsort(columns["ts_ns"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    arguments = np.stack([columns[f"a{i}"].astype(np.uint64) for i in range(7)])
    is_switch = columns["kind"] == "sched_switch"
    return _Raw(
        ts_ns=columns["ts_ns"].astype(np.int64),
        pid=columns["pid"].astype(np.int64),
        tid=columns["tid"].astype(np.int64),
        kind=columns["kind"],
        symbol=columns["symbol"],
        arguments=arguments,
        preempt=columns["preempt"].astype(bool),
        comm=columns["comm"],
        has_syscalls=bool((arguments[5][is_switch] != 0).any()),
    )


def _table(path: Path, wanted: tuple[str, ...]) -> dict[str, Array]:
    """The wanted columns of a Parquet file: numbers unchanged, text as str. Raises BadTrace."""
    columns = table(path, wanted)
    wrong = [name for name in wanted if columns[name].dtype.kind not in ("OU" if _is_text(name) else "iub")]
    try:
        texts = {name: columns[name].astype(str) for name in wanted if _is_text(name) and name not in wrong}
    except ValueError:  # lists, or bytes that are not text
        wrong = [name for name in wanted if _is_text(name)]
    for name in ("pid", "tid"):
        values = columns.get(name, np.zeros(1, np.int64))
        if name not in wrong and len(values) and (values.min() < 0 or values.max() > _LARGEST_ID):
            wrong.append(name)
    if wrong:
        raise BadTrace(
            f"{path}: column {', '.join(wrong)} has values of another kind than documented: record it again"
        )
    return columns | texts


def _is_text(name: str) -> bool:
    return name in _TEXT_COLUMNS


def _truth(path: Path) -> tuple[dict[str, str], Clock | None, dict[int, int]]:
    """Facts about the machine, the clock, and ranks by process; no facts about the fault."""
    if not path.is_file():
        return {}, None, {}
    try:
        content = json.loads(path.read_text())
        ranks = {int(pid): rank for rank, pid in enumerate(content.get("rank_pids", []))}
        reading = content.get("clock")
        clock = Clock(0, int(reading["monotonic_ns"]), int(reading["realtime_ns"])) if reading else None
        if clock and max(abs(clock.monotonic_ns), abs(clock.wall_ns)) >= _OPEN_NS:
            raise ValueError("the clock is beyond 64 bits")
        facts = {
            name: " ".join(str(content[name]).split()) for name in ("hardware", "software") if name in content
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        raise BadTrace(f"{path} is not as documented ({reason}): restore it, or remove it") from error
    return facts, clock, ranks


def _process(
    raw: _Raw, pid: int, switches: _Raw, wakeups: _Raw, block: _Raw, symbols: tuple[str, ...]
) -> dict[str, Array]:
    own = raw.where((raw.pid == pid) & np.isin(raw.kind, ["enter", "return"]))
    entered = own.where(own.kind == "enter")
    io_begin_ns, io_end_ns = _own_disk_requests(block, pid)
    last_ns = int(raw.ts_ns[-1])
    tids = [int(tid) for tid in np.unique(entered.tid)]
    collectives, communicators = _collectives(own, pid)
    calls = [_outermost_calls(own.where(own.tid == tid)) for tid in tids]
    enqueued_ns = np.sort(collectives["ts_ns"])
    calls = _with_waits(calls, enqueued_ns)
    threads, offcpu, ended_ns = [], [], UNKNOWN
    for tid, made in zip(tids, calls, strict=True):
        off, thread_end_ns = _off_cpu(switches, wakeups, pid=pid, tid=tid, last_ns=last_ns)
        off["category"] = _off_categories(off, raw.has_syscalls, io_begin_ns=io_begin_ns, io_end_ns=io_end_ns)
        if tid == pid and thread_end_ns < _OPEN_NS:
            ended_ns = thread_end_ns
        first_ns = int(own.ts_ns[own.tid == tid][0])
        threads.append(_thread(made, off, first_ns=first_ns, last_ns=min(thread_end_ns, int(_OPEN_NS))))
        offcpu.append(_offcpu_rows(off, pid, tid))
    order = np.argsort(collectives["ts_ns"], kind="stable")
    collectives = collectives[order]
    collectives["ledger_ns"] = account(threads, collectives["ts_ns"])
    every = _joined(calls)
    _add_counts(collectives, every)
    _add_last_wait(collectives, every)
    if not raw.has_syscalls:
        collectives["flags"] |= np.uint32(CollectiveFlag.NO_SYSCALLS)
    processes = layout.empty(layout.PROCESSES, 1)
    processes["ts_ns"], processes["pid"], processes["ended_ns"] = own.ts_ns[0], pid, ended_ns
    names = raw.comm[(raw.kind == "sched_switch") & (raw.arguments[3] == pid)]
    processes["comm"] = names[0].encode()[:15] if len(names) else b""
    at_end = np.array([ended_ns if ended_ns != UNKNOWN else last_ns], np.int64)
    return {
        "collectives": collectives,
        "communicators": communicators,
        "calls": _slow_calls(every, pid, symbols),
        "offcpu": np.concatenate(offcpu) if offcpu else layout.empty(layout.OFFCPU),
        "snapshots": _last_snapshot(
            threads, every, at_end, pid=pid, n_collectives=len(collectives), is_alive=ended_ns == UNKNOWN
        ),
        "processes": processes,
    }


def _own_disk_requests(block: _Raw, pid: int) -> tuple[Array, Array]:
    """Begin and end of the disk requests that a process issued, sorted by begin."""
    issued = block.where((block.kind == "block_issue") & (block.pid == pid))
    done = block.where(block.kind == "block_complete")
    ends = []
    for request, ts_ns in zip(issued.arguments[0].tolist(), issued.ts_ns.tolist(), strict=True):
        later = done.ts_ns[(done.arguments[0] == request) & (done.ts_ns >= ts_ns)]
        ends.append(int(later[0]) if len(later) else ts_ns)
    return issued.ts_ns, np.array(ends, np.int64)


def _collectives(own: _Raw, pid: int) -> tuple[Array, Array]:
    """The process's arrivals in order of the calls, and its communicators."""
    rows: list[dict[str, Any]] = []
    communicators: list[dict[str, Any]] = []
    by_handle: dict[int, dict[str, Any]] = {}
    pending: dict[int, tuple[str, list[int]]] = {}
    n_splits: dict[int, int] = {}
    n_rounds: dict[tuple[int, int, int], int] = {}
    groups: dict[int, list[dict[str, Any]]] = {}
    depth: dict[int, int] = {}
    is_nccl = np.char.startswith(own.symbol, "nccl")
    nccl = own.where(is_nccl)
    for ts_ns, tid, kind, symbol, *words in zip(
        *(nccl.ts_ns.tolist(), nccl.tid.tolist(), nccl.kind.tolist(), nccl.symbol.tolist()),
        *nccl.arguments.tolist(),
        strict=True,
    ):
        if symbol.startswith(("ncclCommInit", "ncclCommSplit")):
            if kind == "enter":
                pending[tid] = (symbol, words)
            elif tid in pending:
                made = _communicator(*pending.pop(tid), by_handle=by_handle, n_splits=n_splits)
                if words[1]:
                    by_handle[words[1]] = made | {"ts_ns": ts_ns, "pid": pid}
                    communicators.append(by_handle[words[1]])
        elif kind != "enter":
            continue
        elif symbol in ("ncclCommDestroy", "ncclCommAbort"):
            if words[0] in by_handle:
                by_handle.pop(words[0])["ended_ns"] = ts_ns
        elif symbol == "ncclGroupStart":
            depth[tid] = depth.get(tid, 0) + 1
        elif symbol == "ncclGroupEnd":
            depth[tid] = max(depth.get(tid, 0) - 1, 0)
            if not depth[tid]:
                for row in groups.pop(tid, []):
                    row["ts_ns"] = ts_ns
        elif symbol in _COLLECTIVES:
            row = _collective(symbol, words, by_handle=by_handle, n_rounds=n_rounds)
            row |= {"ts_ns": ts_ns, "pid": pid, "tid": tid}
            if depth.get(tid, 0):
                row["flags"] |= CollectiveFlag.GROUPED
                groups.setdefault(tid, []).append(row)
            rows.append(row)
    return _filled(layout.COLLECTIVES, rows), _filled(layout.COMMUNICATORS, communicators)


def _communicator(
    symbol: str, words: list[int], *, by_handle: dict[int, dict[str, Any]], n_splits: dict[int, int]
) -> dict[str, Any]:
    if symbol == "ncclCommSplit":
        parent, colour = words[0], words[1] & 0xFFFFFFFF
        n_earlier = n_splits.get(parent, 0)
        n_splits[parent] = n_earlier + 1
        parent_hash = by_handle.get(parent, {}).get("comm_hash", 0)
        return {"comm_hash": split_hash(parent_hash, n_earlier, colour), "parent_hash": parent_hash}
    return {"comm_hash": words[6], "nranks": _c_int(words[1]), "comm_rank": _c_int(words[2])}


def _c_int(word: int) -> int:
    """A C int that is never negative; UNKNOWN for a negative value."""
    value = word & 0xFFFFFFFF
    return value if value < 1 << 31 else UNKNOWN


def _collective(
    symbol: str,
    words: list[int],
    *,
    by_handle: dict[int, dict[str, Any]],
    n_rounds: dict[tuple[int, int, int], int],
) -> dict[str, Any]:
    op, count, datatype, reduce_op, peer, comm = _COLLECTIVES[symbol]
    handle = words[comm]
    known = by_handle.get(handle, {})
    row = {
        "op": int(op),
        "count": words[count] if words[count] < 1 << 48 else UNKNOWN,
        "datatype": min((words[datatype] & 0xFF) + 1, 0xFF),
        "reduce_op": 0 if reduce_op is None else min((words[reduce_op] & 0xFF) + 1, 0xFF),
        "peer_rank": UNKNOWN if peer is None else _c_int(words[peer]),
        "comm_hash": known.get("comm_hash", handle),
        "comm_rank": known.get("comm_rank", UNKNOWN),
        "nranks": known.get("nranks", UNKNOWN),
        "flags": 0 if known else int(CollectiveFlag.LATE_ATTACH),
    }
    size = DATATYPE_BYTES[row["datatype"]] if row["datatype"] < len(DATATYPE_BYTES) else 0
    row["count_bytes"] = row["count"] * size if size and row["count"] != UNKNOWN else UNKNOWN
    direction = {Op.SEND: 1, Op.RECV: 2}.get(op, 0)
    key = (handle, direction, row["peer_rank"] if direction else 0)
    row["seq"] = n_rounds.get(key, 0)
    n_rounds[key] = row["seq"] + 1
    return row


def _filled(table: layout.Table, rows: list[dict[str, Any]]) -> Array:
    out = layout.empty(table, len(rows))
    for field in table.fields:
        for i, row in enumerate(rows):
            if field.name in row:
                out[field.name][i] = row[field.name]
    return out


def _outermost_calls(own: _Raw) -> _Calls:
    """Traced calls of one thread, without calls made inside another call."""
    category, op = _classes(own.symbol)
    made = own.where(category > 0)
    category, op = category[category > 0], op[category > 0]
    begins, ends, has_returned = _outermost(made.kind == "enter", made.symbol)
    is_open = ends < 0
    end = np.where(is_open, 0, ends)
    return _Calls(
        enter_ns=made.ts_ns[begins],
        leave_ns=np.where(is_open, _OPEN_NS, made.ts_ns[end]),
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


def _is_to_host(made: _Raw) -> Array:
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


def _joined(calls: list[_Calls]) -> _Calls:
    """All threads' calls in one, sorted by entry."""
    columns = [
        np.concatenate([getattr(part, name) for part in calls]) for name in _Calls.__dataclass_fields__
    ]
    order = np.argsort(columns[0], kind="stable")
    return _Calls(*(column[order] for column in columns))


def _with_waits(calls: list[_Calls], enqueued_ns: Array) -> list[_Calls]:
    """The calls with each synchronise call classified: a wait for others, or for the own device.

    A copy to the host waits for the work enqueued before it: if that includes a collective, it is a wait as well.
    """
    every = _joined(calls)
    is_sync = every.op == Op.SYNC
    enter_ns, leave_ns = every.enter_ns[is_sync], every.leave_ns[is_sync]
    every.category[is_sync] = waits_or_device(enter_ns, leave_ns, enqueued_ns)
    waiting = every.is_to_host & _is_pending(every.enter_ns, leave_ns, enqueued_ns)
    every.category[waiting] = Category.WAIT_GPU
    own_masks = [every.tid == (part.tid[0] if len(part.tid) else -1) for part in calls]
    return [
        _Calls(*(getattr(every, name)[mask] for name in _Calls.__dataclass_fields__)) for mask in own_masks
    ]


def _is_pending(at_ns: Array, synced_ns: Array, enqueued_ns: Array) -> Array:
    """Whether a collective was enqueued before each moment and after the last synchronise call before it ended."""
    ends = np.sort(synced_ns)
    last = np.searchsorted(ends, at_ns, side="right") - 1
    since = np.where(last >= 0, ends[np.maximum(last, 0)], np.iinfo(np.int64).min) if len(ends) else at_ns * 0
    return np.searchsorted(enqueued_ns, at_ns, side="right") > np.searchsorted(
        enqueued_ns, since, side="right"
    )


@dataclass(frozen=True)
class _Off:
    """Intervals off the CPU of one thread, with the raw reason; `category` is filled in later."""

    columns: dict[str, Array]

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self.columns[name] = value


def _off_cpu(switches: _Raw, wakeups: _Raw, *, pid: int, tid: int, last_ns: int) -> tuple[_Off, int]:
    """Off-CPU intervals of a thread, and the moment it ended (a large number while it lives)."""
    left, came = switches.arguments[2] == tid, switches.arguments[3] == tid
    leaving = switches.where(left)
    on_ns = switches.ts_ns[came]
    state = leaving.arguments[4].astype(np.int64)
    is_dead = (state & _DEAD_BITS) > 0
    end_ns = int(leaving.ts_ns[is_dead][0]) if is_dead.any() else int(_OPEN_NS)
    leaving, state = leaving.where(~is_dead), state[~is_dead]
    back = np.searchsorted(on_ns, leaving.ts_ns, side="right")
    is_off = back >= len(on_ns)
    on = (
        np.where(is_off, _OPEN_NS, on_ns[np.where(is_off, 0, back)])
        if len(on_ns)
        else np.full(len(back), _OPEN_NS)
    )
    woken_ns = wakeups.ts_ns[wakeups.arguments[1] == tid]
    wake = np.searchsorted(woken_ns, leaving.ts_ns, side="left")
    has_wake = wake < len(woken_ns)
    woken = np.where(has_wake, woken_ns[np.where(has_wake, wake, 0)], on) if len(woken_ns) else on
    return _Off(
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


def _off_categories(off: _Off, has_syscalls: bool, *, io_begin_ns: Array, io_end_ns: Array) -> Array:
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


def _thread(calls: _Calls, off: _Off, *, first_ns: int, last_ns: int) -> ThreadEvents:
    return ThreadEvents(
        call_enter_ns=calls.enter_ns,
        call_leave_ns=calls.leave_ns,
        call_category=calls.category,
        off_ns=off["off_ns"],
        on_ns=off["on_ns"],
        woken_ns=off["woken_ns"],
        off_category=off["category"],
        first_ns=first_ns,
        last_ns=last_ns,
    )


def _offcpu_rows(off: _Off, pid: int, tid: int) -> Array:
    long = off["on_ns"] - off["off_ns"] >= _LONG_NS
    rows = layout.empty(layout.OFFCPU, int(long.sum()))
    is_open = off["on_ns"][long] >= _OPEN_NS
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


def _add_counts(collectives: Array, calls: _Calls) -> None:
    for column, ops in (("n_syncs", (Op.SYNC,)), ("n_allocs", (Op.ALLOC, Op.FREE)), ("n_copies", (Op.COPY,))):
        entered = calls.enter_ns[np.isin(calls.op, ops)]
        collectives[column] = np.searchsorted(entered, collectives["ts_ns"], side="right")


def _add_last_wait(collectives: Array, calls: _Calls) -> None:
    waits = (calls.category == Category.WAIT_GPU) & (calls.leave_ns < _OPEN_NS)
    waits &= (calls.op == Op.SYNC) | (calls.leave_ns - calls.enter_ns >= _SHORT_COPY_NS)
    enter_ns, leave_ns = calls.enter_ns[waits], calls.leave_ns[waits]
    order = np.argsort(leave_ns, kind="stable")
    last = np.searchsorted(leave_ns[order], collectives["ts_ns"], side="right") - 1
    if len(order):
        for column, times in (("wait_enter_ns", enter_ns), ("wait_leave_ns", leave_ns)):
            collectives[column] = np.where(last >= 0, times[order][np.maximum(last, 0)], UNKNOWN)


def _slow_calls(calls: _Calls, pid: int, symbols: tuple[str, ...]) -> Array:
    slow = calls.leave_ns - calls.enter_ns >= _LONG_NS
    numbers = {name: i for i, name in enumerate(symbols)}
    rows = layout.empty(layout.CALLS, int(slow.sum()))
    rows["ts_ns"], rows["pid"], rows["tid"] = calls.enter_ns[slow], pid, calls.tid[slow]
    is_open = calls.leave_ns[slow] >= _OPEN_NS
    rows["duration_ns"] = np.where(is_open, UNKNOWN, calls.leave_ns[slow] - calls.enter_ns[slow])
    rows["op"], rows["result"] = calls.op[slow], calls.result[slow]
    rows["symbol"] = [numbers[name] for name in calls.symbol[slow].tolist()]
    return rows


def _last_snapshot(
    threads: list[ThreadEvents], calls: _Calls, at_ns: Array, *, pid: int, n_collectives: int, is_alive: bool
) -> Array:
    rows = layout.empty(layout.SNAPSHOTS, 1)
    rows["ts_ns"], rows["pid"], rows["alive"], rows["n_collectives"] = at_ns, pid, is_alive, n_collectives
    rows["ledger_ns"] = account(threads, at_ns)
    just_before = account(threads, at_ns - 1)
    growing = np.flatnonzero((rows["ledger_ns"] - just_before)[0, :N_CATEGORIES])
    rows["category"] = growing[-1] + 1 if len(growing) and is_alive else Category.NONE
    unfinished = np.flatnonzero(calls.leave_ns >= _OPEN_NS)
    if len(unfinished) and is_alive:
        rows["in_call"], rows["in_call_since_ns"] = calls.op[unfinished[0]], calls.enter_ns[unfinished[0]]
    return rows


def _complete_splits(communicators: Array, collectives: Array) -> None:
    """Size of split communicators: how many processes of the recording share the hash."""
    is_split = communicators["parent_hash"] != 0
    for comm_hash in np.unique(communicators["comm_hash"][is_split]):
        members = communicators["comm_hash"] == comm_hash
        communicators["nranks"][members] = members.sum()
        collectives["nranks"][collectives["comm_hash"] == comm_hash] = members.sum()


def _name_rank(processes: Array, communicators: Array, otherwise: int) -> None:
    """The job's rank of a process is its rank in the first communicator that was not split off."""
    own = communicators[
        (communicators["pid"] == processes["pid"][0]) & (communicators["comm_rank"] != UNKNOWN)
    ]
    whole = own[own["parent_hash"] == 0]
    largest = whole[np.argmax(whole["nranks"])] if len(whole) else None
    processes["rank"] = otherwise if largest is None else largest["comm_rank"]
    processes["local_rank"] = processes["rank"]
    processes["nranks"] = UNKNOWN if largest is None else largest["nranks"]


def _add_gpu_times(collectives: Array, path: Path) -> None:
    """Start and end on the GPU, from the NCCL profiler plugin's records of the same calls."""
    if not path.is_file():
        return
    plugin_rows = _table(path, _PROFILER_COLUMNS)
    is_kernel, is_coll = plugin_rows["event"] == "kernel", plugin_rows["event"] == "coll"
    for pid in np.unique(collectives["pid"]):
        process_rows = np.flatnonzero(
            (collectives["pid"] == pid) & ~np.isin(collectives["op"], [Op.SEND, Op.RECV])
        )
        process_rows = process_rows[np.argsort(collectives["ts_ns"][process_rows], kind="stable")]
        enqueued = is_coll & (plugin_rows["pid"] == pid)
        before = (
            np.searchsorted(
                collectives["ts_ns"][process_rows], plugin_rows["t_start_ns"][enqueued], side="right"
            )
            - 1
        )
        row_of = dict(
            zip(
                plugin_rows["id"][enqueued].tolist(),
                process_rows[np.maximum(before, 0)].tolist(),
                strict=True,
            )
        )
        kernels = is_kernel & (plugin_rows["pid"] == pid) & (plugin_rows["gpu_start_ns"] > 0)
        rows = np.array(
            [row_of.get(parent, -1) for parent in plugin_rows["parent_id"][kernels].tolist()], np.int64
        )
        known = rows >= 0
        start = np.full(len(collectives), np.iinfo(np.int64).max)
        np.minimum.at(start, rows[known], plugin_rows["gpu_start_ns"][kernels][known])
        np.maximum.at(collectives["gpu_end_ns"], rows[known], plugin_rows["gpu_stop_ns"][kernels][known])
        touched = np.unique(rows[known])
        collectives["gpu_start_ns"][touched] = start[touched]


IMPORTER = Importer("recording folder", _accepts, _read, takes_folders=True)
