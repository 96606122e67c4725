"""Profiles of several ranks (see rank_profile) as one trace: rounds, ledger, steps, on aligned clocks.

A collective arrives when its launch call begins and has its kernel's times on the GPU, which the profiler has put on
the host's clock. The times of each host are shifted by the difference at which kernels of a round end together, where
that is more than 0.2 ms; the accuracy is the median deviation from it.

The ledger: inside a CUDA call a thread is in that call's category, inside other recorded operations on the CPU, in a
data loader's `__next__` it waits for its workers. Between recorded operations nothing is known (other_off).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.call_labels import SCHEDULE_FACT, group_fact
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.ledger import ThreadEvents, account, waits_or_device
from stallscope.events.names import CALL_CATEGORY, DATATYPE_BYTES, P2P_OPS, Category, CollectiveFlag, Op
from stallscope.events.trace import Clock, Coverage, Gap, Trace
from stallscope.importers.profile_rounds import in_order, name_groups, rounds
from stallscope.importers.profiler_file import GLOO, shift
from stallscope.importers.rank_profile import Collective, Profile

_LONG_NS = 1_000_000


def trace_of(profiles: list[Profile], source: str) -> Trace:
    """The trace of one job. Raises BadTrace for two ranks of one number at one time, or without any collective."""
    profiles = _one_per_rank(profiles)
    _distinguish(profiles)
    n_unnamed = name_groups(profiles)
    units = [profile.host or f"file {number}" for number, profile in enumerate(profiles)]
    matched = rounds(profiles, units)
    for profile, by_ns in zip(profiles, matched.clock_ns, strict=True):
        shift(profile, by_ns)
    hosts = sorted({profile.host for profile in profiles})
    nodes = [hosts.index(profile.host) for profile in profiles]
    parts = [_rows(p, node, seq) for p, node, seq in zip(profiles, nodes, matched.number, strict=True)]
    collectives = np.concatenate([part[0] for part in parts])
    symbols = ("", *sorted({name for profile in profiles for name in profile.names}))
    calls = np.concatenate([_slow_calls(p, node, symbols) for p, node in zip(profiles, nodes, strict=True)])
    ends = [_end_ns([p for p in profiles if p.host == host]) for host in hosts]
    errors = [
        max(e for e, n in zip(matched.error_ns, nodes, strict=True) if n == i) for i in range(len(hosts))
    ]
    groups = {
        each.comm_hash: each for profile in profiles for each in profile.collectives if each.has_arguments
    }
    return Trace(
        collectives=collectives[np.argsort(collectives["ts_ns"], kind="stable")],
        calls=calls[np.argsort(calls["ts_ns"], kind="stable")],
        communicators=np.concatenate([part[1] for part in parts]),
        processes=_processes(profiles, nodes),
        annotations=np.concatenate([_steps(p, node) for p, node in zip(profiles, nodes, strict=True)]),
        nodes=tuple(hosts),
        symbols=symbols,
        clocks=tuple(Clock(i, end, end, errors[i]) for i, end in enumerate(ends) if end),
        ends_ns=tuple(ends),
        source=source,
        facts=_facts(profiles, matched.clock_ns, groups),
        coverage=_coverage(profiles, n_unnamed),
    )


def _one_per_rank(profiles: list[Profile]) -> list[Profile]:
    """The profiles, with the parts of one process merged. Raises BadTrace for parts that overlap in time."""
    kept: dict[object, Profile] = {}
    for profile in sorted(profiles, key=lambda each: each.span_ns):
        key = profile.rank if profile.rank != UNKNOWN else profile.file
        other = kept.get(key)
        if other is None:
            kept[key] = profile
            continue
        if profile.span_ns[0] <= other.span_ns[1]:
            raise BadTrace(
                f"{profile.file} and {other.file.name} are both of rank {profile.rank} and overlap: "
                "keep one file per rank"
            )
        if (profile.host, profile.pid) == (other.host, other.pid):
            kept[key] = _joined(other, profile)
        else:  # a restarted job
            profile.omitted["files of an earlier attempt"] = 1
            kept[key] = profile
    return sorted(kept.values(), key=lambda each: (each.rank, str(each.file)))


def _joined(first: Profile, second: Profile) -> Profile:
    """Two parts of one process's profile."""
    symbol = np.array([_number(first.names, name) for name in second.names], np.uint32)
    number = np.array([_number(first.collectives, each) for each in second.collectives], np.int32)
    calls, kernels = second.calls.copy(), second.kernels.copy()
    if len(calls):
        calls["symbol"] = symbol[calls["symbol"]]
    if len(kernels):
        kernels["collective"] = number[kernels["collective"]]
    apart = (
        int(max(first.calls["correlation"].max(initial=0), first.kernels["correlation"].max(initial=0))) + 1
    )
    for rows in (calls, kernels):  # each part counts correlations from 1
        rows["correlation"][rows["correlation"] >= 0] += apart
    first.calls, first.kernels = (
        np.concatenate([first.calls, calls]),
        np.concatenate([first.kernels, kernels]),
    )
    first.work = np.concatenate([first.work, second.work])
    first.steps = np.concatenate([first.steps, second.steps])
    for reason, n in second.omitted.items():
        first.omitted[reason] = first.omitted.get(reason, 0) + n
    first.is_cut_off |= second.is_cut_off
    return first


def _number(values: list[Any], value: Any) -> int:
    if value not in values:
        values.append(value)
    return values.index(value)


def _distinguish(profiles: list[Profile]) -> None:
    """Renumber processes if several of a host have one process id (in containers), or none."""
    keys = [(profile.host, profile.pid) for profile in profiles]
    if 0 in {profile.pid for profile in profiles} or len(set(keys)) < len(keys):
        for number, profile in enumerate(profiles):
            profile.pid = number + 1


def _facts(profiles: list[Profile], clock_ns: list[int], groups: dict[int, Collective]) -> dict[str, str]:
    moved = {p.host or p.label: ns for p, ns in zip(profiles, clock_ns, strict=True) if ns}
    facts = {group_fact(comm_hash): each.group_words for comm_hash, each in groups.items()}
    if all(len(profile.steps) for profile in profiles):
        facts[SCHEDULE_FACT] = "yes"
    if moved:
        facts["clock_shifts"] = ", ".join(
            f"{name} {ns / 1e6:+.3f} ms" for name, ns in list(moved.items())[:16]
        )
    return facts


def _coverage(profiles: list[Profile], n_unnamed: int) -> Coverage:
    omitted: dict[str, int] = {}
    gaps = []
    for profile in profiles:
        for reason, n in profile.omitted.items():
            omitted[reason] = omitted.get(reason, 0) + n
        if profile.is_cut_off:
            gaps.append(
                Gap(
                    f"{profile.file.name} ends in the middle of an event",
                    "Copy the file again, or profile fewer steps.",
                )
            )
    if n_unnamed:
        omitted["communication kernels without a known group"] = n_unnamed
        gaps.append(
            Gap(
                "NCCL kernels carry no arguments (PyTorch before 2.2, or CUDA graphs), and their order does not show "
                "which ranks meet",
                "Record again with PyTorch 2.2 or later and without CUDA graphs, or trace the job live.",
            )
        )
    elif omitted.get(GLOO):
        gaps.append(
            Gap(
                f"{omitted[GLOO]} collectives of gloo are in the profiles, but not the messages between the ranks",
                "Trace the job live: the ranks' waits show the rank that the others wait for.",
            )
        )
    elif not any(len(profile.kernels) for profile in profiles):
        gaps.append(
            Gap("the profiles hold no collective", "Profile with ProfilerActivity.CUDA, over whole steps.")
        )
    return Coverage(omitted=omitted, gaps=tuple(gaps))


def _end_ns(profiles: Sequence[Profile]) -> int:
    return max((int(profile.kernels["end_ns"].max(initial=0)) for profile in profiles), default=0)


def _rows(profile: Profile, node: int, seq: Array) -> tuple[Array, Array]:
    """Collectives and communicators of one rank."""
    arrival = in_order(profile)
    is_known = np.array([each.has_arguments and each.op != Op.NONE for each in profile.collectives], bool)
    which = (
        np.flatnonzero(is_known[profile.kernels["collective"]]) if len(profile.kernels) else np.zeros(0, int)
    )
    which = which[np.lexsort((profile.kernels["begin_ns"][which], arrival[which, 0]))]
    kernels = profile.kernels[which]
    rows = layout.empty(layout.COLLECTIVES, len(kernels))
    rows["node"], rows["pid"] = node, profile.pid
    rows["ts_ns"], rows["tid"] = arrival[which, 0], arrival[which, 1]
    rows["gpu_start_ns"], rows["gpu_end_ns"] = kernels["begin_ns"], kernels["end_ns"]
    rows["seq"] = seq[which]
    rows["flags"] = CollectiveFlag.NO_SYSCALLS
    rows["flags"][arrival[which, 2] > 0] |= np.uint32(CollectiveFlag.GRAPH)
    for number, each in enumerate(profile.collectives):
        _describe(rows, np.flatnonzero(kernels["collective"] == number), each, profile.rank)
    _number_unmatched(rows)
    _add_ledger(rows, profile)
    _, first = np.unique(rows["comm_hash"], return_index=True)
    communicators = layout.empty(layout.COMMUNICATORS, len(first))
    for name in ("ts_ns", "node", "pid", "comm_hash", "comm_rank", "nranks"):
        communicators[name] = rows[name][first]
    communicators["ts_ns"] = rows["ts_ns"].min(initial=np.iinfo(np.int64).max) if len(rows) else 0
    return rows, communicators


def _describe(rows: Array, here: Array, each: Collective, rank: int) -> None:
    """Fill in the arguments of a collective, from its kernel."""
    if not len(here) or not each.has_arguments:
        return
    rows["op"][here], rows["comm_hash"][here] = each.op, each.comm_hash
    rows["nranks"][here], rows["datatype"][here], rows["count"][here] = each.size, each.datatype, each.count
    rows["comm_rank"][here] = each.ranks.index(rank) if rank in each.ranks else UNKNOWN
    if each.count != UNKNOWN and each.datatype:
        rows["count_bytes"][here] = each.count * DATATYPE_BYTES[each.datatype]
    if each.op in P2P_OPS:
        rows["peer_rank"][here] = each.ranks.index(each.peer) if each.peer in each.ranks else UNKNOWN


def _number_unmatched(rows: Array) -> None:
    """Number rounds that no shift matched, and transfers, by their own order; the diagnosis matches them."""
    unmatched = np.flatnonzero(rows["seq"] == UNKNOWN)
    counts: dict[tuple[int, int, int], int] = defaultdict(int)
    for i in unmatched.tolist():
        is_p2p = rows["op"][i] in P2P_OPS
        key = int(rows["comm_hash"][i]), int(rows["op"][i]) * is_p2p, int(rows["peer_rank"][i]) * is_p2p
        rows["seq"][i] = counts[key]
        counts[key] += 1
    rows["flags"][unmatched] |= np.uint32(CollectiveFlag.LATE_ATTACH)


def _processes(profiles: Sequence[Profile], nodes: Sequence[int]) -> Array:
    rows = layout.empty(layout.PROCESSES, len(profiles))
    for row, profile, node in zip(rows, profiles, nodes, strict=True):
        row["node"], row["pid"], row["rank"], row["nranks"] = node, profile.pid, profile.rank, profile.nranks
    return rows


def _steps(profile: Profile, node: int) -> Array:
    """The steps that the profiler's schedule marked (ProfilerStep#12)."""
    steps = profile.steps[np.unique(profile.steps["begin_ns"], return_index=True)[1]]
    rows = layout.empty(layout.ANNOTATIONS, len(steps))
    rows["ts_ns"], rows["node"], rows["pid"], rows["label"] = steps["begin_ns"], node, profile.pid, b"step"
    rows["value"] = [str(number).encode() for number in steps["number"].tolist()] or b""
    return rows


def _slow_calls(profile: Profile, node: int, symbols: Sequence[str]) -> Array:
    slow = profile.calls[profile.calls["duration_ns"] >= _LONG_NS]
    rows = layout.empty(layout.CALLS, len(slow))
    position = np.array([symbols.index(name) for name in profile.names] or [0])
    rows["ts_ns"], rows["duration_ns"], rows["tid"] = (
        slow["begin_ns"],
        slow["duration_ns"],
        np.maximum(slow["tid"], 0),
    )
    rows["node"], rows["pid"] = node, profile.pid
    rows["op"], rows["symbol"] = slow["op"], position[slow["symbol"]]
    return rows


def _add_ledger(rows: Array, profile: Profile) -> None:
    """The ledger at each arrival, the last wait before it, and the counts of calls so far."""
    calls = profile.calls[np.argsort(profile.calls["begin_ns"], kind="stable")]
    at = rows["ts_ns"]
    for column, ops in (
        ("n_syncs", (Op.SYNC,)),
        ("n_allocs", (Op.ALLOC, Op.FREE)),
        ("n_copies", (Op.COPY,)),
        ("n_launches", (Op.LAUNCH, Op.GRAPH_LAUNCH)),
    ):
        rows[column] = np.searchsorted(calls["begin_ns"][np.isin(calls["op"], ops)], at)
    category = np.zeros(len(calls), np.int64)
    for op, spent in CALL_CATEGORY.items():
        category[calls["op"] == op] = spent
    is_sync = calls["op"] == Op.SYNC
    if is_sync.any():
        begin, end = calls["begin_ns"][is_sync], (calls["begin_ns"] + calls["duration_ns"])[is_sync]
        category[is_sync] = kinds = waits_or_device(begin, end, at)
        waits = kinds == Category.WAIT_GPU
        ends = np.maximum.accumulate(end[waits])
        position = np.searchsorted(ends, at, side="right") - 1
        has = position >= 0
        rows["wait_enter_ns"][has], rows["wait_leave_ns"][has] = (
            begin[waits][position[has]],
            ends[position[has]],
        )
    rows["ledger_ns"] = account(_threads(profile, calls, category), at)


def _threads(profile: Profile, calls: Array, category: Array) -> list[ThreadEvents]:
    """The threads that make CUDA calls. calls: by begin; category: of each."""
    if not len(calls):
        return []
    ends = calls["begin_ns"] + calls["duration_ns"]
    first, last = int(calls["begin_ns"].min()), int(ends.max())
    threads = []
    for tid in np.unique(calls["tid"]):
        own = np.flatnonzero(calls["tid"] == tid)
        own = own[_outermost(calls["begin_ns"][own], ends[own])]
        work = profile.work[profile.work["tid"] == tid]
        busy, loader = work[~work["is_loader"]], work[work["is_loader"]]
        begins = np.concatenate([calls["begin_ns"][own], busy["begin_ns"]])
        gaps = _gaps(begins, np.concatenate([ends[own], busy["end_ns"]]), first, last)
        off = _split(gaps, np.sort(np.stack([loader["begin_ns"], loader["end_ns"]], axis=1), axis=0).tolist())
        known = own[category[own] > 0]
        threads.append(
            ThreadEvents(
                call_enter_ns=calls["begin_ns"][known].astype(np.int64),
                call_leave_ns=ends[known].astype(np.int64),
                call_category=category[known],
                off_ns=off[:, 0],
                on_ns=off[:, 1],
                woken_ns=off[:, 1],
                off_category=off[:, 2],
                first_ns=first,
                last_ns=last,
            )
        )
    return threads


def _outermost(begin: Array, end: Array) -> Array:
    """Whether each interval, sorted by begin, lies outside all others: bool (n,)."""
    order = np.lexsort((-end, begin))
    furthest = np.maximum.accumulate(end[order])
    is_outer = np.ones(len(begin), bool)
    is_outer[order[1:]] = begin[order[1:]] >= furthest[:-1]
    return is_outer


def _gaps(begin: Array, end: Array, first: int, last: int) -> Array:
    """The time between first and last that no interval covers: int64 (n, 2)."""
    order = np.argsort(begin, kind="stable")
    furthest = np.maximum.accumulate(np.concatenate([[first], end[order]]))
    gaps = np.stack([furthest, np.append(begin[order], last)], axis=1)
    return gaps[gaps[:, 1] > gaps[:, 0]]


def _split(gaps: Array, loader: list[list[int]]) -> Array:
    """The gaps with their categories: child inside the loader's intervals, other_off elsewhere: int64 (n, 3)."""
    if not loader:
        return np.column_stack([gaps, np.full(len(gaps), Category.OTHER_OFF, np.int64)])
    out: list[tuple[int, int, int]] = []
    at = 0
    for begin, end in gaps.tolist():
        while at < len(loader) and loader[at][1] <= begin:
            at += 1
        position = at
        while position < len(loader) and loader[position][0] < end:
            inner = max(begin, loader[position][0]), min(end, loader[position][1])
            if inner[0] > begin:
                out.append((begin, inner[0], int(Category.OTHER_OFF)))
            if inner[1] > inner[0]:
                out.append((*inner, int(Category.CHILD)))
            begin = max(begin, inner[1])
            position += 1
        if begin < end:
            out.append((begin, end, int(Category.OTHER_OFF)))
    return np.array(out, np.int64).reshape(-1, 3)
