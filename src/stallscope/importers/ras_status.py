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
from stallscope.importers.texts import files_of, head_of, text_of

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
    return any(_looks_like_an_answer(file) for file in files_of(path))


def _looks_like_an_answer(file: Path) -> bool:
    head = head_of(file)
    return head.lstrip()[:1] == b"{" and all(word in head for word in _WORDS)


def _read(path: Path) -> Trace:
    files = [file for file in files_of(path) if _looks_like_an_answer(file)]
    answers = sorted((_answer(file) for file in files), key=lambda answer: answer.at_ns)
    last = answers[-1]
    still = _standing_still(answers)
    hosts = sorted({member.host for member in last.members}) or [""]
    ranks = _job_ranks(last)
    rows = [_open_row(member, last, hosts) for member in last.members if _waits(member, last, still)]
    return Trace(
        collectives=np.concatenate(rows) if rows else layout.empty(layout.COLLECTIVES),
        communicators=_communicators(last, hosts),
        processes=_processes(last, hosts, ranks),
        snapshots=_snapshots(last, hosts),
        nodes=tuple(hosts),
        clocks=tuple(Clock(i, last.at_ns, last.at_ns) for i in range(len(hosts))),
        ends_ns=(last.at_ns,) * len(hosts),
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
            return {hash_ for hash_, counts in _counts(last).items() if _counts(answer).get(hash_) == counts}
    return set()


def _counts(answer: _Answer) -> dict[int, dict[int, int]]:
    counts: dict[int, dict[int, int]] = {}
    for member in answer.members:
        counts.setdefault(member.comm_hash, {})[member.rank] = member.entered
    return counts


def _waits(member: _Member, answer: _Answer, still: set[int]) -> bool:
    """Whether a rank has entered a round that another one of its communicator has not, for good."""
    others = [one for one in answer.members if one.comm_hash == member.comm_hash]
    answered = [one.entered for one in others if one.counts is not None]
    if member.counts is None or not member.entered or member.entered < max(answered):
        return False
    return any(one.is_dead for one in others) or (
        member.comm_hash in still and min(answered) < member.entered
    )


def _job_ranks(answer: _Answer) -> dict[tuple[str, int], int]:
    """Rank in the job of each process: its rank in the largest communicator."""
    size = max((member.size for member in answer.members), default=0)
    whole = next((member.comm_hash for member in answer.members if member.size == size), None)
    return {(m.host, m.pid): m.rank for m in answer.members if m.comm_hash == whole}


def _open_row(member: _Member, answer: _Answer, hosts: list[str]) -> Array:
    """The last round a waiting rank has entered."""
    row = layout.empty(layout.COLLECTIVES, 1)
    counts = member.counts or {}
    behind = next(
        (m for m in answer.members if m.comm_hash == member.comm_hash and m.entered < member.entered), None
    )
    differing = [op for op, n in counts.items() if behind and behind.counts and n > behind.counts.get(op, 0)]
    row["op"] = _OPS.get(differing[0] if differing else "", Op.ALL_REDUCE)
    row["ts_ns"], row["node"], row["pid"] = answer.at_ns, hosts.index(member.host), member.pid
    row["comm_hash"], row["comm_rank"], row["nranks"] = member.comm_hash, member.rank, member.size
    row["seq"] = member.entered - 1
    row["flags"] = CollectiveFlag.NO_LEDGER | CollectiveFlag.OPEN
    return row


def _communicators(answer: _Answer, hosts: list[str]) -> Array:
    rows = layout.empty(layout.COMMUNICATORS, len(answer.members))
    for row, member in zip(rows, answer.members, strict=True):
        row["ts_ns"], row["node"], row["pid"] = answer.at_ns, hosts.index(member.host), member.pid
        row["comm_hash"], row["comm_rank"], row["nranks"] = member.comm_hash, member.rank, member.size
        row["last_entered"] = member.entered - 1 if member.counts is not None else UNKNOWN
    return rows


def _processes(answer: _Answer, hosts: list[str], ranks: dict[tuple[str, int], int]) -> Array:
    known = {(member.host, member.pid): member.device for member in answer.members}
    rows = layout.empty(layout.PROCESSES, len(known))
    for row, ((host, pid), device) in zip(rows, sorted(known.items()), strict=True):
        row["node"], row["pid"], row["device"] = hosts.index(host), pid, device
        row["rank"], row["nranks"] = ranks.get((host, pid), UNKNOWN), len(ranks)
    return rows


def _snapshots(answer: _Answer, hosts: list[str]) -> Array:
    """One row for each process that answered: who has none is silent."""
    entered: dict[tuple[str, int], int] = {}
    for member in answer.members:
        if member.counts is not None and not member.is_dead:
            key = member.host, member.pid
            entered[key] = entered.get(key, 0) + member.entered
    rows = layout.empty(layout.SNAPSHOTS, len(entered))
    for row, ((host, pid), n) in zip(rows, sorted(entered.items()), strict=True):
        row["ts_ns"], row["node"], row["pid"] = answer.at_ns, hosts.index(host), pid
        row["alive"], row["n_collectives"] = 1, n
    return rows


IMPORTER = Importer("NCCL RAS answers (JSON)", _sniff, _read)
