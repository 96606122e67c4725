"""The state of a log while its lines are read: the open parts of each writer's lines, and the statements so far."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.events.layout import UNKNOWN
from stallscope.importers.log_failures import ends_of_others, follows_from_others, status_words
from stallscope.importers.log_lines import Line
from stallscope.importers.rank_statements import Failure, Statements

_ACTOR_PID = re.compile(r"\bpid=(\d{1,9})\b")  # in the prefix of Ray


@dataclass
class Writer:
    """The open part of a writer's lines: a traceback, the frames below a watchdog's line, a torchrun summary.

    task: rank, process id and host of a task whose exit status a later line states. thread: the first word of the
    heading of a thread in a dump of faulthandler. n_current: 1 after the stack of the current thread.
    """

    rank: int | None = None
    group: str = "default_pg"
    frames: list[str] = field(default_factory=list)
    is_traceback: bool = False
    is_crash: str = ""
    c10_frames: list[str] | None = None
    summary: dict[str, str] = field(default_factory=dict)
    is_root_cause: bool = False
    task: tuple[int, int, str] | None = None
    thread: str = ""
    n_current: int = 0

    def is_open(self) -> bool:
        """Whether the next lines may belong to a traceback."""
        return self.is_traceback or bool(self.is_crash) or bool(self.thread)


class LogState:
    """parts: the statements in the order of the log; the last part grows. A part ends where an attempt may end.

    file_rank: the rank that the file's name states. ended: ranks whose end a launcher states.
    pids: process ids by rank, of all parts. now_ns: the time of the current line, or the number of the line.
    """

    def __init__(self, file: Path, file_rank: int | None):
        self.file = file
        self.file_rank = file_rank
        self.parts = [Statements()]
        self.pids: dict[int, int] = {}
        self.ended: set[int] = set()
        self.writers: dict[str, Writer] = {}
        self.now_ns = 0

    @property
    def statements(self) -> Statements:
        """The current part."""
        return self.parts[-1]

    def begin_part(self) -> None:
        """End the current part, if it states anything on a failure or time-out."""
        if self.statements.failures or self.statements.progress:
            size, has_times = self.statements.world_size, self.statements.has_times
            self.parts.append(Statements(world_size=size, has_times=has_times))

    def begin_attempt(self) -> None:
        """Leave out all statements so far: an earlier attempt made them."""
        n = sum(len(part.failures) + len(part.progress) for part in self.parts)
        size = max(part.world_size for part in self.parts)
        self.parts = [Statements(world_size=size, has_times=self.statements.has_times)]
        self.pids.clear()
        self.writers.clear()
        if n:
            self.statements.omit("lines of an earlier attempt", n)

    def writer_of(self, line: Line) -> Writer:
        """The writer of a line."""
        key = f"{line.source}|{'' if line.rank is None else line.rank}"
        if line.rank is None and line.source and (known := self.writers.get(f"{line.source}|")):
            return known
        writer = self.writers.setdefault(key, Writer())
        writer.rank = (
            line.rank if line.rank is not None else writer.rank if writer.rank is not None else self.file_rank
        )
        if actor := _ACTOR_PID.search(line.source):
            pid = int(actor[1])
            if writer.rank is None and (known_rank := self.rank_of(pid)) != UNKNOWN:
                writer.rank = known_rank
            if writer.rank is not None:
                self.pids[writer.rank] = self.statements.pids[writer.rank] = pid
        if line.source and line.rank is not None:  # later lines of that writer without a rank
            self.writers[f"{line.source}|"] = writer
        return writer

    def rank_of(self, pid: int) -> int:
        """The rank of a process; UNKNOWN if no line states it."""
        return next((rank for rank, known in self.pids.items() if known == pid), UNKNOWN)

    def end_rank(
        self,
        rank: int,
        status: int,
        *,
        pid: int = UNKNOWN,
        host: str = "",
        ts_ns: int = 0,
        words: str = "",
        is_exact: bool = True,
    ) -> None:
        """The end of a rank's process. is_exact: the rank is of the job, not local to a node."""
        self.ended.add(rank)
        if pid != UNKNOWN and rank != UNKNOWN:
            self.pids[rank] = pid
            if is_exact:
                self.statements.pids[rank] = pid
        if host and rank != UNKNOWN:
            self.statements.hosts.setdefault(rank, host[:64])
        kind = "aftermath" if ends_of_others(status) or follows_from_others(words) else "failure"
        has_timed_out = any(
            of_rank == rank and progress.open_seq != UNKNOWN
            for part in self.parts
            for (_, of_rank), progress in part.progress.items()
        )
        if status == 134 and has_timed_out:  # the watchdog aborts the process
            kind = "aftermath"
        if status == 0:
            return
        self.statements.add_failure(
            Failure(rank, kind, words or status_words(status), ts_ns or self.now_ns, (), status, pid, host)
        )

    def end_thread(self, writer: Writer) -> None:
        """End the stack of a thread. The main thread is the current thread, otherwise the last thread of a dump."""
        if writer.frames and writer.rank is not None:
            stack = tuple(writer.frames)
            known = self.statements.stacks.setdefault(writer.rank, [])
            known.insert(min(len(known), writer.n_current), stack)
            writer.n_current |= writer.thread == "Current"
        writer.frames, writer.thread = [], ""

    def close(self, writer: Writer, words: str) -> None:
        """End an open traceback. words: its error; "" where the log breaks off."""
        frames = tuple(writer.frames) if writer.is_crash else tuple(reversed(writer.frames))
        if (writer.is_traceback or writer.is_crash) and (frames or words):
            is_launcher = any(
                "/torch/distributed/launcher/" in frame or "/torchrun" in frame for frame in frames
            )
            kind = "aftermath" if is_launcher or follows_from_others(words) or not words else "failure"
            rank = UNKNOWN if writer.rank is None else writer.rank
            if not is_launcher:
                self.statements.add_failure(Failure(rank, kind, words, self.now_ns, frames[:64]))
        writer.frames, writer.is_traceback, writer.is_crash = [], False, ""
