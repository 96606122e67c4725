"""Profiles of several ranks (see rank_profile) as one trace: rounds, ledger, steps, on aligned clocks.

A collective arrives when its launch call begins and has its kernel's times on the GPU, which the profiler has put on
the host's clock. The times of each host are shifted by the difference at which kernels of a round end together, where
that is more than 0.2 ms; the accuracy is the median deviation from it.

The ledger is computed by profile_ledger.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.call_labels import SCHEDULE_FACT, group_fact
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import DATATYPE_BYTES, P2P_OPS, CollectiveFlag, Op
from stallscope.events.trace import Clock, Coverage, Gap, Trace
from stallscope.importers.profile_ledger import add_ledger
from stallscope.importers.profile_rounds import in_order, name_groups, rounds
from stallscope.importers.profiler_file import shift
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
        if whole := _whole_of_copies(other, profile):
            kept[key] = whole
        elif profile.span_ns[0] <= other.span_ns[1]:
            raise BadTrace(
                f"{profile.file} and {other.file.name} both belong to rank {profile.rank} and overlap: "
                "keep one file per rank"
            )
        elif (profile.host, profile.pid) == (other.host, other.pid):
            kept[key] = _joined(other, profile)
        else:  # a restarted job
            profile.omitted["files of an earlier attempt"] = 1
            kept[key] = profile
    return sorted(kept.values(), key=lambda each: (each.rank, str(each.file)))


def _whole_of_copies(first: Profile, second: Profile) -> Profile | None:
    """The larger of two profiles if it holds all events of the other, as of a trace to which HTA added its results."""
    small, large = sorted((first, second), key=lambda each: len(each.kernels) + len(each.calls))
    pairs = ((small.kernels, large.kernels), (small.calls, large.calls))
    is_copy = all(np.isin(part["begin_ns"], whole["begin_ns"]).all() for part, whole in pairs)
    return large if is_copy else None


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
                "collectives carry no group (PyTorch before 2.2, CUDA graphs, or gloo), and their order does not "
                "show which ranks meet",
                "Record again with PyTorch 2.2 or later and without CUDA graphs, or trace the job live.",
            )
        )
    elif not any(len(profile.kernels) for profile in profiles):
        gaps.append(
            Gap(
                "the profiles contain no collectives", "Profile with ProfilerActivity.CUDA, over whole steps."
            )
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
    add_ledger(rows, profile)
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
