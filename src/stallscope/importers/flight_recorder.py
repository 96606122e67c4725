"""PyTorch flight-recorder dumps: one pickle per rank, in a folder or alone, written when a job hung or failed.

The dumps (see rank_dump) do not tell host or process: the rank stands in for the process id. Times are when the host
made the calls, by the wall clocks of hosts that are not told apart. A rank that the groups name and that left no dump
becomes a process without a snapshot; a dump that was cut off, as those of a process killed meanwhile are, is none.
"""

import re
from os import SEEK_END
from pathlib import Path

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import DATATYPE_BYTES, CollectiveFlag
from stallscope.events.trace import Clock, Trace
from stallscope.importers.rank_dump import Call, Dump, Group, dump_of
from stallscope.importers.registry import Importer
from stallscope.importers.texts import files_of, head_of

_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_WORDS = (b"nccl_version", b"pg_config", b"pg_status", b"entries", b"collective_seq_id")


def _sniff(path: Path) -> bool:
    return any(_looks_like_a_dump(file) for file in files_of(path))


def _looks_like_a_dump(file: Path) -> bool:
    head = head_of(file)
    return bool(_PICKLE.match(head)) and any(word in head for word in _WORDS)


def _read(path: Path) -> Trace:
    files = [file for file in files_of(path) if _looks_like_a_dump(file)]
    if not files:
        raise BadTrace(f"{path} holds no flight-recorder dump: check the path")
    dumps: dict[int, Dump] = {}
    known: dict[tuple[str, str, str], Group] = {}
    cut_off = [file for file in files if _is_cut_off(file)]
    for file in [file for file in files if file not in cut_off] or files:
        dump = dump_of(file, known)
        if dump.rank in dumps:
            raise BadTrace(
                f"{file}: there is another dump of rank {dump.rank} beside it: keep one dump per rank"
            )
        dumps[dump.rank] = dump
    return _trace([dumps[rank] for rank in sorted(dumps)], n_cut_off=len(cut_off))


def _is_cut_off(file: Path) -> bool:
    """Whether a dump has no end: a pickle ends with a point."""
    try:
        with file.open("rb") as stream:
            stream.seek(-1, SEEK_END)
            return stream.read(1) != b"."
    except OSError:
        return False


def _trace(dumps: list[Dump], *, n_cut_off: int) -> Trace:
    groups = _known_groups(dumps)
    ranks = sorted({rank for group in groups.values() for rank in group.members} | {d.rank for d in dumps})
    made = [call.created_ns for dump in dumps for call in dump.calls if call.created_ns > 0]
    first_ns, last_ns = (min(made), max(made)) if made else (0, 0)
    with_p2p = {dump.groups[name].comm_hash for dump in dumps for name in dump.counts_p2p}
    versions = sorted({dump.nccl_version for dump in dumps} - {""})
    return Trace(
        collectives=_collectives(dumps, first_ns),
        communicators=_communicators(dumps, groups, with_p2p, first_ns=first_ns),
        processes=_processes(ranks, first_ns),
        snapshots=_snapshots(dumps, with_p2p, last_ns),
        clocks=(Clock(0, last_ns, last_ns),) if made else (),
        ends_ns=(last_ns,) if made else (),
        source=f"PyTorch flight-recorder dumps of {len(dumps)} of {len(ranks)} ranks"
        + (f", {n_cut_off} more cut off" if n_cut_off else ""),
        facts={"nccl_version": ", ".join(versions)[:200]} if versions else {},
    )


def _known_groups(dumps: list[Dump]) -> dict[int, Group]:
    return {group.comm_hash: group for dump in dumps for group in dump.groups.values()}


def _collectives(dumps: list[Dump], first_ns: int) -> Array:
    knows_starts = any(dump.knows_starts for dump in dumps)  # one that has started nothing does not tell
    parts = [_rows(dump, first_ns, knows_starts=knows_starts) for dump in dumps]
    rows = np.concatenate(parts) if parts else layout.empty(layout.COLLECTIVES)
    return rows[np.argsort(rows["ts_ns"], kind="stable")]


def _rows(dump: Dump, first_ns: int, *, knows_starts: bool) -> Array:
    rows = layout.empty(layout.COLLECTIVES, len(dump.calls))
    rows["pid"] = dump.rank
    places = {name: _place(group, dump.rank) for name, group in dump.groups.items()}
    for row, call in zip(rows, dump.calls, strict=True):
        group = dump.groups[call.group]
        row["ts_ns"] = call.created_ns or first_ns
        row["comm_hash"], row["nranks"] = group.comm_hash, len(group.members) or UNKNOWN
        row["comm_rank"] = places[call.group]
        row["seq"], row["op"], row["peer_rank"] = call.seq, call.op, call.peer
        row["datatype"], row["count"] = call.datatype, call.count
        if call.count != UNKNOWN and call.datatype:
            row["count_bytes"] = call.count * DATATYPE_BYTES[call.datatype]
        row["flags"] = _flags(call, knows_starts=knows_starts)
    return rows


def _flags(call: Call, *, knows_starts: bool) -> int:
    if call.is_complete:
        return CollectiveFlag.NO_LEDGER
    not_started = CollectiveFlag.NOT_STARTED if knows_starts and not call.is_started else 0
    return CollectiveFlag.NO_LEDGER | CollectiveFlag.OPEN | not_started


def _place(group: Group, rank: int) -> int:
    return group.members.index(rank) if rank in group.members else UNKNOWN


def _communicators(
    dumps: list[Dump], groups: dict[int, Group], with_p2p: set[int], *, first_ns: int
) -> Array:
    """Memberships: those the dumps tell with their counters, and those of ranks without a dump."""
    rows, told = [], set()
    for dump in dumps:
        for group in dump.groups.values():
            entered, completed = _progress(dump, group, group.comm_hash in with_p2p)
            place = _place(group, dump.rank)
            rows.append((group.comm_hash, dump.rank, place, len(group.members), entered, completed))
            told.add((group.comm_hash, dump.rank))
    for comm_hash, group in groups.items():
        silent = [(i, rank) for i, rank in enumerate(group.members) if (comm_hash, rank) not in told]
        rows += [(comm_hash, rank, i, len(group.members), UNKNOWN, UNKNOWN) for i, rank in silent]
    out = layout.empty(layout.COMMUNICATORS, len(rows))
    out["ts_ns"] = first_ns
    if rows:
        columns = list(zip(*rows, strict=True))
        out["comm_hash"] = np.array(columns[0], np.uint64)
        names = ("pid", "comm_rank", "nranks", "last_entered", "last_completed")
        for name, column in zip(names, columns[1:], strict=True):
            out[name] = column
    out["nranks"][out["nranks"] == 0] = UNKNOWN
    return out


def _progress(dump: Dump, group: Group, has_p2p: bool) -> tuple[int, int]:
    """Seq of the last collective that a rank entered in a group, and of the last one it saw complete.

    In a group that also sends point to point the counters count either: there only the entries tell.
    """
    if not has_p2p:
        return dump.counters.get(group.name, (UNKNOWN, UNKNOWN))
    seqs = [call.collective_seq for call in dump.calls if call.group == group.name]
    return max(seqs, default=UNKNOWN), UNKNOWN


def _processes(ranks: list[int], first_ns: int) -> Array:
    rows = layout.empty(layout.PROCESSES, len(ranks))
    rows["ts_ns"], rows["pid"], rows["rank"], rows["nranks"] = first_ns, ranks, ranks, len(ranks)
    return rows


def _snapshots(dumps: list[Dump], with_p2p: set[int], last_ns: int) -> Array:
    rows = layout.empty(layout.SNAPSHOTS, len(dumps))
    rows["ts_ns"], rows["alive"] = last_ns, 1
    for row, dump in zip(rows, dumps, strict=True):
        row["pid"] = dump.rank
        told = [
            counters
            for name, counters in dump.counters.items()
            if dump.groups[name].comm_hash not in with_p2p and UNKNOWN not in counters
        ]
        if told:
            row["n_collectives"], row["n_completed"] = (sum(column) for column in zip(*told, strict=True))
    return rows


IMPORTER = Importer("flight-recorder dumps", _sniff, _read)
