"""Lines of Slurm and of MPI launchers on the ends of tasks and jobs.

The phrases are from srun and slurmstepd (23.11), Open MPI 4 and 5 (help-orte-launcher.txt, help-prte-runtime.txt) and
Hydra (MPICH 4, Intel MPI 2021).
"""

import re

from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Gap
from stallscope.importers.log_lines import Line
from stallscope.importers.log_state import LogState, Writer
from stallscope.importers.rank_statements import Failure

SRUN = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,\-]+): (?P<how>.+)$")
NODE_FAILURE = re.compile(r"srun: error: Node failure on (?P<host>\S+)")
CANCELLED = re.compile(
    r"slurmstepd: error: \*\*\* (?:JOB|STEP) \S+ .*CANCELLED AT \S+ DUE TO (?P<why>[A-Z ]+)"
)
MPIRUN = re.compile(
    r"process rank (\d+) .*?on node (\S+) exited on signal (\d+)|process rank (\d+) .*exit code (\d+)"
)
TASK = re.compile(
    r"Process name: \[\[\d+,\d+\],(?P<rank>\d+)\]|RANK (?P<task>\d+) PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)"
)
TASK_STATUS = re.compile(
    r"^\s*=?\s*(?:[Ee]xit [Cc]ode|EXIT (?:CODE|STATUS)|(?P<by>KILLED BY SIGNAL))\s*: *(?P<n>\d+)"
)


def take_srun(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """Ends of tasks by Slurm: a task is a rank."""
    how = match["how"]
    code = re.search(r"[Ee]xited with exit code (\d+)", how)
    status = int(code[1]) if code else 137 if re.search(r"Killed|Out Of Memory", how) else 143
    status = 139 if "Segmentation" in how else 134 if "Aborted" in how else status
    words = "out of memory (Slurm)" if "Out Of Memory" in how else ""
    for rank in numbers_of(match["tasks"]):
        log.end_rank(rank, status, host=match["host"], words=words)


def take_mpirun(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """Ends of ranks by mpirun."""
    if match[1]:
        log.end_rank(int(match[1]), 128 + int(match[3]), host=match[2])
    else:
        log.end_rank(int(match[4]), int(match[5]))


def take_node_failure(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """A node that Slurm lost."""
    host = match["host"]
    words = f"node failure of {host} (Slurm)"
    log.statements.add_failure(Failure(UNKNOWN, "machine", words, log.now_ns, (), host=host))


def take_cancelled(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The end of a job by Slurm, which may follow a hang."""
    why = match["why"].strip().lower()
    gap = Gap(
        f"Slurm ended the job ({why}), and the logs state no failure before that",
        "Also give the dumps of the flight recorder or the stacks of all ranks, if the job made no progress.",
    )
    if gap not in log.statements.gaps:
        log.statements.gaps.append(gap)


def take_task(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The task of MPI on whose end the next lines report."""
    writer.task = int(match["rank"] or match["task"]), int(match["pid"] or UNKNOWN), match["host"] or ""


def take_task_status(log: LogState, writer: Writer, match: re.Match[str], line: Line) -> None:
    """The exit status of the task that an earlier line names."""
    if writer.task is not None:
        rank, pid, host = writer.task
        writer.task = None
        log.end_rank(rank, int(match["n"]) + (128 if match["by"] else 0), pid=pid, host=host)


def numbers_of(text: str) -> list[int]:
    """Numbers of a list with ranges: 3,8-15."""
    out: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            out.extend(range(int(first), min(int(last or first), int(first) + 100_000) + 1))
    return out
