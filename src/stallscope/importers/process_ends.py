"""Lines on the ends of processes: summaries of torchrun and DeepSpeed, kills by the kernel, errors of the GPU.

The phrases are from torch/distributed/elastic/multiprocessing/errors (2.0 to 2.11), torch/multiprocessing/spawn.py,
deepspeed/launcher/launch.py (0.17), the kernel (oom_kill.c) and the NVIDIA driver (NVRM: Xid). See scheduler_ends for
Slurm and MPI.
"""

import re
import signal

from stallscope.events.layout import UNKNOWN
from stallscope.importers.log_failures import status_of
from stallscope.importers.log_lines import Line, parse
from stallscope.importers.log_state import LogState, Writer
from stallscope.importers.rank_statements import Failure
from stallscope.importers.scheduler_ends import numbers_of

_SUMMARY = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*: (.*)$")
EXITED = re.compile(r"failed \(exitcode: (-?\d+)\) (?:local_rank: (\d+) )?\(pid: (\d+)\)")
OOM = re.compile(r"(?:Killed process|oom-kill:.*pid=) ?(\d+)")
XID = re.compile(
    r"NVRM: Xid \((?P<pci>[^)]*)\): (?P<xid>\d+)(?:, pid='?(?P<pid>\d+|<unknown>)'?)?(?P<words>.*)"
)
DEEPSPEED = re.compile(
    r"sigkill_handler\] \[.*'--local_rank=(?P<rank>\d+)'.*\] exits with return code = (?P<code>-?\d+)"
)
SPAWNED = re.compile(r"-- Process (\d+) terminated with the following error")
SPAWN_EXIT = re.compile(r"rocess (\d+) terminated with (?:signal (SIG\w+)|exit code (\d+))")
BARRIER = re.compile(r"[Rr]anks? ([\d, ]+) failed to pass monitoredBarrier")
CRASH = re.compile(
    r"Fatal Python error: (.+)|(Segmentation fault)|Signal (\d+) \((SIG\w+)\) received by PID (\d+)"
)


def take_summary(log: LogState, writer: Writer, text: str) -> bool:
    """A field of torchrun's list of failures. An entry ends with its traceback."""
    if "Root Cause (first observed failure)" in text:
        writer.is_root_cause = True
    if not (match := _SUMMARY.match(text)):
        return False
    writer.summary[match[1]] = match[2]
    if match[1] == "traceback" and "exitcode" in writer.summary:
        _add_summary(log, writer.summary)
        writer.summary = {}
        if writer.is_root_cause:  # the last entry of a launcher
            writer.is_root_cause = False
            log.begin_part()
    return True


def _add_summary(log: LogState, summary: dict[str, str]) -> None:
    rank, code = (
        re.match(r"(\d+)", summary.get("rank", "")),
        re.match(r"(-?\d+) +\(pid: (\d+)\)", summary["exitcode"]),
    )
    if not rank or not code:
        return
    stated = Line("", None, "", 0)
    if time := re.match(r"(\d{4}-\d\d-\d\d)_(\d\d:\d\d:\d\d)", summary.get("time", "")):
        stated = parse(f"{time[1]} {time[2]} x", has_labels=False)
    log.end_rank(
        int(rank[1]),
        status_of(int(code[1])),
        pid=int(code[2]),
        host=summary.get("host", ""),
        ts_ns=stated.ts_ns,
    )


def take_crash(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """A crash of the interpreter, or a signal that a launcher reports."""
    if match[3]:
        by_pid = log.rank_of(int(match[5]))
        rank = by_pid if by_pid != UNKNOWN else writer.rank
        if rank is not None:
            log.end_rank(rank, 128 + int(match[3]), pid=int(match[5]))
        return
    if match[1]:
        log.close(writer, "")
        writer.is_crash, writer.frames = f"Fatal Python error: {match[1]}"[:80], []
    elif writer.rank is not None:
        log.end_rank(writer.rank, 139, words="Segmentation fault")


def take_exit(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """torchrun's line on a worker; its local rank is the rank if there is a single node."""
    pid = int(match[3])
    rank = log.rank_of(pid)
    is_exact = rank != UNKNOWN
    if not is_exact and match[2] and not re.search(r"_\d+$|node[1-9]", log.file.stem):
        rank = int(match[2])
    log.end_rank(rank, status_of(int(match[1])), pid=pid, is_exact=is_exact)


def take_deepspeed(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The end of a process by DeepSpeed's launcher; its local rank is the rank if there is a single node."""
    rank = int(match["rank"]) if not line.source else UNKNOWN
    log.end_rank(rank, status_of(int(match["code"])), is_exact=False)


def take_spawned(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The traceback of a process of torch.multiprocessing.spawn follows, in the log of its parent."""
    log.close(writer, "")
    writer.rank = int(match[1])


def take_spawn_exit(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The end of a process of torch.multiprocessing.spawn."""
    signal_number = getattr(signal, match[2], UNKNOWN) if match[2] else UNKNOWN
    status = int(match[3]) if match[3] else 128 + int(signal_number)
    log.end_rank(int(match[1]), status, is_exact=False)


def take_oom(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The out-of-memory killer of the kernel."""
    pid = int(match[1])
    rank = log.rank_of(pid)
    words = "killed by the out-of-memory killer"
    log.statements.add_failure(Failure(rank, "machine", words, log.now_ns, (), 137, pid))


def take_xid(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """An error that the GPU's driver logged."""
    pid = int(match["pid"]) if (match["pid"] or "").isdecimal() else UNKNOWN
    rank = log.rank_of(pid)
    words = match["words"].replace(", name=<unknown>", "").replace(", name=", " ")
    words = f"Xid {match['xid']} on GPU {match['pci'].removeprefix('PCI:')}{words}"
    log.statements.add_failure(Failure(rank, "machine", words, log.now_ns, (), UNKNOWN, pid))


def take_barrier(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """monitoredBarrier names the ranks that did not arrive."""
    for rank in numbers_of(match[1].replace(" ", "")):
        log.statements.add_failure(Failure(rank, "failure", "did not reach monitoredBarrier", log.now_ns))
