"""The evidence next to a verdict: time ledgers, longest intervals, stacks, budget of the job, its earlier incidents."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stallscope.diagnose import LABELS, Thresholds, budget
from stallscope.events.names import CATEGORY_NAMES
from stallscope.page.cell_ring import SECONDS
from stallscope.page.cells import NO_DATA, codes
from stallscope.page.job_list import Jobs
from stallscope.page.matrix import matrix
from stallscope.page.round_details import late_step
from stallscope.page.tenant_jobs import Job
from stallscope.page.verdict_state import shown
from stallscope.serve.sql.values import clean, plain
from stallscope.serve.tools.explain_rank import ledger_rows

if TYPE_CHECKING:
    from stallscope.store.hub.store_protocol import Store

_MAX_INCIDENTS = 20
_MAX_LONGEST = 5
_MAX_STACKS = 40
_MAX_FRAMES = 24
_MAX_LEDGER_ROWS = 1_000_000
"""Rows of a mean ledger: a job that sends more gets the mean of its latest rounds."""

_S_NS = 10**9
_OCTAVE = 16
_MAX_ATTEMPTS = 3
"""Late rounds without a round before them, as the first round of a job, have no step."""

_MIN_SHARE = 0.001
_MAX_EVENTS = 400

Row = dict[str, Any]
Window = Mapping[str, int | None]


def overview(jobs: Jobs, tenant: str, key: str, *, from_ns: int | None = None) -> Row:
    """The row of a job, its verdict with bounded lists, and its incidents, the newest first.

    from_ns: of the incidents. The verdict is the open verdict, or the newest of the incidents.
    """
    job = jobs.table.job(tenant, key)
    key = job.key if job else key
    row = next((row for row in jobs.rows(tenant) if row["job"] == key), None)
    cluster = job.cluster if job else key.rpartition(":")[0]
    own = jobs.verdicts_of(tenant, key, cluster=cluster, from_ns=from_ns)
    verdict = next((each for each in own if row and each["verdict_id"] == row["verdict_id"]), None)
    return {
        "job": row,
        "verdict": plain(shown(verdict)) if verdict else None,
        "incidents": [_incident(each) for each in own[:_MAX_INCIDENTS]],
        "n_incidents": len(own),
        "caveat": jobs.store.unexamined.reason(tenant, cluster) or jobs.store.damage.warning(tenant) or "",
    }


def evidence(jobs: Jobs, job: Job, rank: int, *, from_ns: int | None, to_ns: int | None) -> Row:
    """The differences of a rank from its peers in a window; None: the seconds in memory, or the whole trace."""
    store = jobs.store
    window = {"from_ns": from_ns or _begin_ns(jobs, job), "to_ns": to_ns}
    node, pid = job.processes.get(rank, ("", 0))
    return {
        "rank": rank,
        "node": node,
        "pid": pid or None,
        **_ledgers(store, job, rank, window if jobs.is_whole_trace else _affordable(job, window)),
        "late_step": _latest_late_step(jobs, job, rank, window),
        "off_cpu": _longest(store, job, "off_cpu", rank, window),
        "slow_calls": _longest(store, job, "slow_calls", rank, window),
        "stacks": _flame(store, job, node, pid, window),
        "gpu": _gpu(store, job, node, window),
    }


def _begin_ns(jobs: Jobs, job: Job) -> int | None:
    return None if jobs.is_whole_trace else (job.latest_ns or jobs.now_ns()) - SECONDS * _S_NS


def timeline(store: "Store", job: Job, ranks: Sequence[int], *, from_ns: int, to_ns: int) -> Row:
    """Arrivals, waits, off-CPU intervals and calls of some ranks in a short window; the longest of each kind."""
    processes = {f"{node} {pid}": rank for rank in ranks for node, pid in [job.processes.get(rank, ("", 0))]}
    params = {
        "ranks": list(ranks),
        "pids": list(processes),
        "from_ns": from_ns,
        "to_ns": to_ns,
        "max_rows": _MAX_EVENTS,
    }
    rows = store.ask("page_timeline", tenant=job.tenant, params=params, job=job.filter).to_pylist()
    events = [
        {
            "kind": row["kind"],
            "rank": processes.get(f"{row['node_id']} {row['pid']}") if row["rank"] is None else row["rank"],
            "at_us": round((row["ts_ns"] - from_ns) / 1000),
            "us": round((row["duration_ns"] or 0) / 1000),
            "name": clean(row["name"] or ""),
        }
        for row in rows
    ]
    return {"from_ms": from_ns // 10**6, "to_ms": to_ns // 10**6, "ranks": list(ranks), "events": events}


def _incident(row: Mapping[str, Any]) -> Row:
    flat = shown(row)
    names = (
        "verdict_id",
        "state",
        "kind",
        "rank",
        "cause",
        "late_ms",
        "since",
        "until",
        "summary",
        "severity",
    )
    return plain({name: flat[name] for name in (*names, "gpu_seconds", "at_most_gpu_seconds", "usd")})


def _affordable(job: Job, window: Window) -> Window:
    """The window, or its end where the job has sent more rows than a mean needs."""
    rate = (job.cells.rounds_per_s if job.cells else None) or 1.0
    longest_ns = int(max(10.0, _MAX_LEDGER_ROWS / (rate * max(job.n_ranks, 1))) * _S_NS)
    end_ns = window["to_ns"] or job.latest_ns
    return {"from_ns": max(window["from_ns"] or 0, end_ns - longest_ns), "to_ns": window["to_ns"]}


def _ledgers(store: "Store", job: Job, rank: int, window: Window) -> Row:
    """The mean time ledger of a round, as of the tool explain_rank, and the time budget, as of explain."""
    params = {"cluster": job.cluster, **window}
    rows = store.ask("rank_ledgers", tenant=job.tenant, params=params, job=job.filter).to_pylist()
    own = [row for row in rows if row["rank"] == rank]
    from_ns = window["from_ns"] or job.begin_ns
    return {
        "ledger": [
            row.model_dump() for row in ledger_rows(own, [row for row in rows if row["rank"] != rank])
        ],
        "n_rounds": max((row["n_rounds"] for row in own), default=0),
        "budget": _budget(store, job, window),
        "ledger_from_ms": from_ns and from_ns // 10**6,
    }


def _budget(store: "Store", job: Job, window: Window) -> list[Row]:
    """The shares of the time of all processes by category, the largest first."""
    rows = store.ask("page_accounts", tenant=job.tenant, params=dict(window), job=job.filter)
    if not len(rows):
        return []
    spent_ns = np.stack([rows[f"{name}_ns"].to_numpy() for name in CATEGORY_NAMES], axis=1)
    whole = budget(
        spent_ns,
        elapsed_ns=rows["elapsed_ns"].to_numpy(),
        knows_blocking=rows["has_offcpu"][0].as_py() or not any(rows["has_no_calls"].to_pylist()),
        limits=Thresholds(),
    )
    return [
        {"category": name.replace(" ", "_"), "label": whole.label(name), "share": share}
        for name, share in whole.shares.items()
        if share >= _MIN_SHARE
    ]


def _latest_late_step(jobs: Jobs, job: Job, rank: int, window: Window) -> Row | None:
    """The ledger of the newest step in which the rank was about as late as its verdict reports, or as late as it has
    ever been.
    """
    end_s = (window["to_ns"] or job.latest_ns) // _S_NS + 1
    begin_s = max((window["from_ns"] or job.begin_ns or 0) // _S_NS, end_s - SECONDS + 1)
    if begin_s >= end_s:
        return None
    cells = matrix(
        jobs.store, jobs.memory, job, from_ns=begin_s * _S_NS, to_ns=end_s * _S_NS, n=end_s - begin_s
    )
    if rank >= cells.ranks:
        return None
    late = np.where((cells.late[rank] == NO_DATA) | (cells.seq < 0), -1, cells.late[rank].astype(int))
    typical = min(_code_of_verdict(jobs, job, rank, window), int(late.max()))
    for column in np.flatnonzero((late > 0) & (late >= typical - _OCTAVE))[::-1][:_MAX_ATTEMPTS].tolist():
        step = late_step(
            jobs.store,
            job,
            rank=rank,
            comm=cells.comms[int(cells.comm[column])],
            seq=int(cells.seq[column]),
            at_ns=(begin_s + column) * _S_NS,
        )
        if step:
            return step
    return None


def _code_of_verdict(jobs: Jobs, job: Job, rank: int, window: Window) -> int:
    """The lateness that a verdict reports of a rank, as a code: the warm-up of a job is later than any fault."""
    stored = jobs.verdicts_of(job.tenant, job.key, cluster=job.cluster, from_ns=window["from_ns"])
    late_ms = next((row["late_ms"] for row in stored if row["rank"] == rank and row["late_ms"]), None)
    return NO_DATA if late_ms is None else int(codes(np.array([late_ms * 1e6]))[0])


def _longest(store: "Store", job: Job, question: str, rank: int, window: Window) -> list[Row]:
    """The longest off-CPU intervals or calls of a rank, as the tool explain_rank lists them."""
    node, pid = job.processes.get(rank, (None, None))
    params = {
        "cluster": job.cluster,
        "rank": rank,
        "node": node,
        "pid": pid,
        "max_rows": _MAX_LONGEST,
        **window,
    }
    rows = store.ask(question, tenant=job.tenant, params=params, job=job.filter).to_pylist()
    return [
        {
            "time_ms": row["ts_ns"] // 10**6,
            "name": clean(row.get("category") or row.get("symbol") or row.get("op") or ""),
            "ms": round(row["duration_ns"] / 1e6, 3),
            "taken_by": clean(row.get("by_comm") or ""),
            "stack": frames(row["frames"])[:_MAX_FRAMES],
        }
        for row in rows
    ]


def _flame(store: "Store", job: Job, node: str, pid: int, window: Window) -> list[Row]:
    """Stacks with their time off the CPU: outermost frame first, in ms."""
    if not pid:
        return []
    params = {"node": node, "pid": pid, "max_rows": _MAX_STACKS, **window}
    rows = store.ask("page_stacks", tenant=job.tenant, params=params).to_pylist()
    return [
        {
            "frames": list(reversed(frames(row["frames"])[:_MAX_FRAMES])),
            "category": row["category"],
            "ms": round(row["duration_ns"] / 1e6, 3),
            "n": row["n"],
        }
        for row in rows
        if row["frames"]
    ]


def _gpu(store: "Store", job: Job, node: str, window: Window) -> list[Row]:
    """The newest value of each GPU metric of a machine."""
    if not node:
        return []
    params = {"node": node, "max_rows": 24, **window}
    rows = store.ask("page_gpu", tenant=job.tenant, params=params).to_pylist()
    return [
        {
            "gpu": clean(row["gpu_uuid"]),
            "name": clean(row["name"]),
            "unit": row["unit"],
            "value": plain(row["value"]),
        }
        for row in rows
    ]


def frames(text: str | None) -> list[str]:
    """The frames of a stack as text, innermost first; empty where the text is not a JSON list."""
    try:
        values = json.loads(text) if text else []
    except ValueError:
        return []
    if not isinstance(values, list):
        return []
    return [clean(value if isinstance(value, str) else json.dumps(value))[:200] for value in values]


def labels() -> dict[str, str]:
    """The label of each category of the time ledger."""
    return {category.name.lower(): label for category, label in LABELS.items()}
