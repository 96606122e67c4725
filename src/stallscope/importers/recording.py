"""Recording folders: events.parquet (calls and scheduler events by eBPF), truth.json (clock and hardware),
and optionally nccl_profiler.parquet (when kernels start on the GPU).

The ledger is computed from the raw events. Recordings made without system call numbers cannot distinguish a sleep
from a lock or a socket; then a blocked thread is in other_off, unless it waited for a disk request of its own
process.
Statements on faults in truth.json are never read.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.ledger import ThreadEvents, account
from stallscope.events.names import N_CATEGORIES, Category, CollectiveFlag, Op
from stallscope.events.trace import Clock, Trace
from stallscope.importers.recorded_calls import (
    Calls,
    add_counts,
    add_last_wait,
    joined,
    outermost_calls,
    slow_calls,
    with_waits,
)
from stallscope.importers.recorded_collectives import COLLECTIVE_CALLS, collective_rows
from stallscope.importers.recorded_events import OPEN_NS, Raw, checked_table, raw_events
from stallscope.importers.recorded_off_cpu import (
    OffCpu,
    off_categories,
    off_cpu,
    offcpu_rows,
    own_disk_requests,
)
from stallscope.importers.registry import Importer, Unread

_PROFILER_COLUMNS = ("pid", "id", "event", "t_start_ns", "gpu_start_ns", "gpu_stop_ns", "parent_id")


def _accepts(path: Path, head: bytes) -> bool:
    return path.is_dir() and (path / "events.parquet").is_file()


def _read(files: Sequence[Path], unread: Unread) -> Trace:
    path = files[0]
    raw = raw_events(path / "events.parquet")
    facts, clock, known_ranks = _truth(path / "truth.json")
    pids = [
        int(pid)
        for pid in np.unique(raw.pid[np.isin(raw.symbol, list(COLLECTIVE_CALLS)) & (raw.kind == "enter")])
    ]
    if not pids:
        raise BadTrace(
            f"{path / 'events.parquet'} contains no NCCL collective: record a job with several ranks"
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


def _truth(path: Path) -> tuple[dict[str, str], Clock | None, dict[int, int]]:
    """Facts about the machine, the clock, and ranks by process; no facts about the fault."""
    if not path.is_file():
        return {}, None, {}
    try:
        content = json.loads(path.read_text())
        ranks = {int(pid): rank for rank, pid in enumerate(content.get("rank_pids", []))}
        reading = content.get("clock")
        clock = Clock(0, int(reading["monotonic_ns"]), int(reading["realtime_ns"])) if reading else None
        if clock and max(abs(clock.monotonic_ns), abs(clock.wall_ns)) >= OPEN_NS:
            raise ValueError("the clock exceeds 64 bits")
        facts = {
            name: " ".join(str(content[name]).split()) for name in ("hardware", "software") if name in content
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        raise BadTrace(
            f"{path} is not in the documented format ({reason}): restore it, or remove it"
        ) from error
    return facts, clock, ranks


def _process(
    raw: Raw, pid: int, switches: Raw, wakeups: Raw, block: Raw, symbols: tuple[str, ...]
) -> dict[str, Array]:
    own = raw.where((raw.pid == pid) & np.isin(raw.kind, ["enter", "return"]))
    entered = own.where(own.kind == "enter")
    io_begin_ns, io_end_ns = own_disk_requests(block, pid)
    last_ns = int(raw.ts_ns[-1])
    tids = [int(tid) for tid in np.unique(entered.tid)]
    collectives, communicators = collective_rows(own, pid)
    calls = [outermost_calls(own.where(own.tid == tid)) for tid in tids]
    enqueued_ns = np.sort(collectives["ts_ns"])
    calls = with_waits(calls, enqueued_ns)
    threads, offcpu, ended_ns = [], [], UNKNOWN
    for tid, made in zip(tids, calls, strict=True):
        off, thread_end_ns = off_cpu(switches, wakeups, pid=pid, tid=tid, last_ns=last_ns)
        off["category"] = off_categories(off, raw.has_syscalls, io_begin_ns=io_begin_ns, io_end_ns=io_end_ns)
        if tid == pid and thread_end_ns < OPEN_NS:
            ended_ns = thread_end_ns
        first_ns = int(own.ts_ns[own.tid == tid][0])
        threads.append(_thread(made, off, first_ns=first_ns, last_ns=min(thread_end_ns, int(OPEN_NS))))
        offcpu.append(offcpu_rows(off, pid, tid))
    order = np.argsort(collectives["ts_ns"], kind="stable")
    collectives = collectives[order]
    collectives["ledger_ns"] = account(threads, collectives["ts_ns"])
    every = joined(calls)
    add_counts(collectives, every)
    add_last_wait(collectives, every)
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
        "calls": slow_calls(every, pid, symbols),
        "offcpu": np.concatenate(offcpu) if offcpu else layout.empty(layout.OFFCPU),
        "snapshots": _last_snapshot(
            threads, every, at_end, pid=pid, n_collectives=len(collectives), is_alive=ended_ns == UNKNOWN
        ),
        "processes": processes,
    }


def _thread(calls: Calls, off: OffCpu, *, first_ns: int, last_ns: int) -> ThreadEvents:
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


def _last_snapshot(
    threads: list[ThreadEvents], calls: Calls, at_ns: Array, *, pid: int, n_collectives: int, is_alive: bool
) -> Array:
    rows = layout.empty(layout.SNAPSHOTS, 1)
    rows["ts_ns"], rows["pid"], rows["alive"], rows["n_collectives"] = at_ns, pid, is_alive, n_collectives
    rows["ledger_ns"] = account(threads, at_ns)
    just_before = account(threads, at_ns - 1)
    growing = np.flatnonzero((rows["ledger_ns"] - just_before)[0, :N_CATEGORIES])
    rows["category"] = growing[-1] + 1 if len(growing) and is_alive else Category.NONE
    unfinished = np.flatnonzero(calls.leave_ns >= OPEN_NS)
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
    plugin_rows = checked_table(path, _PROFILER_COLUMNS)
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
