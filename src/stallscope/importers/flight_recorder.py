"""PyTorch flight-recorder dumps: one file per rank (pickle or JSON), in folders or alone, of a job that hung or failed.

The dumps (see rank_dump) state neither host nor process: the rank is used as the process id. Times are when the host
made the calls, by the wall clocks of hosts that cannot be distinguished. A rank that the groups name and that left no
dump becomes a process without a snapshot. Incomplete dumps, for example of a process killed while writing, are left out
and counted, and so are dumps of earlier attempts of a restarted job.

Dumps of PyTorch 2.1 and 2.2 list no members of groups. There the ranks that left a dump are the members of group 0; a
group with another number has its rank as the only known member, because each rank numbers its groups by itself.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.call_labels import CALL_LABEL, call_label, group_fact
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import DATATYPE_BYTES, CollectiveFlag
from stallscope.events.trace import Clock, Trace
from stallscope.importers.dump_call import Call
from stallscope.importers.rank_dump import Dump, Group, dump_of
from stallscope.importers.registry import Importer, Unread, each_readable
from stallscope.importers.texts import tail_of

_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_WORDS = (b"nccl_version", b"pg_config", b"pg_status", b"entries", b"collective_seq_id")
_LIST_WORDS = (b"profiling_name", b"seq_id", b"time_created_")
_DEFAULT_GROUP = "0"


def _accepts(file: Path, head: bytes) -> bool:
    if _PICKLE.match(head):
        return any(word in head for word in _WORDS) or all(word in head for word in _LIST_WORDS)
    return head.lstrip()[:1] in (b"{", b"[") and (
        (b'"entries"' in head and b'"pg_config"' in head) or all(word in head for word in _LIST_WORDS)
    )


def _read(files: Sequence[Path], unread: Unread) -> Trace:
    known: dict[tuple[str, str, str], Group] = {}
    cut_off = [file for file in files if _is_cut_off(file)]
    whole = [file for file in files if file not in cut_off] or files[:1]
    dumps = each_readable(whole, lambda file: dump_of(file, known), unread)
    newest, n_older = _newest_attempt(dumps)
    return _trace(
        _with_members(newest), omitted={"dump cut off": len(cut_off), "dump of an earlier attempt": n_older}
    )


def _is_cut_off(file: Path) -> bool:
    """Whether a dump has no end: a pickle ends with a full stop, JSON with a bracket."""
    return tail_of(file, 64).rstrip()[-1:] not in (b".", b"}", b"]")


def _newest_attempt(dumps: list[Dump]) -> tuple[list[Dump], int]:
    """One dump per rank, by rank, and the number of dumps of earlier attempts. Raises BadTrace for two at one time."""
    latest: dict[int, Dump] = {}
    for dump in sorted(dumps, key=_last_ns):
        other = latest.get(dump.rank)
        if other is not None and _first_ns(dump) <= _last_ns(other):
            raise BadTrace(
                f"{dump.file} and {other.file.name} both belong to rank {dump.rank} and overlap: keep one dump per rank"
            )
        latest[dump.rank] = dump
    if len(latest) == len(dumps):
        return [latest[rank] for rank in sorted(latest)], 0
    begin_ns = max(_first_ns(dump) for dump in latest.values() if dump.rank in _repeated(dumps))
    kept = [dump for _, dump in sorted(latest.items()) if _last_ns(dump) >= begin_ns]
    return kept, len(dumps) - len(kept)


def _repeated(dumps: list[Dump]) -> set[int]:
    ranks = [dump.rank for dump in dumps]
    return {rank for rank in ranks if ranks.count(rank) > 1}


def _first_ns(dump: Dump) -> int:
    return min((call.created_ns for call in dump.calls), default=0)


def _last_ns(dump: Dump) -> int:
    return max((call.created_ns for call in dump.calls), default=0)


def _with_members(dumps: list[Dump]) -> list[Dump]:
    """The dumps with members of the groups that none of them lists: of the default group all ranks."""
    if any(group.members for dump in dumps for group in dump.groups.values()):
        return dumps
    ranks = tuple(dump.rank for dump in dumps)
    return [
        replace(
            dump, groups={name: _own_group(group, dump.rank, ranks) for name, group in dump.groups.items()}
        )
        for dump in dumps
    ]


def _own_group(group: Group, rank: int, ranks: tuple[int, ...]) -> Group:
    return Group(group.name, group.description, ranks if group.name == _DEFAULT_GROUP else (rank,))


def _trace(dumps: list[Dump], *, omitted: dict[str, int]) -> Trace:
    groups = _known_groups(dumps)
    ranks = sorted({rank for group in groups.values() for rank in group.members} | {d.rank for d in dumps})
    made = [call.created_ns for dump in dumps for call in dump.calls if call.created_ns > 0]
    first_ns, last_ns = (min(made), max(made)) if made else (0, 0)
    with_p2p = {dump.groups[name].comm_hash for dump in dumps for name in dump.counts_p2p}
    versions = sorted({dump.nccl_version for dump in dumps} - {""})
    facts = {group_fact(comm_hash): group.words for comm_hash, group in groups.items()}
    left_out = [f", {n} more {what}" for what, n in omitted.items() if n]
    return Trace(
        collectives=_collectives(dumps, first_ns),
        communicators=_communicators(dumps, groups, with_p2p, first_ns=first_ns),
        processes=_processes(ranks, first_ns),
        snapshots=_snapshots(dumps, with_p2p, last_ns),
        annotations=_last_calls(dumps),
        clocks=(Clock(0, last_ns, last_ns),) if made else (),
        ends_ns=(last_ns,) if made else (),
        source=f"PyTorch flight-recorder dumps of {len(dumps)} of {len(ranks)} ranks" + "".join(left_out),
        facts=facts | ({"nccl_version": ", ".join(versions)[:200]} if versions else {}),
    )


def _last_calls(dumps: Sequence[Dump]) -> Array:
    """The first call of each rank that is not complete, and its last call, in words."""
    rows = []
    for dump in dumps:
        in_order = sorted(dump.calls, key=lambda call: call.created_ns)
        first_open = next((call for call in in_order if not call.is_complete), None)
        for call in dict.fromkeys([*([first_open] if first_open else []), *in_order[-1:]]):
            group = dump.groups[call.group]
            rows.append((call.created_ns, dump.rank, call_label(call.words, group.words, call.frame)))
    out = layout.empty(layout.ANNOTATIONS, len(rows))
    for row, (ts_ns, rank, words) in zip(out, rows, strict=True):
        row["ts_ns"], row["pid"], row["label"], row["value"] = ts_ns, rank, CALL_LABEL, words
    return out


def _known_groups(dumps: list[Dump]) -> dict[int, Group]:
    return {group.comm_hash: group for dump in dumps for group in dump.groups.values()}


def _collectives(dumps: list[Dump], first_ns: int) -> Array:
    knows_starts = any(dump.knows_starts for dump in dumps)  # a dump without starts does not show this
    parts = [_rows(dump, first_ns, knows_starts=knows_starts) for dump in dumps]
    rows = np.concatenate(parts) if parts else layout.empty(layout.COLLECTIVES)
    return rows[np.argsort(rows["ts_ns"], kind="stable")]


def _rows(dump: Dump, first_ns: int, *, knows_starts: bool) -> Array:
    rows = layout.empty(layout.COLLECTIVES, len(dump.calls))
    rows["pid"] = dump.rank
    positions = {name: _position(group, dump.rank) for name, group in dump.groups.items()}
    for row, call in zip(rows, dump.calls, strict=True):
        group = dump.groups[call.group]
        row["ts_ns"] = call.created_ns or first_ns
        row["comm_hash"], row["nranks"] = group.comm_hash, len(group.members) or UNKNOWN
        row["comm_rank"] = positions[call.group]
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


def _position(group: Group, rank: int) -> int:
    return group.members.index(rank) if rank in group.members else UNKNOWN


def _communicators(
    dumps: list[Dump], groups: dict[int, Group], with_p2p: set[int], *, first_ns: int
) -> Array:
    """Memberships: from the dumps, with their counters, and for ranks without a dump."""
    rows, output = [], set()
    for dump in dumps:
        for group in dump.groups.values():
            entered, completed = _progress(dump, group, group.comm_hash in with_p2p)
            position = _position(group, dump.rank)
            rows.append((group.comm_hash, dump.rank, position, len(group.members), entered, completed))
            output.add((group.comm_hash, dump.rank))
    for comm_hash, group in groups.items():
        silent = [(i, rank) for i, rank in enumerate(group.members) if (comm_hash, rank) not in output]
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
    """Seq of the last collective that a rank entered in a group, and of the last collective that completed on it.

    In a group that also sends point to point, the counters count both; only the entries distinguish them.
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
        output = [
            counters
            for name, counters in dump.counters.items()
            if dump.groups[name].comm_hash not in with_p2p and UNKNOWN not in counters
        ]
        if output:
            row["n_collectives"], row["n_completed"] = (sum(column) for column in zip(*output, strict=True))
    return rows


IMPORTER = Importer("flight-recorder dumps", _accepts, _read)
