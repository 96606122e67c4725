"""The list of jobs: the jobs of the table with their open verdicts, including jobs that send nothing any more."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from stallscope.events.verdict_fields import KINDS
from stallscope.page.cells import NO_DATA
from stallscope.page.job_cells import JobMemory, job_id
from stallscope.page.tenant_jobs import Job, JobTable
from stallscope.page.verdict_state import LOSSES, bounded, cause_label, losses, urgency
from stallscope.serve.tools.verdict_row import stored_verdict

if TYPE_CHECKING:
    from stallscope.store.hub.store_protocol import Store

_STRIP_N = 60
_STRIP_S = 10
_QUIET_S = 30.0
_LISTED_NS = 900 * 10**9
"""A job without data for this long leaves the list, unless a verdict about it is open."""

_MAX_JOBS = 500
_MAX_OPEN = 500
_MAX_CLOSED = 8
_ANY: dict[str, Any] = dict.fromkeys(
    ("cluster", "node", "rank", "kind", "severity", "state", "verdict_id", "from_ns", "to_ns")
)
_NOT_EXAMINED = {
    "reason": "the diagnosis has not examined this job yet",
    "action": "Wait until the job has made about 20 steps.",
}
_ORDER = ("unknown", "quiet", "recovered", "healthy", "ended")

Row = dict[str, Any]


@dataclass(frozen=True)
class JobState:
    """The state of a job without an open verdict. reasons: why it is unknown, and the actions that would decide."""

    state: str
    reasons: Sequence[Mapping[str, str]] = ()


@dataclass(frozen=True)
class Jobs:
    """The sources of the list of jobs.

    confirmed_ns: of a tenant's open incidents, when each was last confirmed. is_whole_trace: the store holds one trace,
    and evidence covers all of it.
    """

    store: "Store"
    memory: JobMemory
    confirmed_ns: Callable[[str], Mapping[str, int]] = field(default=lambda tenant: {})
    now_ns: Callable[[], int] = time.time_ns
    is_whole_trace: bool = False
    table: JobTable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", JobTable(self.store, self.memory))

    def rows(self, tenant: str) -> list[Row]:
        """One row for each job, the most urgent first; at most _MAX_JOBS."""
        verdicts = self.verdicts(tenant, state="open")
        jobs = self._jobs(tenant, verdicts)
        key_of = _KeyOf(jobs)
        by_key: dict[str, list[Row]] = {}
        for verdict in verdicts:
            by_key.setdefault(key_of(verdict), []).append(verdict)
        confirmed_ns = self.confirmed_ns(tenant)
        rows = [self._job_row(job, by_key.pop(job.key, []), confirmed_ns) for job in jobs]
        rows += [_row_of_verdicts(key, verdicts, confirmed_ns) for key, verdicts in by_key.items()]
        for row in rows:
            row["urgency"] = _urgency(row)
        return sorted(rows, key=_order)[:_MAX_JOBS]

    def verdicts(self, tenant: str, *, max_rows: int = _MAX_OPEN, **chosen: object) -> list[Row]:
        """The stored verdicts of a tenant that match, open verdicts first, then the newest."""
        params = _ANY | {"max_rows": max_rows} | chosen
        return self.store.ask("found_verdicts", tenant=tenant, params=params).to_pylist()

    def closed(self, tenant: str) -> list[Row]:
        """The newest closed incidents of a tenant."""
        rows = self.verdicts(tenant, state="closed", max_rows=_MAX_CLOSED)
        key_of = _KeyOf(self._jobs(tenant, rows))
        return [{**bounded(stored_verdict(row)), **losses(row), "job": key_of(row)} for row in rows]

    def verdicts_of(self, tenant: str, key: str, *, cluster: str, from_ns: int | None) -> list[Row]:
        """The stored verdicts on one job."""
        stored = self.verdicts(tenant, cluster=cluster, from_ns=from_ns, max_rows=_MAX_OPEN)
        job = self.table.job(tenant, key)
        key_of = _KeyOf([job] if job else [])
        return [row for row in stored if key_of(row) == (job.key if job else key)]

    def _jobs(self, tenant: str, verdicts: Iterable[Row]) -> list[Job]:
        also = {name for row in verdicts for name in (row["job"], row["comm_hash"]) if name}
        return self.table.jobs(tenant, since_ns=self.now_ns() - _LISTED_NS, also=sorted(also))

    def _job_row(self, job: Job, verdicts: Sequence[Row], confirmed_ns: Mapping[str, int]) -> Row:
        strip = None
        if job.cells is not None:
            with self.memory.reading():
                first_s = self.now_ns() // 10**9 - _STRIP_N * _STRIP_S
                strip = _strip(job.cells.ring.worst(first_s, _STRIP_N * _STRIP_S))
        state = _of_verdicts(verdicts, confirmed_ns) if verdicts else _of_state(self._state(job))
        return _about(job) | state | {"strip": strip}

    def _state(self, job: Job) -> JobState:
        """The state of a job without an open verdict."""
        if reason := self.store.unexamined.reason(job.tenant, job.cluster):
            action = "See the log of the hub; it may need more processor time."
            return JobState("unknown", ({"reason": reason, "action": action},))
        if job.answer == "inconclusive" or not job.answer:
            return JobState("unknown", job.reasons or (_NOT_EXAMINED,))
        if job.ended_ns is not None:
            return JobState("ended")
        quiet_s = (self.now_ns() - job.latest_ns) / 1e9
        if job.latest_ns and quiet_s > _QUIET_S:
            action = "If the job should run, check its processes and its agents."
            return JobState("quiet", ({"reason": f"no data for {quiet_s:,.0f} s", "action": action},))
        return JobState("recovered" if job.answer == "found" else "healthy")


class _KeyOf:
    """The key of the job that a stored verdict is about: by its job, its communicator, or its processes."""

    def __init__(self, jobs: Sequence[Job]):
        self._jobs = jobs
        self._by_id = {(job.cluster, job.id): job for job in jobs}
        self._by_process: dict[tuple[str, str, int], Job] | None = None

    def __call__(self, verdict: Mapping[str, Any]) -> str:
        cluster = verdict["cluster_id"] or ""
        ids = [name for name in (verdict["job"], verdict["comm_hash"]) if name]
        for name in ids:
            if job := self._by_id.get((cluster, name)):
                return job.key
        if job := self._of_processes(cluster, verdict):
            return job.key
        return job_id(cluster, (ids or [verdict["verdict_id"]])[0])

    def _of_processes(self, cluster: str, verdict: Mapping[str, Any]) -> Job | None:
        nodes, pids = (json.loads(verdict[name] or "[]") for name in ("nodes", "pids"))
        if not pids:
            return None
        if self._by_process is None:
            self._by_process = {
                (job.cluster, node, pid): job for job in self._jobs for node, pid, _ in job.members
            }
        known = (self._by_process.get((cluster, node, pid)) for pid in pids for node in nodes)
        return next(filter(None, known), None)


def _row_of_verdicts(key: str, verdicts: Sequence[Row], confirmed_ns: Mapping[str, int]) -> Row:
    """The row of a job that the table does not contain: of an earlier release."""
    cluster, _, name = key.rpartition(":")
    return {
        "job": key,
        "cluster": cluster,
        "id": name,
        "n_ranks": None,
        "n_nodes": len(json.loads(verdicts[0]["nodes"] or "[]")) or None,
        **dict.fromkeys(("op", "rounds_per_s", "first_ms", "last_ms", "ended_ms")),
        "owner": {},
        **_of_verdicts(verdicts, confirmed_ns),
        "strip": None,
    }


def _of_verdicts(verdicts: Sequence[Row], confirmed_ns: Mapping[str, int]) -> Row:
    """The fields of a row that follow from open verdicts: of the most urgent of them."""
    ordered = sorted(verdicts, key=lambda row: (urgency(row["kind"]), row["since_ns"] or 0))
    row = ordered[0]
    confirmed = confirmed_ns.get(row["verdict_id"]) or int(row["updated_at"].timestamp() * 1e9)
    advice = " ".join(json.loads(row["advice"] or "[]"))
    because = row["abstained_because"]
    return {
        "state": row["kind"],
        "reasons": [{"reason": because, "action": advice}] if because else [],
        "verdict_id": row["verdict_id"],
        "rank": row["rank"],
        "n_ranks_named": len(json.loads(row["ranks"] or "[]")),
        "cause": row["cause"],
        "cause_label": cause_label(row["cause"]),
        "late_ms": row["late_ms"],
        "since_ms": row["since_ns"] and row["since_ns"] // 10**6,
        "confirmed_ms": confirmed // 10**6,
        "summary": row["summary"],
        **losses(row),
        "others": bounded([other["summary"] for other in ordered[1:]]),
    }


def _of_state(state: JobState) -> Row:
    """The same fields for a job without an open verdict."""
    names = ("verdict_id", "rank", "cause", "cause_label", "late_ms", "since_ms", "confirmed_ms", *LOSSES)
    return {
        "state": state.state,
        "reasons": bounded([dict(reason) for reason in state.reasons]),
        "summary": "",
        "n_ranks_named": 0,
        "others": [],
        **dict.fromkeys(names),
    }


def _about(job: Job) -> Row:
    rate = job.cells.rounds_per_s if job.cells else None
    return {
        "job": job.key,
        "cluster": job.cluster,
        "id": job.id,
        "n_ranks": job.n_ranks,
        "n_nodes": len(job.nodes),
        "op": job.cells.op if job.cells else None,
        "rounds_per_s": None if rate is None else round(rate, 2),
        "first_ms": _ms(job.begin_ns),
        "last_ms": _ms(job.latest_ns),
        "ended_ms": _ms(job.ended_ns),
        "owner": dict(job.owner),
    }


def _ms(ns: int | None) -> int | None:
    return ns // 10**6 if ns else None


def _strip(worst: Any) -> list[int]:
    """The worst lateness in each 10 s, as codes."""
    tens = worst.reshape(_STRIP_N, _STRIP_S)
    known = np.where(tens == NO_DATA, -1, tens.astype(np.int16)).max(axis=1)
    return np.where(known < 0, NO_DATA, known).tolist()


def _order(row: Row) -> tuple[Any, ...]:
    """Faults first, then jobs without an answer, then the others; within a kind the largest loss first."""
    lost = (row["gpus_lost"] or [0, 0])[1]
    return (row["urgency"], -lost, -(row["late_ms"] or 0), row["cluster"], row["id"])


def _urgency(row: Row) -> int:
    """The position of a row's state: the most urgent first."""
    return urgency(row["state"]) if row["verdict_id"] else len(KINDS) + 1 + _ORDER.index(row["state"])
