"""Stacks of all ranks, dumped from outside: py-spy (text, JSON), faulthandler, gdb and cuda-gdb; one file per rank.

The phrases are from py-spy dump (src/dump.rs, 0.3 to 0.4), faulthandler (Python/traceback.c, 3.9 to 3.14), gdb's
`thread apply all bt` and cuda-gdb's `info cuda kernels`. A kernel counts as a stack of one frame. The rank is the
number in the file's name, in the process's environment or in its command line. Otherwise ranks follow the order of the
process ids on a host. A file may hold several processes.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from stallscope.events.trace import Gap
from stallscope.importers.file_ranks import named_rank, ranks_in_name
from stallscope.importers.rank_statements import Statements
from stallscope.importers.registry import Importer
from stallscope.importers.texts import has_last_line, head_of, lines_of, text_of

_PYSPY_PROCESS = re.compile(r"^Process (\d+): (.*)$")
_PYSPY_THREAD = re.compile(r'^Thread (?:0x)?([0-9A-Fa-f]+) \((\S+?)\)(?:: "([^"]*)")?$')
_PYSPY_FRAME = re.compile(r"^    (?P<name>.+?) \((?P<file>[^()]*?)(?::(?P<line>\d+))?\)$")
_FAULT_THREAD = re.compile(
    r"^(?P<current>Current t|T)hread 0x[0-9a-f]+ (?:\[[^\]]*\] )?\(most recent call first\):"
)
_FAULT_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')
_GDB_THREAD = re.compile(r"^Thread (\d+) \((?:Thread 0x[0-9a-f]+ )?\(?LWP (\d+)\)?.*\):")
_GDB_FRAME = re.compile(
    r"^#(\d+) +(?:0x[0-9a-f]+ in )?(?P<name>[^ (]+(?:<.*?>)?) ?\(.*?\)"
    r"(?: at (?P<file>[^:]+):(?P<line>\d+))?(?: from (?P<lib>\S+))?"
)
_GDB_PROCESS = re.compile(r"^(?:\[New LWP|Attaching to (?:program|process)[^\d]*(\d+)|.*process (\d+))")
_CUDA_KERNELS = re.compile(r"^ *Kernel +Parent +Dev +Grid +Status|^No CUDA kernels|info cuda kernels")
_CUDA_KERNEL = re.compile(
    r"^[* ] *\d+ +\S+ +\d+ +\d+ +\w+ .*\(\d+,\d+,\d+\) +\(\d+,\d+,\d+\) +(?P<name>[^\s(]+)"
)
_COMMAND_RANK = re.compile(r"(?:--rank[= ]|--global[-_]rank[= ]|\bRANK=)(\d{1,7})\b")
_LOCAL_RANK = re.compile(r"(?:--local[-_]rank[= ]|LOCAL_RANK=)(\d{1,7})\b")
_MAX_BYTES = 64 << 20
_SEVERAL = Gap(
    "several processes have the same rank: the stacks come from several jobs or attempts",
    "Give the stacks of one attempt, with the rank in each file's name.",
)
_MAIN = ("MainThread", "main")
_FIRST_FUNCTION = re.compile(
    r"<module>|_bootstrap\b|^(?:_start|main|__libc_start_\w+|start_thread|_*clone3?) |GPU\)$"
)


def _accepts(file: Path, head: bytes) -> bool:
    if _is_json(head):
        return True
    text = head.decode("utf-8", "replace")
    return _kind(text) is not None


def _is_json(head: bytes) -> bool:
    return head.lstrip()[:1] in (b"[", b"{") and b'"thread_id"' in head and b'"frames"' in head


def _kind(text: str) -> str | None:
    """The tool that wrote a dump."""
    lines = text.splitlines()[:4000]
    if any(_PYSPY_THREAD.match(line) for line in lines) and any(_PYSPY_FRAME.match(line) for line in lines):
        return "py-spy"
    if (
        any(_GDB_THREAD.match(line) for line in lines)
        or sum(bool(_GDB_FRAME.match(line)) for line in lines) >= 3
    ):
        return "gdb"
    if any(_CUDA_KERNELS.search(line) for line in lines):
        return "cuda-gdb"
    has_traceback = any("Traceback (most recent call last)" in line for line in lines)
    if any(_FAULT_THREAD.match(line) for line in lines) and not has_traceback:
        return "faulthandler"
    return None


@dataclass
class _Process:
    """One process of a dump. threads: name and frames, innermost first. has_main: one of them is the main thread."""

    pid: int = 0
    command: str = ""
    has_main: bool = False
    threads: list[tuple[str, list[str]]] = field(default_factory=list)

    def is_complete(self) -> bool:
        """Whether the last stack reaches the first function of its thread."""
        return bool(self.threads and self.threads[-1][1] and _FIRST_FUNCTION.search(self.threads[-1][1][-1]))

    def in_order(self) -> list[list[str]]:
        """The stacks, main thread first; threads without frames are left out."""
        named = [(name, frames) for name, frames in self.threads if frames]
        main = [frames for name, frames in named if name in _MAIN]
        if self.has_main and not main:
            return []
        return [*main[:1], *(frames for _, frames in named if not main or frames is not main[0])]


def collect(files: Iterable[Path], statements: Statements) -> None:
    """Add the stacks of some dumps."""
    dumps: list[tuple[Path, _Process]] = []
    for file in files:
        processes = [process for process in _processes(file) if process.in_order()]
        dumps += [(file, process) for process in processes]
        if not processes:
            statements.omit("stack dumps without a frame")
    ranks = _ranks(dumps)
    newest: dict[int, _Process] = {}
    are_several = False
    for (_, process), rank in zip(dumps, ranks, strict=True):
        known = newest.get(rank, process)
        are_several |= known.pid != process.pid or (
            not known.pid and known.in_order()[0] != process.in_order()[0]
        )
        newest[rank] = process
    statements.writers |= set(newest)
    if are_several:
        statements.gaps.append(_SEVERAL)
        newest = {}
    for rank, process in newest.items():
        if process.pid:
            statements.pids.setdefault(rank, process.pid)
        for stack in process.in_order():
            statements.add_stack(rank, stack)
    statements.sources.append(f"stacks of {len(set(ranks))} rank{'s' * (len(set(ranks)) != 1)}")
    if len(set(ranks)) < 2 and not are_several:
        statements.gaps.append(
            Gap(
                "stacks of one rank only cannot show which rank differs",
                "Dump the stacks of all ranks at one time.",
            )
        )


def _ranks(dumps: list[tuple[Path, _Process]]) -> list[int]:
    """The rank of each process: from its command line or file if these are unique, otherwise by order."""
    by_command = [_COMMAND_RANK.search(process.command) for _, process in dumps]
    stated = [
        int(match[1]) if match else named_rank(file)
        for match, (file, _) in zip(by_command, dumps, strict=True)
    ]
    ranks = [rank for rank in stated if rank is not None]
    if len(ranks) == len(dumps) and _are_distinct(ranks):
        return ranks
    numbered = [ranks_in_name(file)[:1] for file, _ in dumps]
    small = [numbers[0] for numbers in numbered if numbers]
    if len(small) == len(dumps) and _are_distinct(small) and max(small) < 4 * len(small):
        return small
    local = [_LOCAL_RANK.search(process.command) for _, process in dumps]
    numbers = [int(match[1]) for match in local if match]
    if len(numbers) == len(dumps) and len(set(numbers)) == len(numbers):
        return numbers
    order = sorted(range(len(dumps)), key=lambda i: (str(dumps[i][0].parent), dumps[i][1].pid, i))
    out = [0] * len(dumps)
    for rank, i in enumerate(order):
        out[i] = rank
    return out


def _are_distinct(ranks: list[int]) -> bool:
    """Whether each process has a rank of its own, or all ranks have several dumps; not one number for all processes."""
    return len(set(ranks)) == len(ranks) or len(set(ranks)) > 1


def _processes(file: Path) -> Iterator[_Process]:
    """The processes of one file."""
    head = head_of(file)
    if _is_json(head):
        yield from _json_processes(text_of(file, _MAX_BYTES))
        return
    kind = _kind(head.decode("utf-8", "replace"))
    parse = {"py-spy": _pyspy, "gdb": _gdb, "faulthandler": _faulthandler, "cuda-gdb": _cuda_gdb}.get(
        kind or ""
    )
    if parse:
        *complete, last = parse(lines_of(file))
        yield from complete
        if has_last_line(file) or last.is_complete():
            yield last
        else:
            del last.threads[-1:]
            yield last


def _json_processes(text: str) -> Iterator[_Process]:
    """py-spy dump --json: a list of threads."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    process = _Process()
    for thread in value if isinstance(value, list) else value.get("threads", []):
        if not isinstance(thread, dict) or not isinstance(thread.get("frames"), list):
            continue
        frames = [
            _frame(str(f.get("name")), str(f.get("filename") or f.get("short_filename")), f.get("line"))
            for f in thread["frames"]
            if isinstance(f, dict)
        ]
        process.threads.append((str(thread.get("thread_name") or ""), frames))
        process.pid = thread["pid"] if isinstance(thread.get("pid"), int) else process.pid
        info = thread.get("process_info")
        if isinstance(info, dict):
            process.command = str(info.get("command_line", ""))
    yield process


def _frame(name: str, file: str, line: object) -> str:
    """A frame in the words of a trace: Python's as "file:line name", native ones as "name (file)"."""
    if file.endswith(".py") or file.startswith("<") or (".so" not in file and line):
        return f"{file}:{line or '?'} {name}"
    return f"{name} ({file.rpartition('/')[2]})"


def _pyspy(lines: Iterable[str]) -> Iterator[_Process]:
    process = _Process()
    for line in lines:
        if match := _PYSPY_PROCESS.match(line):
            if process.threads:
                yield process
            process = _Process(int(match[1]), match[2])
        elif match := _PYSPY_THREAD.match(line):
            process.threads.append((match[3] or "", []))
        elif process.threads and (match := _PYSPY_FRAME.match(line)):
            process.threads[-1][1].append(_frame(match["name"], match["file"], match["line"]))
    yield process


def _faulthandler(lines: Iterable[str]) -> Iterator[_Process]:
    """The main thread is written last, unless one thread is current."""
    process = _Process()
    for line in lines:
        if match := _FAULT_THREAD.match(line):
            process.threads.append(("MainThread" if match["current"] == "Current t" else "", []))
        elif process.threads and (match := _FAULT_FRAME.match(line)):
            process.threads[-1][1].append(f"{match['file']}:{match['line']} {match['name']}")
    if process.threads and not any(name for name, _ in process.threads):
        process.threads[-1] = ("MainThread", process.threads[-1][1])
    process.has_main = True
    yield process


def _gdb(lines: Iterable[str]) -> Iterator[_Process]:
    """Thread 1 is the main thread. Frames of one thread in order; a second frame 0 begins another process."""
    process = _Process()
    name = ""
    for line in lines:
        if (match := _GDB_THREAD.match(line)) is not None:
            name = "MainThread" if match[1] == "1" else f"Thread {match[1]}"
            if name == "MainThread" and any(known == name for known, _ in process.threads):
                yield process
                process = _Process()
            process.threads.append((name, []))
            process.has_main = True
            if name == "MainThread":
                process.pid = int(match[2])
        elif (match := _GDB_FRAME.match(line)) is not None:
            if not process.threads or (match[1] == "0" and process.threads[-1][1] and not name):
                process.threads.append(("", []))
            where = match["file"] or (match["lib"] or "").rpartition("/")[2]
            text = (
                f"{match['file']}:{match['line']} {match['name']}"
                if match["line"]
                else f"{match['name']} ({where or '?'})"
            )
            process.threads[-1][1].append(text)
    yield process


def _cuda_gdb(lines: Iterable[str]) -> Iterator[_Process]:
    """The running kernels of each process; a process without a kernel is in its own code."""
    process = _Process(has_main=True)
    for line in lines:
        if _CUDA_KERNELS.search(line) and process.threads and "No CUDA kernels" not in line:
            yield process
            process = _Process(has_main=True)
        if match := _CUDA_KERNEL.match(line):
            process.threads.append(("MainThread", [f"{match['name']} (GPU kernel)"]))
        elif line.startswith("No CUDA kernels"):
            process.threads.append(("MainThread", ["no kernel (GPU)"]))
        elif (match := _GDB_PROCESS.match(line)) and (match[1] or match[2]):
            process.pid = int(match[1] or match[2])
    yield process


IMPORTER = Importer("stacks of ranks (py-spy, faulthandler, gdb)", _accepts, collect=collect)
