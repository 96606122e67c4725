"""The jobs of a trace and the verdicts of its report as rows of the hub: as the continuous diagnosis writes them."""

import hashlib
import time
from collections.abc import Mapping, Sequence

import numpy as np

from stallscope.continuous.verdict_rows import job_row, stored_row, table_of
from stallscope.dashboard.trace_rows import TENANT, call_times, last_ns, node_name, processes_rows
from stallscope.diagnose import Answer, Change, JobState, Member, Report, Verdict, common_owner, owners_of
from stallscope.diagnose.timeline import parts
from stallscope.events.trace import Trace
from stallscope.store.hub import schema
from stallscope.store.hub.store import Batch


def report_batch(
    trace: Trace, report: Report, cluster: str, *, is_over: bool, before: Sequence[Verdict] = ()
) -> Batch:
    """The jobs of a trace, and the verdicts of its report as open verdicts.

    is_over: the trace does not grow. before: the verdicts of the report before; the verdicts that are gone are closed.
    """
    jobs = _job_states(trace, report, is_over=is_over)
    at_ns = last_ns(trace)
    of_process = {(member.node, member.pid): job.id for job in jobs for member in job.members}
    open_ids = {_id(verdict) for verdict in report.verdicts}
    changes = [
        Change("closed", _id(verdict), verdict, at_ns, job=_job_of(verdict, of_process))
        for verdict in before
        if _id(verdict) not in open_ids
    ]
    changes += [
        Change("opened", _id(verdict), verdict, at_ns, job=_job_of(verdict, of_process))
        for verdict in report.verdicts
    ]
    at_us = at_ns // 1000
    verdicts = [stored_row(change, cluster, opened_us=at_us, now_us=at_us) for change in changes]
    now_us = time.time_ns() // 1000
    rows = [job_row(job, cluster) | {"updated_at": now_us} for job in jobs]
    return Batch(
        "", TENANT, {"jobs": table_of(schema.JOBS, rows), "verdicts": table_of(schema.VERDICTS, verdicts)}
    )


def _job_states(trace: Trace, report: Report, *, is_over: bool) -> list[JobState]:
    """The jobs of a trace with the answer of its report, as the continuous diagnosis states them."""
    jobs = [_job_state(part, report, is_over=is_over) for part in parts(trace)]
    return [job for job in jobs if job.members]


def _job_state(trace: Trace, report: Report, *, is_over: bool) -> JobState:
    ranks = trace.launcher_ranks()
    members = tuple(
        Member(node_name(trace, node), pid, ranks.get((node, pid)))
        for node, pid in np.unique(processes_rows(trace)[["node", "pid"]]).tolist()
    )
    named = [verdict for verdict in report.verdicts if is_of(verdict, members)]
    times = call_times(trace)
    last = max(times, default=None)
    return JobState(
        id=_largest_communicator(trace) or _first_process(members),
        members=members,
        begin_ns=min(times, default=None),
        last_ns=last,
        ended_ns=last if is_over else None,
        answer=_answer(named, report),
        evidence=report.evidence,
        reasons=() if named else report.gaps,
        owner=common_owner(owners_of(trace).values()),
    )


def _answer(verdicts: Sequence[Verdict], report: Report) -> Answer:
    if any(verdict.kind != "inconclusive" for verdict in verdicts):
        return Answer.FOUND
    return Answer.INCONCLUSIVE if verdicts or report.gaps else Answer.HEALTHY


def is_of(verdict: Verdict, members: Sequence[Member]) -> bool:
    """Whether a verdict is about a job; a verdict that names no process is about each."""
    named = _processes_of(verdict)
    return not named or not named.isdisjoint((member.node, member.pid) for member in members)


def _processes_of(verdict: Verdict) -> set[tuple[str, int]]:
    """The processes that a verdict may name: its pids on each of its nodes."""
    return {(node, pid) for node in verdict.nodes for pid in verdict.pids}


def _job_of(verdict: Verdict, of_process: Mapping[tuple[str, int], str]) -> str:
    ids = [of_process[process] for process in _processes_of(verdict) & of_process.keys()]
    return min(ids or of_process.values(), default="")


def _first_process(members: Sequence[Member]) -> str:
    return f"{members[0].node}/{members[0].pid}" if members else ""


def _largest_communicator(trace: Trace) -> str:
    """The communicator with the most ranks, of several the smallest hash; "" if none has a known identity."""
    pairs = np.unique(
        trace.collectives[trace.collectives["comm_hash"] != 0][["nranks", "comm_hash"]]
    ).tolist()
    return f"{min((-n_ranks, comm) for n_ranks, comm in pairs)[1]:016x}" if pairs else ""


def _id(verdict: Verdict) -> str:
    """The id of a verdict: equal when the trace is read again."""
    key = repr((verdict.kind, verdict.ranks, verdict.comm_hash, verdict.since_ns))
    return hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
