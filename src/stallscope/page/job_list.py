"""The list of jobs: jobs in memory with their verdicts, and jobs with an open verdict that send nothing any more."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from stallscope.page.cells import NO_DATA
from stallscope.page.memory import Job, JobMemory, job_id
from stallscope.page.verdict_state import bounded, is_fault, losses, urgency
from stallscope.serve.tools.verdict_row import stored_verdict

if TYPE_CHECKING:
    from stallscope.store.hub.store import HubStore

_STRIP_N = 60
_STRIP_S = 10
_QUIET_S = 30.0
_FEWEST_ROUNDS = 20
_MOST_JOBS = 500
_MOST_OPEN = 500
_MOST_CLOSED = 8
_ANY: dict[str, Any] = dict.fromkeys(
    ("cluster", "node", "rank", "kind", "severity", "state", "verdict_id", "from_ns", "to_ns")
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Jobs:
    """What the list of jobs is made of.

    confirmed_ns: of a tenant's open incidents, when each was last confirmed. judged: the state of a job without a
    verdict and its reason, where another diagnosis than the continuous diagnosis decides it.
    """

    store: "HubStore"
    memory: JobMemory
    confirmed_ns: Callable[[str], Mapping[str, int]] = field(default=lambda tenant: {})
    now_ns: Callable[[], int] = time.time_ns
    judged: Callable[[Job], tuple[str, str]] | None = None
    _sizes: dict[tuple[str, str], Row] = field(default_factory=dict)

    def rows(self, tenant: str) -> list[Row]:
        """One row for each job, the most urgent first; at most _MOST_JOBS."""
        verdicts = self.verdicts(tenant, state="open")
        confirmed_ns = self.confirmed_ns(tenant)
        by_job: dict[str, list[Row]] = {}
        jobs = {job.id: job for job in self.memory.jobs(tenant)}
        for row in verdicts:
            by_job.setdefault(self.id_of_verdict(tenant, row), []).append(row)
        rows = [self._job_row(job, by_job.pop(job.id, []), confirmed_ns) for job in jobs.values()]
        rows += [self._silent_row(tenant, key, rows, confirmed_ns) for key, rows in by_job.items()]
        return sorted(rows, key=_order)[:_MOST_JOBS]

    def verdicts(self, tenant: str, *, max_rows: int = _MOST_OPEN, **chosen: object) -> list[Row]:
        """The stored verdicts of a tenant that match, open verdicts first, then the newest."""
        params = _ANY | {"max_rows": max_rows} | chosen
        return self.store.ask("found_verdicts", tenant=tenant, params=params).to_pylist()

    def closed(self, tenant: str) -> list[Row]:
        """The newest closed incidents of a tenant."""
        rows = self.verdicts(tenant, state="closed", max_rows=_MOST_CLOSED)
        return [
            {"job": self.id_of_verdict(tenant, row), **bounded(stored_verdict(row)), **losses(row)}
            for row in rows
        ]

    def id_of_verdict(self, tenant: str, row: Mapping[str, Any]) -> str:
        """The id of the job that a verdict is about."""
        cluster = row["cluster_id"] or ""
        if job := self._job_of(tenant, cluster, row):
            return job.id
        return job_id(cluster, row.get("job") or row["comm_hash"] or row["verdict_id"])

    def _job_of(self, tenant: str, cluster: str, row: Mapping[str, Any]) -> Job | None:
        for comm in (row.get("job"), row["comm_hash"]):
            if comm and (job := self.memory.job(tenant, cluster, comm)):
                return job
        nodes, pids = (json.loads(row[name]) if row[name] else [] for name in ("nodes", "pids"))
        for pid in pids:
            for node in nodes:
                if job := self.memory.of_process(tenant, cluster, node, pid):
                    return job
        if row["comm_hash"] or pids:
            return None
        jobs = [job for job in self.memory.jobs(tenant) if job.cluster == cluster]
        return jobs[0] if len(jobs) == 1 else None

    def _job_row(self, job: Job, verdicts: Sequence[Row], confirmed_ns: Mapping[str, int]) -> Row:
        now_ns = self.now_ns()
        with self.memory.reading():
            worst = job.ring.worst(now_ns // 10**9 - _STRIP_N * _STRIP_S, _STRIP_N * _STRIP_S)
            about = _about(job, now_ns)
        return (
            about
            | self._verdict_fields(verdicts, confirmed_ns, self._state_without_verdict(job))
            | {"strip": _strip(worst)}
        )

    def _state_without_verdict(self, job: Job) -> tuple[str, str]:
        """The state of a job without an open verdict, and its reason."""
        if self.judged is not None:
            return self.judged(job)
        if reason := self.store.unexamined.reason(job.tenant, job.cluster):
            return "unknown", reason
        quiet_s = self.now_ns() / 1e9 - job.last_ns / 1e9
        if quiet_s > _QUIET_S:
            return "quiet", f"no rank has sent a round for {quiet_s:,.0f} s"
        if job.last_seq - job.first_seq < _FEWEST_ROUNDS:
            return "unknown", f"fewer than {_FEWEST_ROUNDS} rounds have arrived"
        return "healthy", ""

    def _silent_row(
        self, tenant: str, key: str, verdicts: Sequence[Row], confirmed_ns: Mapping[str, int]
    ) -> Row:
        """The row of a job that is not in memory, from its verdicts and the stored rows."""
        cluster, _, comm = key.rpartition(":")
        if (tenant, key) not in self._sizes:  # the job sends nothing, so its size does not change
            params = {"cluster": cluster, "comm": comm}
            (self._sizes[tenant, key],) = self.store.ask(
                "page_silent_job", tenant=tenant, params=params
            ).to_pylist()
        size = self._sizes[tenant, key]
        nodes = json.loads(verdicts[0]["nodes"] or "[]")
        about = {
            "job": key,
            "cluster": cluster,
            "comm": comm,
            "n_ranks": size["n_ranks"],
            "n_nodes": size["n_nodes"] or len(nodes) or None,
            "op": size["op"],
            "rounds_per_s": None,
            "first_ms": None,
            "last_ms": size["last_ns"] and size["last_ns"] // 10**6,
        }
        return about | self._verdict_fields(verdicts, confirmed_ns, ("unknown", "")) | {"strip": None}

    def _verdict_fields(
        self, verdicts: Sequence[Row], confirmed_ns: Mapping[str, int], otherwise: tuple[str, str]
    ) -> Row:
        ordered = sorted(verdicts, key=lambda row: (urgency(row["kind"]), row["since_ns"] or 0))
        if not ordered:
            return _without_verdict(*otherwise)
        row = ordered[0]
        confirmed = confirmed_ns.get(row["verdict_id"]) or int(row["updated_at"].timestamp() * 1e9)
        return {
            "state": row["kind"],
            "reason": row["abstained_because"] or "",
            "verdict_id": row["verdict_id"],
            "rank": row["rank"],
            "n_ranks_named": len(json.loads(row["ranks"] or "[]")),
            "cause": row["cause"],
            "late_ms": row["late_ms"],
            "since_ms": row["since_ns"] and row["since_ns"] // 10**6,
            "confirmed_ms": confirmed // 10**6,
            "summary": row["summary"],
            **losses(row),
            "others": bounded([other["summary"] for other in ordered[1:]]),
        }


def _without_verdict(state: str, reason: str) -> Row:
    names = (
        "verdict_id",
        "rank",
        "cause",
        "late_ms",
        "since_ms",
        "confirmed_ms",
        "gpus_lost",
        "usd_per_hour",
    )
    return {
        "state": state,
        "reason": reason,
        "summary": "",
        "n_ranks_named": 0,
        "others": [],
    } | dict.fromkeys(names)


def _about(job: Job, now_ns: int) -> Row:
    rate = job.rounds_per_s
    return {
        "job": job.id,
        "cluster": job.cluster,
        "comm": job.comm,
        "n_ranks": max(job.n_ranks, job.ring.n_ranks),
        "n_nodes": len(job.nodes),
        "op": job.op,
        "rounds_per_s": None if rate is None else round(rate, 2),
        "first_ms": job.first_ns // 10**6,
        "last_ms": job.last_ns // 10**6,
    }


def _strip(worst: Any) -> list[int]:
    """The worst lateness in each 10 s, as codes."""
    tens = worst.reshape(_STRIP_N, _STRIP_S)
    known = np.where(tens == NO_DATA, -1, tens.astype(np.int16)).max(axis=1)
    return np.where(known < 0, NO_DATA, known).tolist()


def _order(row: Row) -> tuple[Any, ...]:
    """Faults first, then unknown and quiet jobs; within a kind the largest loss first."""
    state = row["state"]
    group = urgency(state) if row["verdict_id"] else {"unknown": 20, "quiet": 21}.get(state, 22)
    lost = (row["gpus_lost"] or [0, 0])[1]
    return (group, -lost, -(row["late_ms"] or 0), row["cluster"], row["comm"])


def n_faulty(rows: Sequence[Row]) -> int:
    """Jobs that are slowed down or stopped."""
    return sum(1 for row in rows if row["verdict_id"] and is_fault(row["state"]))
