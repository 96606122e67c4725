"""Lines of PyTorch's NCCL watchdog: time-outs, and the progress of each rank in each group.

The phrases are from ProcessGroupNCCL.cpp (PyTorch 1.13 to 2.11). Group 0 is the same on all ranks. Another group has
a GUID that its ranks share (PyTorch 2.3 and later); without it, the group's number is the rank's own.
"""

import re

from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Op
from stallscope.events.trace import Gap
from stallscope.importers.log_lines import Line
from stallscope.importers.log_state import LogState, Writer
from stallscope.importers.rank_statements import Failure

_OPS = (
    ("REDUCE_SCATTER", Op.REDUCE_SCATTER),
    ("ALLREDUCE", Op.ALL_REDUCE),
    ("ALLGATHER", Op.ALL_GATHER),
    ("ALLTOALL", Op.ALL_TO_ALL),
    ("BARRIER", Op.ALL_REDUCE),
    ("BROADCAST", Op.BROADCAST),
    ("COALESCED", Op.GROUP),
    ("SCATTER", Op.SCATTER),
    ("GATHER", Op.GATHER),
    ("REDUCE", Op.REDUCE),
    ("SEND", Op.SEND),
    ("RECV", Op.RECV),
)
"""c10d's opTypeToString; the first entry that the name contains."""
_MAX_GAPS = 4
TIMEOUT = re.compile(
    r"(?:\[Rank (?P<rank>\d+)\] )?Watchdog caught collective operation timeout: "
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)(?:, NumelIn=(?P<count>\d+), NumelOut=\d+)?"
    r"[^)]*?Timeout\(ms\)=\d+\) ran for (?P<ms>\d+)"
)
_GROUP = re.compile(
    r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\s(]+))?(?: ?\((?P<words>[^)]*)\))? Rank (?P<rank>\d+)\]"
)
STATUS = re.compile(
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+)(?:, last started (?:NCCL )?work: (?P<started>-?\d+))?"
    r", last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
STUCK = re.compile(r"watchdog got stuck for (\d+) seconds")
C10_FRAME = re.compile(r"^#\d+ (?P<name>.+?) from (?P<file>.+):(?P<line>\d+)\s*$")


def take_timeout(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """A time-out of the watchdog; the group follows in a line of its own."""
    rank = line.rank if line.rank is not None else int(match["rank"] or -1)
    if rank < 0:
        return
    progress = log.statements.at(
        "default_pg" if not (g := _GROUP.search(line.text)) else _group(log, g, rank), rank
    )
    if progress.open_seq != UNKNOWN and match["seq"] and progress.open_seq <= int(match["seq"]):
        return
    progress.open_seq = int(match["seq"] or -1)
    progress.op = next((op for word, op in _OPS if word in match["op"]), Op.NONE)
    progress.count = (
        int(match["count"]) if match["count"] and progress.op not in (Op.ALL_TO_ALL, Op.GATHER) else UNKNOWN
    )
    progress.words = f"{match['op'].lower()}" + (f" [{match['count']}]" if match["count"] else "")
    progress.ts_ns = log.now_ns
    writer.c10_frames = []
    log.statements.writers.add(rank)


def take_status(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The progress of one rank in one group."""
    where = _GROUP.search(line.text)
    rank = line.rank if line.rank is not None else int(where["rank"]) if where else writer.rank
    if rank is None:
        return
    group = _group(log, where, rank) if where else "default_pg"
    progress = log.statements.at(group, rank)
    progress.enqueued = max(progress.enqueued, int(match["enqueued"]))
    progress.completed = max(progress.completed, int(match["completed"]))
    progress.started = max(progress.started, int(match["started"] or -1))
    progress.ts_ns = progress.ts_ns or log.now_ns
    writer.group, writer.c10_frames = group, []
    log.statements.writers.add(rank)
    _move_timeout(log, group, rank, line.text)


def take_stuck(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """A watchdog thread that a call of CUDA holds: a remark, because ranks that wait for others state it too."""
    if writer.rank is not None:
        words = f"NCCL's watchdog thread was stuck for {match[1]} s, inside CUDA or without the interpreter's lock"
        log.statements.add_failure(Failure(writer.rank, "remark", words, log.now_ns))
        gap = Gap(
            f"the log of rank {writer.rank} reports that {words}",
            "Give the stacks of all ranks (py-spy dump --pid PID).",
        )
        log.statements.gaps += [gap] if len(log.statements.gaps) < _MAX_GAPS else []


def keep_line(log: LogState, writer: Writer) -> None:
    """The innermost line of the program's own code below a watchdog's "Stack trace of the failed collective"."""
    own = [f for f in writer.c10_frames or () if not re.search(r"/(?:site|dist)-packages/|/torch/", f)]
    if writer.rank is not None and own:
        log.statements.at(writer.group, writer.rank).line = own[0]


def _move_timeout(log: LogState, group: str, rank: int, text: str) -> None:
    """A time-out names no group: it belongs to the group whose status states the same number."""
    at = re.search(r"(?:work sequence id|at (?:NCCL )?work): (\d+)", text)
    waiting = log.statements.progress.get(("default_pg", rank))
    if group == "default_pg" or not at or waiting is None or waiting.open_seq != int(at[1]):
        return
    progress = log.statements.at(group, rank)
    progress.open_seq, progress.op, progress.count, progress.words = (
        waiting.open_seq,
        waiting.op,
        waiting.count,
        waiting.words,
    )
    waiting.open_seq, waiting.words = UNKNOWN, ""
    if waiting.enqueued == UNKNOWN:
        del log.statements.progress["default_pg", rank]


def _group(log: LogState, match: re.Match[str], rank: int) -> str:
    """The name of a group that all its ranks share. Without a GUID its number is a rank's own, except group 0."""
    words = match["words"] or ""
    if words == "default_pg" or (match["id"] == "0" and match["guid"] in (None, "0")):
        log.statements.groups["default_pg"] = "default_pg"
        return "default_pg"
    name = match["guid"] if match["guid"] else f"{match['id']} of rank {rank}"
    log.statements.local_ranks[name, rank] = int(match["rank"])
    log.statements.groups[name] = f"{words} (group {name})" if words else f"group {name}"
    return name
