"""The processes of the ranks that a verdict names. Within one job a rank has one process at a time."""

from dataclasses import replace

from stallscope.diagnose.report.verdict import Verdict
from stallscope.events.trace import Trace


def with_pids(trace: Trace, verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts on one job with the pid of each named rank; none where the trace does not show them all.

    trace: the rows of this job. Ranks are the launcher's, otherwise the ranks in the largest communicator.
    """
    if not any(verdict.ranks and not verdict.pids for verdict in verdicts):
        return verdicts
    pid_of = _pid_of(trace)
    return [
        replace(verdict, pids=[pid_of[rank] for rank in verdict.ranks])
        if verdict.ranks and not verdict.pids and all(rank in pid_of for rank in verdict.ranks)
        else verdict
        for verdict in verdicts
    ]


def _pid_of(trace: Trace) -> dict[int, int]:
    """The newest process of each rank."""
    rows = trace.communicators[trace.communicators["comm_rank"] >= 0]
    by_rank = dict(rows[rows["nranks"].argsort(kind="stable")][["comm_rank", "pid"]].tolist())
    known = trace.processes[trace.processes["rank"] >= 0]
    return by_rank | dict(known[known["ts_ns"].argsort(kind="stable")][["rank", "pid"]].tolist())
