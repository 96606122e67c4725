"""Lines on the ends of processes: summaries of torchrun, Slurm and mpirun, kills by the kernel, errors of the GPU.

The phrases are from torch/distributed/elastic/multiprocessing/errors (2.0 to 2.11), srun and slurmstepd (23.11), the
kernel (oom_kill.c) and the NVIDIA driver (NVRM: Xid).
"""

import re

from stallscope.events.layout import UNKNOWN
from stallscope.importers.log_failures import status_of
from stallscope.importers.log_lines import Line, parse
from stallscope.importers.log_state import LogState, Writer
from stallscope.importers.rank_statements import Failure

_SUMMARY = re.compile(r"^\s*(time|host|rank|exitcode|error_file|traceback)\s*: (.*)$")
EXITED = re.compile(r"failed \(exitcode: (-?\d+)\) (?:local_rank: (\d+) )?\(pid: (\d+)\)")
SRUN = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<how>.+)$")
MPIRUN = re.compile(
    r"process rank (\d+) .*?on node (\S+) exited on signal (\d+)|process rank (\d+) .*exit code (\d+)"
)
OOM = re.compile(r"(?:Killed process|oom-kill:.*pid=) ?(\d+)")
XID = re.compile(
    r"NVRM: Xid \((?P<pci>[^)]*)\): (?P<xid>\d+)(?:, pid='?(?P<pid>\d+|<unknown>)'?)?(?P<words>.*)"
)
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


def take_srun(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """Ends of tasks by Slurm: a task is a rank."""
    how = match["how"]
    code = re.search(r"[Ee]xited with exit code (\d+)", how)
    status = int(code[1]) if code else 137 if re.search(r"Killed|Out Of Memory", how) else 143
    status = 139 if "Segmentation" in how else 134 if "Aborted" in how else status
    words = "out of memory (Slurm)" if "Out Of Memory" in how else ""
    for rank in _numbers(match["tasks"]):
        log.end_rank(rank, status, host=match["host"], words=words)


def take_mpirun(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """Ends of ranks by mpirun."""
    if match[1]:
        log.end_rank(int(match[1]), 128 + int(match[3]), host=match[2])
    else:
        log.end_rank(int(match[4]), int(match[5]))


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
    words = f"Xid {match['xid']} on GPU {match['pci'].removeprefix('PCI:')}{match['words'].replace(', name=', ' ')}"
    log.statements.add_failure(Failure(rank, "machine", words, log.now_ns, (), UNKNOWN, pid))


def take_barrier(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """monitoredBarrier names the ranks that did not arrive."""
    for rank in _numbers(match[1].replace(" ", "")):
        log.statements.add_failure(Failure(rank, "failure", "did not reach monitoredBarrier", log.now_ns))


def _numbers(text: str) -> list[int]:
    """Numbers of a list with ranges: 3,8-15."""
    out: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            out.extend(range(int(first), min(int(last or first), int(first) + 100_000) + 1))
    return out
