"""Logs of launchers: torchrun, Slurm, Ray, mpirun, kubectl; one file or one per rank, ranks interleaved.

Read: time-outs of NCCL's watchdog (WorkNCCL) and the progress that it states, heartbeat monitors, Python tracebacks,
exit codes and signals in the summaries of launchers, the out-of-memory killer, Xid errors. The phrases are from
ProcessGroupNCCL.cpp (PyTorch 1.13 to 2.9), torch/distributed/elastic/multiprocessing/errors (2.0 to 2.9), srun and
slurmstepd (23.11), the kernel (oom_kill.c) and the NVIDIA driver (NVRM: Xid). A restarted job: the last attempt counts.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.events.layout import UNKNOWN
from stallscope.events.names import Op
from stallscope.events.trace import Gap, Trace
from stallscope.importers.file_ranks import named_rank
from stallscope.importers.log_failures import (
    FRAME_LINE,
    ends_of_others,
    error_words,
    follows_from_others,
    status_of,
    status_words,
)
from stallscope.importers.log_lines import Line, has_task_labels, parse
from stallscope.importers.rank_statements import Failure, Statements
from stallscope.importers.registry import Importer
from stallscope.importers.texts import Source, files_of, head_of, lines_with

_WORDS = (
    *(
        b"WorkNCCL(",
        b"ProcessGroupNCCL",
        b"Watchdog caught",
        b"Traceback (most recent call last)",
        b"ChildFailedError",
    ),
    *(
        b"torch.distributed",
        b"torchrun",
        b"srun: ",
        b"slurmstepd: ",
        b"exitcode",
        b"NVRM: Xid",
        b"oom-kill",
        b"[rank",
    ),
    *(b"Killed process", b"raylet", b"MASTER_ADDR", b"world_size", b"WORLD_SIZE", b"mpirun", b"nccl_version"),
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
    *(" from /", "Restarting"),
)
"""A line without any of these words is skipped, and so are blocks of lines."""

_ANY_BYTES = tuple(word.encode() for word in _ANY)
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

_TIMEOUT = re.compile(
    r"(?:\[Rank (?P<rank>\d+)\] )?Watchdog caught collective operation timeout: "
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)(?:, NumelIn=(?P<count>\d+), NumelOut=\d+)?"
    r"[^)]*?Timeout\(ms\)=\d+\) ran for (?P<ms>\d+)"
)
_GROUP = re.compile(
    r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>[^\s(]+))?(?: ?\((?P<words>[^)]*)\))? Rank (?P<rank>\d+)\]"
)
_STATUS = re.compile(
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+)(?:, last started (?:NCCL )?work: (?P<started>-?\d+))?"
    r", last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
_C10_FRAME = re.compile(r"^#\d+ (?P<name>.+?) from (?P<file>.+):(?P<line>\d+)\s*$")
_WORLD_SIZE = re.compile(r"(?:world[_ ]size|WORLD_SIZE|\bnranks)['\"]?\s*[=:]\s*(\d{1,7})\b")
_SUMMARY = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*: (.*)$")
_EXITED = re.compile(r"failed \(exitcode: (-?\d+)\) (?:local_rank: (\d+) )?\(pid: (\d+)\)")
_SRUN = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<how>.+)$")
_MPIRUN = re.compile(
    r"process rank (\d+) .*?on node (\S+) exited on signal (\d+)|process rank (\d+) .*exit code (\d+)"
)
_OOM = re.compile(r"(?:Killed process|oom-kill:.*pid=) ?(\d+)")
_XID = re.compile(
    r"NVRM: Xid \((?P<pci>[^)]*)\): (?P<xid>\d+)(?:, pid='?(?P<pid>\d+|<unknown>)'?)?(?P<words>.*)"
)
_BARRIER = re.compile(r"[Rr]anks? ([\d, ]+) failed to pass monitoredBarrier")
_RESTART = re.compile(
    r"attempts? left; will restart worker group|Restarting worker group|restart_count=[1-9]"
)
_CRASH = re.compile(
    r"Fatal Python error: (.+)|(Segmentation fault)|Signal (\d+) \((SIG\w+)\) received by PID (\d+)"
)
_FAILS = frozenset((134, 135, 136, 137, 139))
_MOST_FAILURES = 20_000


def _accepts(file: Path, head: bytes) -> bool:
    if b"\0" in head[:4096] and head[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return False
    return any(word in head.replace(b"\0", b"") for word in _WORDS) or _has_words_later(file, head)


def _has_words_later(file: Path, head: bytes) -> bool:
    """For a log with an irrelevant beginning: examine its end if its name is a log's name."""
    from stallscope.importers.texts import HEAD_BYTES, tail_of

    is_log = re.search(r"\.(?:log|out|err|txt)$|stderr|stdout|slurm-", file.name) is not None
    return is_log and len(head) == HEAD_BYTES and any(word in tail_of(file, HEAD_BYTES) for word in _WORDS)


def _read(source: Source) -> Trace:
    files = [file for file in files_of(source) if _accepts(file, head_of(file))]
    statements = Statements()
    collect(files, statements)
    return statements.trace()


def collect(files: Iterable[Path], statements: Statements) -> None:
    """Add the statements of some logs."""
    n_files = 0
    for file in files:
        _Reader(file, statements).read()
        n_files += 1
    statements.sources.append(f"{n_files} log{'s' * (n_files > 1)} of a launcher")
    if not statements.failures and not statements.progress:
        statements.gaps.append(
            Gap(
                "the logs state neither a time-out nor the end of a process",
                "Also give the dumps of the flight recorder (TORCH_NCCL_TRACE_BUFFER_SIZE) or the stacks of all ranks.",
            )
        )


@dataclass
class _Writer:
    """The open part of a writer's lines: a traceback, the frames below a watchdog's line, a torchrun summary."""

    rank: int | None = None
    group: str = "default_pg"
    frames: list[str] = field(default_factory=list)
    is_traceback: bool = False
    is_crash: str = ""
    c10_frames: list[str] = field(default_factory=list)
    summary: dict[str, str] = field(default_factory=dict)


class _Reader:
    """Reads one log, line by line."""

    def __init__(self, file: Path, statements: Statements):
        self.file = file
        self.statements = statements
        self.writers: dict[str, _Writer] = {}
        self.file_rank = named_rank(file)
        self.now_ns = 0
        self.n_open = 0  # tracebacks that have not ended
        self.has_labels = has_task_labels(head_of(file).decode("utf-8", "replace").splitlines()[:200][:-1])

    def read(self) -> None:
        """Read all lines."""
        for number, raw in enumerate(lines_with(self.file, _ANY_BYTES, self._is_open)):
            for part in raw.split("\r") if "\r" in raw else (raw,):
                if self.n_open or any(word in part for word in _ANY):
                    self._take(parse(part, has_labels=self.has_labels), number)
        for writer in self.writers.values():
            self._close(writer, "")

    def _is_open(self) -> bool:
        """Whether the next lines may belong to a traceback."""
        return self.n_open > 0

    def _take(self, line: Line, number: int) -> None:
        if line.ts_ns:
            self.statements.has_times = True
            self.now_ns = line.ts_ns
        else:
            self.now_ns += 1
        writer = self._writer(line)
        if writer.rank is not None:
            self.statements.writers.add(writer.rank)
        if self._continues(writer, line.text):
            return
        for pattern, take in _TAKERS:
            if match := pattern.search(line.text):
                take(self, writer, match, line)
                return

    def _writer(self, line: Line) -> _Writer:
        key = f"{line.source}|{'' if line.rank is None else line.rank}"
        if line.rank is None and line.source and (known := self.writers.get(f"{line.source}|")):
            return known
        writer = self.writers.setdefault(key, _Writer())
        writer.rank = (
            line.rank if line.rank is not None else writer.rank if writer.rank is not None else self.file_rank
        )
        if line.source and line.rank is not None:  # later lines of that writer without a rank
            self.writers[f"{line.source}|"] = writer
        return writer

    def _continues(self, writer: _Writer, text: str) -> bool:
        """Whether a line continues an open traceback or the stack of a crash."""
        if writer.is_traceback or writer.is_crash:
            if match := FRAME_LINE.match(text):
                writer.frames.append(
                    f"{match['file']}:{match['line']} {(match['name'] or '<module>').strip()}"
                )
                return True
            if not writer.is_crash and (words := error_words(text)):
                self._close(writer, words)
                return False
            if (
                text.startswith((" ", "\t"))
                or not text.strip()
                or text.startswith(("Thread 0x", "Current thread"))
            ):
                if writer.is_crash and (not text.strip() and writer.frames):
                    self._close(writer, writer.is_crash)
                return True
            self._close(writer, writer.is_crash)
        if (match := _C10_FRAME.match(text)) and writer.c10_frames is not None:
            writer.c10_frames.append(f"{match['file']}:{match['line']} {match['name']}")
            self._keep_line(writer)
            return True
        return self._summary(writer, text)

    def _keep_line(self, writer: _Writer) -> None:
        """The innermost line of the program's own code below a watchdog's "Stack trace of the failed collective"."""
        own = [f for f in writer.c10_frames if not re.search(r"/(?:site|dist)-packages/|/torch/", f)]
        if writer.rank is not None and own:
            self.statements.at(writer.group, writer.rank).line = own[0]

    def _summary(self, writer: _Writer, text: str) -> bool:
        """A field of torchrun's list of failures. An entry ends with its traceback."""
        if not (match := _SUMMARY.match(text)):
            return False
        writer.summary[match[1]] = match[2]
        if match[1] == "traceback" and "exitcode" in writer.summary:
            self._add_summary(writer.summary)
            writer.summary = {}
        return True

    def _add_summary(self, summary: dict[str, str]) -> None:
        rank, code = (
            re.match(r"(\d+)", summary.get("rank", "")),
            re.match(r"(-?\d+) +\(pid: (\d+)\)", summary["exitcode"]),
        )
        if not rank or not code:
            return
        stated = Line("", None, "", 0)
        if time := re.match(r"(\d{4}-\d\d-\d\d)_(\d\d:\d\d:\d\d)", summary.get("time", "")):
            stated = parse(f"{time[1]} {time[2]} x", has_labels=False)
        self._end(
            int(rank[1]),
            status_of(int(code[1])),
            pid=int(code[2]),
            host=summary.get("host", ""),
            ts_ns=stated.ts_ns,
        )

    def _end(
        self, rank: int, status: int, *, pid: int = UNKNOWN, host: str = "", ts_ns: int = 0, words: str = ""
    ) -> None:
        """The end of a rank's process."""
        if pid != UNKNOWN:
            self.statements.pids.setdefault(rank, pid)
        if host:
            self.statements.hosts.setdefault(rank, host[:64])
        kind = "aftermath" if ends_of_others(status) or follows_from_others(words) else "failure"
        has_timed_out = any(
            r == rank and progress.open_seq != UNKNOWN
            for (_, r), progress in self.statements.progress.items()
        )
        if status == 134 and has_timed_out:  # the watchdog aborts the process
            kind = "aftermath"
        if status == 0:
            return
        self._add(
            Failure(rank, kind, words or status_words(status), ts_ns or self.now_ns, (), status, pid, host)
        )

    def _add(self, failure: Failure) -> None:
        if len(self.statements.failures) < _MOST_FAILURES:
            self.statements.failures.append(failure)
        else:
            self.statements.omit("further errors in logs")

    def _close(self, writer: _Writer, words: str) -> None:
        """End an open traceback. words: its error; "" where the log breaks off."""
        frames = tuple(writer.frames) if writer.is_crash else tuple(reversed(writer.frames))
        if (writer.is_traceback or writer.is_crash) and (frames or words):
            is_launcher = any(
                "/torch/distributed/launcher/" in frame or "/torchrun" in frame for frame in frames
            )
            kind = "aftermath" if is_launcher or follows_from_others(words) or not words else "failure"
            rank = UNKNOWN if writer.rank is None else writer.rank
            if not is_launcher:
                self._add(Failure(rank, kind, words, self.now_ns, frames[:64]))
        self.n_open -= writer.is_traceback or bool(writer.is_crash)
        writer.frames, writer.is_traceback, writer.is_crash = [], False, ""

    def take_timeout(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """A time-out of the watchdog; the group follows in a line of its own."""
        rank = line.rank if line.rank is not None else int(match["rank"] or -1)
        if rank < 0:
            return
        progress = self.statements.at(
            "default_pg" if not (g := _GROUP.search(line.text)) else self._group(g, rank), rank
        )
        if progress.open_seq != UNKNOWN and match["seq"] and progress.open_seq <= int(match["seq"]):
            return
        progress.open_seq = int(match["seq"] or -1)
        progress.op = next((op for word, op in _OPS if word in match["op"]), Op.NONE)
        progress.count = (
            int(match["count"])
            if match["count"] and progress.op not in (Op.ALL_TO_ALL, Op.GATHER)
            else UNKNOWN
        )
        progress.words = f"{match['op'].lower()}" + (f" [{match['count']}]" if match["count"] else "")
        progress.ts_ns = self.now_ns
        writer.c10_frames = []
        self.statements.writers.add(rank)

    def take_status(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """The progress of one rank in one group."""
        where = _GROUP.search(line.text)
        rank = line.rank if line.rank is not None else int(where["rank"]) if where else writer.rank
        if rank is None:
            return
        group = self._group(where, rank) if where else "default_pg"
        progress = self.statements.at(group, rank)
        progress.enqueued = max(progress.enqueued, int(match["enqueued"]))
        progress.completed = max(progress.completed, int(match["completed"]))
        progress.started = max(progress.started, int(match["started"] or -1))
        progress.ts_ns = progress.ts_ns or self.now_ns
        writer.group, writer.c10_frames = group, []
        self.statements.writers.add(rank)
        self._move_timeout(group, rank, line.text)

    def _move_timeout(self, group: str, rank: int, text: str) -> None:
        """A time-out names no group: it belongs to the group whose status states the same number."""
        at = re.search(r"work sequence id: (\d+)", text)
        waiting = self.statements.progress.get(("default_pg", rank))
        if group == "default_pg" or not at or waiting is None or waiting.open_seq != int(at[1]):
            return
        progress = self.statements.at(group, rank)
        progress.open_seq, progress.op, progress.count, progress.words = (
            waiting.open_seq,
            waiting.op,
            waiting.count,
            waiting.words,
        )
        waiting.open_seq, waiting.words = UNKNOWN, ""
        if waiting.enqueued == UNKNOWN:
            del self.statements.progress["default_pg", rank]

    def _group(self, match: re.Match[str], rank: int) -> str:
        """The name of a group that all its ranks share. Without a GUID its number is a rank's own, except group 0."""
        words = match["words"] or ""
        if words == "default_pg" or (match["id"] == "0" and match["guid"] in (None, "0")):
            self.statements.groups["default_pg"] = "default_pg"
            return "default_pg"
        name = match["guid"] if match["guid"] else f"{match['id']} of rank {rank}"
        self.statements.groups[name] = f"{words} (group {name})" if words else f"group {name}"
        return name

    def take_traceback(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """The begin of a traceback."""
        self._close(writer, "")
        writer.is_traceback = True
        self.n_open += 1

    def take_crash(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """A crash of the interpreter, or a signal that a launcher reports."""
        if match[3]:
            rank = next((r for r, pid in self.statements.pids.items() if pid == int(match[5])), writer.rank)
            if rank is not None:
                self._end(rank, 128 + int(match[3]), pid=int(match[5]))
            return
        if match[1]:
            self._close(writer, "")
            writer.is_crash, writer.frames = f"Fatal Python error: {match[1]}"[:80], []
            self.n_open += 1
        elif writer.rank is not None:
            self._end(writer.rank, 139, words="Segmentation fault")

    def take_exit(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """torchrun's line on a worker; its local rank is the rank if there is a single node."""
        pid = int(match[3])
        rank = next((r for r, known in self.statements.pids.items() if known == pid), UNKNOWN)
        if rank == UNKNOWN and match[2] and not re.search(r"_\d+$|node[1-9]", self.file.stem):
            rank = int(match[2])
        self._end(rank, status_of(int(match[1])), pid=pid)

    def take_srun(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """Ends of tasks by Slurm: a task is a rank."""
        how = match["how"]
        code = re.search(r"[Ee]xited with exit code (\d+)", how)
        status = int(code[1]) if code else 137 if re.search(r"Killed|Out Of Memory", how) else 143
        status = 139 if "Segmentation" in how else 134 if "Aborted" in how else status
        words = "out of memory (Slurm)" if "Out Of Memory" in how else ""
        for rank in _numbers(match["tasks"]):
            self._end(rank, status, host=match["host"], words=words)

    def take_mpirun(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """Ends of ranks by mpirun."""
        if match[1]:
            self._end(int(match[1]), 128 + int(match[3]), host=match[2])
        else:
            self._end(int(match[4]), int(match[5]))

    def take_oom(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """The out-of-memory killer of the kernel."""
        pid = int(match[1])
        rank = next((r for r, known in self.statements.pids.items() if known == pid), UNKNOWN)
        words = "killed by the out-of-memory killer"
        self._add(Failure(rank, "machine", words, self.now_ns, (), 137, pid))

    def take_xid(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """An error that the GPU's driver logged."""
        pid = int(match["pid"]) if (match["pid"] or "").isdecimal() else UNKNOWN
        rank = next((r for r, known in self.statements.pids.items() if known == pid), UNKNOWN)
        words = f"Xid {match['xid']} on GPU {match['pci'].removeprefix('PCI:')}{match['words'].replace(', name=', ' ')}"
        self._add(Failure(rank, "machine", words, self.now_ns, (), UNKNOWN, pid))

    def take_barrier(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """monitoredBarrier names the ranks that did not arrive."""
        for rank in _numbers(match[1].replace(" ", "")):
            self._add(Failure(rank, "failure", "did not reach monitoredBarrier", self.now_ns))

    def take_restart(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """A new attempt: the statements of the attempt before are left out."""
        if self.statements.failures or self.statements.progress:
            self.statements.omit(
                "lines of an earlier attempt", len(self.statements.failures) + len(self.statements.progress)
            )
        self.statements.failures.clear()
        self.statements.progress.clear()
        self.statements.members.clear()
        self.statements.pids.clear()
        self.writers.clear()
        self.n_open = 0

    def take_world_size(self, writer: _Writer, match: re.Match[str], line: Line) -> None:
        """The number of ranks of the job."""
        self.statements.world_size = max(self.statements.world_size, int(match[1]))


def _numbers(text: str) -> list[int]:
    """Numbers of a list with ranges: 3,8-15."""
    out: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            out.extend(range(int(first), min(int(last or first), int(first) + 100_000) + 1))
    return out


_TAKERS: tuple[tuple[re.Pattern[str], Callable[[_Reader, _Writer, re.Match[str], Line], None]], ...] = (
    (_TIMEOUT, _Reader.take_timeout),
    (_STATUS, _Reader.take_status),
    (re.compile(r"Traceback \(most recent call last\)"), _Reader.take_traceback),
    (_BARRIER, _Reader.take_barrier),
    (_EXITED, _Reader.take_exit),
    (_SRUN, _Reader.take_srun),
    (_MPIRUN, _Reader.take_mpirun),
    (_XID, _Reader.take_xid),
    (_OOM, _Reader.take_oom),
    (_CRASH, _Reader.take_crash),
    (_RESTART, _Reader.take_restart),
    (_WORLD_SIZE, _Reader.take_world_size),
)
"""Patterns and their methods; the first match applies."""

IMPORTER = Importer(
    "log of a launcher (torchrun, Slurm, Ray, mpirun, kubectl, dmesg)", _accepts, _read, is_general=True
)
