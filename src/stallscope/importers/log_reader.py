"""Reads the log of a launcher line by line: the kinds of lines and the function for each kind."""

import re
from collections.abc import Callable
from pathlib import Path

from stallscope.events.layout import UNKNOWN
from stallscope.importers.file_ranks import named_rank
from stallscope.importers.log_failures import FRAME_LINE, error_words
from stallscope.importers.log_lines import Line, has_task_labels, parse
from stallscope.importers.log_state import LogState, Writer
from stallscope.importers.process_ends import (
    BARRIER,
    CRASH,
    DEEPSPEED,
    EXITED,
    OOM,
    SPAWN_EXIT,
    SPAWNED,
    XID,
    take_barrier,
    take_crash,
    take_deepspeed,
    take_exit,
    take_oom,
    take_spawn_exit,
    take_spawned,
    take_summary,
    take_xid,
)
from stallscope.importers.rank_statements import Statements
from stallscope.importers.scheduler_ends import (
    CANCELLED,
    MPIRUN,
    NODE_FAILURE,
    SRUN,
    TASK,
    TASK_STATUS,
    take_cancelled,
    take_mpirun,
    take_node_failure,
    take_srun,
    take_task,
    take_task_status,
)
from stallscope.importers.texts import head_of, lines_with
from stallscope.importers.watchdog_lines import (
    C10_FRAME,
    STATUS,
    STUCK,
    TIMEOUT,
    keep_line,
    take_status,
    take_stuck,
    take_timeout,
)

_ANY = (
    *(
        "WorkNCCL",
        "enqueued",
        "Traceback",
        '  File "',
        "exitcode",
        "Error",
        "Exception",
        "ignal ",
        "Xid",
        "illed",
    ),
    *(
        "oom-kill",
        "srun: ",
        "slurmstepd",
        "orld_size",
        "orld size",
        "WORLD_SIZE",
        "nranks",
        "traceback :",
        "     : ",
    ),
    *(
        "pid: ",
        "attempts left",
        "monitoredBarrier",
        "Fatal Python",
        "Segmentation",
        "Aborted",
        "exited",
        "restart_count",
    ),
    *(" from /", "Restarting", "distributed/run.py", "Root Cause", "elastic_operator", "REQUEUE"),
    *(
        "terminated",
        "return code",
        "Process name",
        "xit code",
        "RANK ",
        "SIGNAL",
        "EXIT ",
        "got stuck",
        "Node failure",
    ),
    *("CANCELLED AT", "most recent call first", "world_rank="),
)
"""A line without any of these words is skipped, and so are blocks of lines."""

_ANY_BYTES = tuple(word.encode() for word in _ANY)
_WORLD_SIZE = re.compile(r"(?:world[_ ]size|WORLD_SIZE|\bnranks)['\"]?\s*[=:]\s*(\d{1,7})\b")
_RAY_WORKER = re.compile(r"pid=(?P<pid>\d{1,9})\) world_rank=(?P<rank>\d{1,7})\b")
_RESTART = re.compile(
    r"attempts? left; will restart worker group|Restarting worker group|restart_count=[1-9]|DUE TO JOB REQUEUE"
)
_START = re.compile(r"torch/distributed/run\.py:\d+\]|Starting elastic_operator with launch configs")
"""torchrun's first lines. After a failure they belong to a later job in the same file."""


def parts_of(file: Path) -> list[Statements]:
    """The statements of a log, in parts of which each belongs to one attempt. Raises BadTrace."""
    rank = named_rank(file)
    log = _read(file, rank)
    if rank is not None and log.ended - {
        rank,
        UNKNOWN,
    }:  # a launcher's log: the number in its name is not a rank
        log = _read(file, None)
    return log.parts


def _read(file: Path, file_rank: int | None) -> LogState:
    log = LogState(file, file_rank)
    has_labels = has_task_labels(head_of(file).decode("utf-8", "replace").splitlines()[:200][:-1])

    def is_open() -> bool:
        return any(writer.is_open() for writer in log.writers.values())

    for raw in lines_with(file, _ANY_BYTES, is_open):
        for part in raw.split("\r") if "\r" in raw else (raw,):
            if any(word in part for word in _ANY) or is_open():
                _take(log, parse(part, has_labels=has_labels))
    for writer in list(log.writers.values()):
        log.end_thread(writer) if writer.thread else log.close(writer, "")
    return log


def _take(log: LogState, line: Line) -> None:
    if line.ts_ns:
        log.statements.has_times = True
        log.now_ns = line.ts_ns
    else:
        log.now_ns += 1
    writer = log.writer_of(line)
    if writer.rank is not None:
        log.statements.writers.add(writer.rank)
    if _continues(log, writer, line.text):
        return
    for pattern, take in _TAKERS:
        if match := pattern.search(line.text):
            take(log, writer, match, line)
            return


def _continues(log: LogState, writer: Writer, text: str) -> bool:
    """Whether a line continues an open traceback or the stack of a crash."""
    if writer.is_traceback or writer.is_crash:
        if match := FRAME_LINE.match(text):
            writer.frames.append(f"{match['file']}:{match['line']} {(match['name'] or '<module>').strip()}")
            return True
        if not writer.is_crash and (words := error_words(text)):
            log.close(writer, words)
            return False
        if (
            text.startswith((" ", "\t"))
            or not text.strip()
            or text.startswith(("Thread 0x", "Current thread"))
        ):
            if writer.is_crash and (not text.strip() and writer.frames):
                log.close(writer, writer.is_crash)
            return True
        log.close(writer, writer.is_crash)
    if writer.thread:
        if match := FRAME_LINE.match(text):
            writer.frames.append(f"{match['file']}:{match['line']} {(match['name'] or '<module>').strip()}")
            return True
        log.end_thread(writer)
    if (match := C10_FRAME.match(text)) and writer.c10_frames is not None:
        writer.c10_frames.append(f"{match['file']}:{match['line']} {match['name']}")
        keep_line(log, writer)
        return True
    return take_summary(log, writer, text)


def _take_traceback(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The start of a traceback."""
    log.close(writer, "")
    writer.is_traceback = True


def _take_thread(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """A thread of a dump of faulthandler in the lines of a rank; dumps in files of their own are read by stack_dump."""
    if line.rank is not None:
        writer.thread, writer.frames = match[1], []


def _take_restart(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """A new attempt: the statements of the attempt before are left out."""
    log.begin_attempt()


def _take_start(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The start of a launcher: a new attempt, if the log already states a failure or a time-out."""
    if any(part.failures or part.progress for part in log.parts):
        log.begin_attempt()
    log.statements.started_ns = line.ts_ns


def _take_ray_worker(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """Ray's list of workers: the rank of a process."""
    rank, pid = int(match["rank"]), int(match["pid"])
    if log.rank_of(pid) in (UNKNOWN, rank):  # hosts may share a process id
        log.pids[rank] = pid


def _take_world_size(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The number of ranks of the job."""
    log.statements.world_size = max(log.statements.world_size, int(match[1]))


_TAKERS: tuple[tuple[re.Pattern[str], Callable[[LogState, Writer, re.Match[str], Line], None]], ...] = (
    (TIMEOUT, take_timeout),
    (STATUS, take_status),
    (STUCK, take_stuck),
    (re.compile(r"Traceback \(most recent call last\)"), _take_traceback),
    (re.compile(r"^(Current|Thread).* \(most recent call first\)"), _take_thread),
    (BARRIER, take_barrier),
    (EXITED, take_exit),
    (SRUN, take_srun),
    (NODE_FAILURE, take_node_failure),
    (CANCELLED, take_cancelled),
    (MPIRUN, take_mpirun),
    (TASK, take_task),
    (TASK_STATUS, take_task_status),
    (DEEPSPEED, take_deepspeed),
    (SPAWNED, take_spawned),
    (SPAWN_EXIT, take_spawn_exit),
    (XID, take_xid),
    (OOM, take_oom),
    (CRASH, take_crash),
    (_RESTART, _take_restart),
    (_START, _take_start),
    (_RAY_WORKER, _take_ray_worker),
    (_WORLD_SIZE, _take_world_size),
)
"""Patterns and their functions; the first match applies."""
