"""torch.profiler (Kineto) traces: Chrome trace JSON, plain or gzip, one file per rank, in a folder or alone.

A collective is an NCCL kernel whose arguments name it (PyTorch 2.2 or newer). It arrives when its launch call begins
(the runtime event of the same correlation) and has its kernel's times on the GPU, which the profiler has put on the
host's clock. A profile begins anywhere, so rounds are matched by signature.

The ledger: inside a CUDA call a thread is in that call's category, inside other recorded operations on the CPU, in a
data loader's `__next__` it waits for its workers. Between recorded operations nothing is known (other_off).
"""

import hashlib
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.ledger import ThreadEvents, account, waits_or_device
from stallscope.events.names import CALL_CATEGORY, DATATYPE_BYTES, Category, CollectiveFlag, Datatype, Op
from stallscope.events.trace import Clock, Trace
from stallscope.importers.functions import op_of
from stallscope.importers.profiler_file import Profile, looks_like_a_profile, profile_of, whole
from stallscope.importers.registry import Importer
from stallscope.importers.texts import files_of

_LONG_NS = 1_000_000
_OPS = {
    "allreduce": Op.ALL_REDUCE,
    "allreduce_coalesced": Op.ALL_REDUCE,
    "all_gather": Op.ALL_GATHER,
    "_allgather_base": Op.ALL_GATHER,
    "allgather_into_tensor_coalesced": Op.ALL_GATHER,
    "reduce_scatter": Op.REDUCE_SCATTER,
    "_reduce_scatter_base": Op.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Op.REDUCE_SCATTER,
    "broadcast": Op.BROADCAST,
    "_broadcast_oop": Op.BROADCAST,
    "reduce": Op.REDUCE,
    "all_to_all": Op.ALL_TO_ALL,
    "all_to_allv": Op.ALL_TO_ALL,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "send": Op.SEND,
    "recv": Op.RECV,
    "barrier": Op.ALL_REDUCE,
}
"""c10d's names of collectives ("Collective name" of the kernel's arguments)."""

_DATATYPES = {
    "Float": Datatype.FLOAT32,
    "Half": Datatype.FLOAT16,
    "BFloat16": Datatype.BFLOAT16,
    "Double": Datatype.FLOAT64,
    "Int": Datatype.INT32,
    "Long": Datatype.INT64,
    "Byte": Datatype.UINT8,
    "Bool": Datatype.UINT8,
    "Char": Datatype.INT8,
    "Float8_e4m3fn": Datatype.FLOAT8_E4M3,
    "Float8_e5m2": Datatype.FLOAT8_E5M2,
}


def _sniff(path: Path) -> bool:
    return any(looks_like_a_profile(file) for file in files_of(path))


def _read(path: Path) -> Trace:
    profiles = [profile_of(file) for file in files_of(path) if looks_like_a_profile(file)]
    seen: dict[int, Path] = {}
    for profile in profiles:
        if profile.rank != UNKNOWN and profile.rank in seen:
            raise BadTrace(
                f"{profile.file}: {seen[profile.rank].name} is of rank {profile.rank}, too: keep one file per rank"
            )
        seen[profile.rank] = profile.file
    _tell_apart(profiles)
    hosts = sorted({profile.host for profile in profiles})
    parts = [_arrays(profile, hosts.index(profile.host)) for profile in profiles]
    symbols = ("", *sorted({name for profile in profiles for *_, name, _ in profile.calls}))
    place = {name: i for i, name in enumerate(symbols)}
    calls = np.concatenate(
        [_call_rows(p, hosts.index(p.host), place) for p in profiles] or [layout.empty(layout.CALLS)]
    )
    collectives = np.concatenate([part[0] for part in parts])
    ends = [
        max((k[0] + k[1] for p in profiles if p.host == host for k in p.kernels), default=0) for host in hosts
    ]
    return Trace(
        collectives=collectives[np.argsort(collectives["ts_ns"], kind="stable")],
        calls=calls[np.argsort(calls["ts_ns"], kind="stable")],
        communicators=np.concatenate([part[1] for part in parts]),
        processes=np.concatenate([part[2] for part in parts]),
        nodes=tuple(hosts),
        symbols=symbols,
        clocks=tuple(Clock(i, end, end) for i, end in enumerate(ends) if end),
        ends_ns=tuple(ends),
        source=f"torch.profiler traces of {len(profiles)} ranks",
    )


def _tell_apart(profiles: list[Profile]) -> None:
    """Gives ranks numbers for process ids where several of a host have the same (in containers), or none."""
    keys = [(profile.host, profile.pid) for profile in profiles]
    if 0 in {profile.pid for profile in profiles} or len(set(keys)) < len(keys):
        for number, profile in enumerate(profiles):
            profile.pid = number + 1


def _arrays(profile: Profile, node: int) -> tuple[Array, Array, Array]:
    """Collectives, communicators and process of one file."""
    pid = profile.pid
    launched = {correlation: (begin, tid) for begin, _, tid, _, correlation in profile.calls}
    kernels = sorted(
        (*launched.get(correlation, (begin, 0)), begin, length, place)
        for place, (begin, length, correlation, _) in enumerate(profile.kernels)
    )
    rows = layout.empty(layout.COLLECTIVES, len(kernels))
    rows["node"], rows["pid"], rows["flags"] = (
        node,
        pid,
        CollectiveFlag.LATE_ATTACH | CollectiveFlag.NO_SYSCALLS,
    )
    counts: dict[int, int] = defaultdict(int)
    members: dict[int, tuple[int, int]] = {}
    for row, (arrival, tid, begin, length, place) in zip(rows, kernels, strict=True):
        arguments = profile.kernels[place][3]
        hash_, ranks = _group(arguments)
        row["ts_ns"], row["tid"], row["comm_hash"] = arrival, max(tid, 0), hash_
        row["gpu_start_ns"], row["gpu_end_ns"] = begin, begin + length
        row["op"] = _OPS.get(str(arguments["Collective name"]).lower(), Op.NONE)
        row["nranks"] = whole(arguments.get("Group size"))
        row["comm_rank"] = ranks.index(profile.rank) if profile.rank in ranks else UNKNOWN
        row["seq"] = counts[hash_]
        counts[hash_] += 1
        members[hash_] = int(row["comm_rank"]), int(row["nranks"])
        row["datatype"] = _DATATYPES.get(str(arguments.get("dtype")), Datatype.NONE)
        row["count"] = whole(arguments.get("In msg nelems"))
        if row["count"] != UNKNOWN and row["datatype"]:
            row["count_bytes"] = row["count"] * DATATYPE_BYTES[row["datatype"]]
        if row["op"] in (Op.SEND, Op.RECV):
            peer = whole(arguments.get("Dst Rank" if row["op"] == Op.SEND else "Src Rank"))
            row["peer_rank"] = ranks.index(peer) if peer in ranks else UNKNOWN
    rows = rows[rows["op"] != Op.NONE]
    _add_ledger(rows, profile)
    communicators = layout.empty(layout.COMMUNICATORS, len(members))
    for row, (hash_, (own, size)) in zip(communicators, members.items(), strict=True):
        row["node"], row["pid"], row["comm_hash"], row["comm_rank"], row["nranks"] = (
            node,
            pid,
            hash_,
            own,
            size,
        )
        row["ts_ns"] = rows["ts_ns"][0] if len(rows) else 0
    process = layout.empty(layout.PROCESSES, 1)
    process["node"], process["pid"], process["rank"], process["nranks"] = (
        node,
        pid,
        profile.rank,
        profile.nranks,
    )
    return rows, communicators, process


def _group(arguments: dict[str, Any]) -> tuple[int, list[int]]:
    """Hash and global ranks of the process group: its name alone may stand for several groups."""
    told = str(arguments.get("Process Group Ranks", ""))
    ranks = [int(word) for word in re.findall(r"\d{1,9}", told)]
    if "..." in told:  # long lists are cut by the profiler
        ranks = []
    words = f"{arguments.get('Process Group Name')}|{told}|{arguments.get('Group size')}"
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()), ranks


def _add_ledger(rows: Array, profile: Profile) -> None:
    """The account at each arrival, the last wait before it, and the counts of calls so far."""
    calls = sorted((begin, begin + length, tid, op_of(name)) for begin, length, tid, name, _ in profile.calls)
    at = rows["ts_ns"]
    for column, ops in (
        ("n_syncs", (Op.SYNC,)),
        ("n_allocs", (Op.ALLOC, Op.FREE)),
        ("n_copies", (Op.COPY,)),
        ("n_launches", (Op.LAUNCH, Op.GRAPH_LAUNCH)),
    ):
        begins = np.array([call[0] for call in calls if call[3] in ops], np.int64)
        rows[column] = np.searchsorted(begins, at)
    syncs = np.array([call[:2] for call in calls if call[3] == Op.SYNC], np.int64).reshape(-1, 2)
    if len(syncs):
        kinds = waits_or_device(syncs[:, 0], syncs[:, 1], at)
        waits = syncs[kinds == Category.WAIT_GPU]
        ends = np.maximum.accumulate(waits[:, 1]) if len(waits) else waits[:, 1]
        place = np.searchsorted(ends, at, side="right") - 1
        has = place >= 0
        rows["wait_enter_ns"][has], rows["wait_leave_ns"][has] = waits[place[has], 0], ends[place[has]]
    else:
        kinds = np.array([], np.int64)
    category = dict(zip(map(tuple, syncs.tolist()), kinds.tolist(), strict=True))
    threads = _threads(profile, calls, category)
    rows["ledger_ns"] = account(threads, at)


def _threads(
    profile: Profile, calls: list[tuple[int, int, int, Op]], syncs: dict[tuple[int, ...], int]
) -> list[ThreadEvents]:
    by_thread: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for begin, end, tid, op in calls:
        what = syncs[begin, end] if op == Op.SYNC else CALL_CATEGORY.get(op, Category.NONE)
        by_thread[tid].append((begin, end, int(what)))
    busy: dict[int, list[tuple[int, int]]] = defaultdict(list)
    loader: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for begin, end, tid, is_loader in profile.work:
        (loader if is_loader else busy)[tid].append((begin, end))
    everything = [time for begin, end, *_ in calls for time in (begin, end)]
    if not everything:
        return []
    first, last = min(everything), max(everything)
    threads = []
    for tid, own in by_thread.items():
        own = _outermost(own)
        gaps = _gaps(sorted([*((b, e) for b, e, _ in own), *busy[tid]]), first, last)
        off = _split(gaps, sorted(loader[tid]))
        known = [call for call in own if call[2]]
        threads.append(
            ThreadEvents(
                call_enter_ns=np.array([call[0] for call in known], np.int64),
                call_leave_ns=np.array([call[1] for call in known], np.int64),
                call_category=np.array([call[2] for call in known], np.int64),
                off_ns=np.array([one[0] for one in off], np.int64),
                on_ns=np.array([one[1] for one in off], np.int64),
                woken_ns=np.array([one[1] for one in off], np.int64),
                off_category=np.array([one[2] for one in off], np.int64),
                first_ns=first,
                last_ns=last,
            )
        )
    return threads


def _outermost(calls: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    kept: list[tuple[int, int, int]] = []
    for call in sorted(calls, key=lambda one: (one[0], -one[1])):
        if not kept or call[0] >= kept[-1][1]:
            kept.append(call)
    return kept


def _gaps(intervals: list[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """What intervals, sorted by begin, leave free between first and last."""
    free, at = [], first
    for begin, end in intervals:
        if begin > at:
            free.append((at, begin))
        at = max(at, end)
    return [*free, (at, last)] if at < last else free


def _split(gaps: list[tuple[int, int]], loader: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The gaps with their categories: child inside the loader's intervals, other_off elsewhere."""
    out, at = [], 0
    for begin, end in gaps:
        while at < len(loader) and loader[at][1] <= begin:
            at += 1
        place = at
        while place < len(loader) and loader[place][0] < end:
            inner = max(begin, loader[place][0]), min(end, loader[place][1])
            if inner[0] > begin:
                out.append((begin, inner[0], int(Category.OTHER_OFF)))
            if inner[1] > inner[0]:
                out.append((*inner, int(Category.CHILD)))
            begin = max(begin, inner[1])
            place += 1
        if begin < end:
            out.append((begin, end, int(Category.OTHER_OFF)))
    return out


def _call_rows(profile: Profile, node: int, place: dict[str, int]) -> Array:
    """The slow calls, one by one."""
    slow = [call for call in profile.calls if call[1] >= _LONG_NS]
    rows = layout.empty(layout.CALLS, len(slow))
    for row, (begin, length, tid, name, _) in zip(rows, slow, strict=True):
        row["ts_ns"], row["duration_ns"], row["tid"] = begin, length, max(tid, 0)
        row["node"], row["pid"] = node, profile.pid
        row["op"], row["symbol"] = op_of(name), place[name]
    return rows


IMPORTER = Importer("torch.profiler trace (one file per rank)", _sniff, _read)
