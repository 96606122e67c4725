"""Answers of NCCL's RAS service (`ncclras -f json`, NCCL 2.28.7 and newer): one file per question, in a folder.

Each answer counts, for every rank of every communicator, the collectives it has entered. Ranks that are one apart at
one moment are no hang: so a job is said to stand still only where two answers, ten seconds apart or more, tell the same
counts. A rank that RAS calls dead or unresponsive is missing in one answer already. The format is described in the NCCL
user guide (Troubleshooting, RAS, JSON output).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CollectiveFlag, Op
from stallscope.events.trace import Clock, Trace
from stallscope.importers.registry import Importer
from stallscope.importers.texts import begins_as_object, files_of, text_of

_WORDS = (b'"nccl_version"', b'"communicators_count"')
_MOST_BYTES = 200 << 20
_STANDS_STILL_NS = 10 * 10**9
_OPS = {
    "Broadcast": Op.BROADCAST,
    "Reduce": Op.REDUCE,
    "AllGather": Op.ALL_GATHER,
    "ReduceScatter": Op.REDUCE_SCATTER,
    "AllReduce": Op.ALL_REDUCE,
}


@dataclass(frozen=True)
class _Member:
    """A rank in a communicator. counts: entered collectives by operation, None where it did not answer."""

    comm_hash: int
    rank: int
    size: int
    host: str
    pid: int
    device: int
    counts: dict[str, int] | None
    is_dead: bool = False

    @property
    def entered(self) -> int:
        return sum(self.counts.values()) if self.counts else 0


@dataclass(frozen=True)
class _Answer:
    at_ns: int
    version: str
    members: tuple[_Member, ...]


def _sniff(path: Path) -> bool:
    return any(begins_as_object(file, _WORDS) for file in files_of(path))


def _read(path: Path) -> Trace:
    files = [file for file in files_of(path) if begins_as_object(file, _WORDS)]
    answers = sorted((_answer(file) for file in files), key=lambda answer: answer.at_ns)
    last = answers[-1]
    still = _standing_still(answers)
    nodes = tuple(sorted({member.host for member in last.members})) or ("",)
    node_of = {host: i for i, host in enumerate(nodes)}
    ranks = _job_ranks(last)
    rows = [
        _open_row(member, comm, last.at_ns, node_of)
        for hash_, comm in _by_communicator(last).items()
        for member in _waiting(comm, is_still=hash_ in still)
    ]
    return Trace(
        collectives=np.concatenate(rows) if rows else layout.empty(layout.COLLECTIVES),
        communicators=_communicators(last, node_of),
        processes=_processes(last, node_of, ranks),
        snapshots=_snapshots(last, node_of),
        nodes=nodes,
        clocks=tuple(Clock(i, last.at_ns, last.at_ns) for i in range(len(nodes))),
        ends_ns=(last.at_ns,) * len(nodes),
        source=f"{len(answers)} answer{'s' * (len(answers) > 1)} of NCCL's RAS service",
        facts={"nccl_version": last.version} if last.version else {},
    )


def _answer(file: Path) -> _Answer:
    """One file. Raises BadTrace."""
    try:
        told = json.loads(text_of(file, _MOST_BYTES))
        at = datetime.strptime(str(told["timestamp"]), "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        members = tuple(member for comm in told["communicators"] for member in _members(comm))
        return _Answer(int(at.timestamp()) * 10**9, str(told["nccl_version"])[:64], members)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise BadTrace(f"{file} is a damaged answer of ncclras ({error}): ask again with -f json") from error


def _members(comm: dict[str, Any]) -> Iterator[_Member]:
    hash_ = int(str(comm["hash"]), 16) & (2**64 - 1)
    size = _number(comm["size"])
    for told in [*comm.get("ranks", ()), *comm.get("missing_ranks", ())]:
        state = told.get("status", {})
        counts = told.get("collective_counts")
        yield _Member(
            comm_hash=hash_,
            rank=_number(told["rank"]),
            size=size,
            host=str(told.get("host", ""))[:256],
            pid=_number(told.get("pid", 0)),
            device=_number(told["cuda_dev"]) if "cuda_dev" in told else UNKNOWN,
            counts=None if counts is None else {str(op): _number(n) for op, n in counts.items()},
            is_dead=bool(state.get("considered_dead") or state.get("unresponsive")),
        )


def _number(value: object) -> int:
    number = int(value) if isinstance(value, int | str) else UNKNOWN
    if not 0 <= number < 2**31:
        raise ValueError(f"{value!r} is no count")
    return number


def _standing_still(answers: list[_Answer]) -> set[int]:
    """Communicators whose counts are the same in the last answer and in one ten seconds before it."""
    last = answers[-1]
    for answer in reversed(answers):
        if last.at_ns - answer.at_ns >= _STANDS_STILL_NS:
            then = _counts(answer)
            return {hash_ for hash_, counts in _counts(last).items() if then.get(hash_) == counts}
    return set()


def _counts(answer: _Answer) -> dict[int, dict[int, int]]:
    counts: dict[int, dict[int, int]] = {}
    for member in answer.members:
        counts.setdefault(member.comm_hash, {})[member.rank] = member.entered
    return counts


def _by_communicator(answer: _Answer) -> dict[int, list[_Member]]:
    found: dict[int, list[_Member]] = {}
    for member in answer.members:
        found.setdefault(member.comm_hash, []).append(member)
    return found


def _waiting(comm: list[_Member], *, is_still: bool) -> list[_Member]:
    """The ranks that have entered a round that another one of their communicator has not, for good."""
    answered = [one.entered for one in comm if one.counts is not None]
    if not answered or not max(answered):
        return []
    is_for_good = any(one.is_dead for one in comm) or (is_still and min(answered) < max(answered))
    furthest = max(answered)
    return [one for one in comm if one.counts is not None and one.entered == furthest and is_for_good]


def _job_ranks(answer: _Answer) -> dict[tuple[str, int], int]:
    """Rank in the job of each process: its rank in the largest communicator."""
    size = max((member.size for member in answer.members), default=0)
    whole = next((member.comm_hash for member in answer.members if member.size == size), None)
    return {(m.host, m.pid): m.rank for m in answer.members if m.comm_hash == whole}


def _open_row(member: _Member, comm: list[_Member], at_ns: int, node_of: dict[str, int]) -> Array:
    """The last round a waiting rank has entered."""
    row = layout.empty(layout.COLLECTIVES, 1)
    counts = member.counts or {}
    behind = next((one for one in comm if one.entered < member.entered), None)
    differing = [op for op, n in counts.items() if behind and behind.counts and n > behind.counts.get(op, 0)]
    row["op"] = _OPS.get(differing[0] if differing else "", Op.ALL_REDUCE)
    row["ts_ns"], row["node"], row["pid"] = at_ns, node_of[member.host], member.pid
    row["comm_hash"], row["comm_rank"], row["nranks"] = member.comm_hash, member.rank, member.size
    row["seq"] = member.entered - 1
    row["flags"] = CollectiveFlag.NO_LEDGER | CollectiveFlag.OPEN
    return row


def _communicators(answer: _Answer, node_of: dict[str, int]) -> Array:
    rows = layout.empty(layout.COMMUNICATORS, len(answer.members))
    for row, member in zip(rows, answer.members, strict=True):
        row["ts_ns"], row["node"], row["pid"] = answer.at_ns, node_of[member.host], member.pid
        row["comm_hash"], row["comm_rank"], row["nranks"] = member.comm_hash, member.rank, member.size
        row["last_entered"] = member.entered - 1 if member.counts is not None else UNKNOWN
    return rows


def _processes(answer: _Answer, node_of: dict[str, int], ranks: dict[tuple[str, int], int]) -> Array:
    known = {(member.host, member.pid): member.device for member in answer.members}
    rows = layout.empty(layout.PROCESSES, len(known))
    for row, ((host, pid), device) in zip(rows, sorted(known.items()), strict=True):
        row["node"], row["pid"], row["device"] = node_of[host], pid, device
        row["rank"], row["nranks"] = ranks.get((host, pid), UNKNOWN), len(ranks)
    return rows


def _snapshots(answer: _Answer, node_of: dict[str, int]) -> Array:
    """One row for each process that answered: who has none is silent."""
    entered: dict[tuple[str, int], int] = {}
    for member in answer.members:
        if member.counts is not None and not member.is_dead:
            key = member.host, member.pid
            entered[key] = entered.get(key, 0) + member.entered
    rows = layout.empty(layout.SNAPSHOTS, len(entered))
    for row, ((host, pid), n) in zip(rows, sorted(entered.items()), strict=True):
        row["ts_ns"], row["node"], row["pid"] = answer.at_ns, node_of[host], pid
        row["alive"], row["n_collectives"] = 1, n
    return rows


IMPORTER = Importer("NCCL RAS answers (JSON)", _sniff, _read)
