"""The evidence next to a verdict: time ledgers, longest intervals, stacks, budget of the job, its earlier incidents."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stallscope.diagnose import LABELS
from stallscope.events.names import CATEGORY_NAMES, Category
from stallscope.page.job_list import Jobs
from stallscope.page.memory import Job
from stallscope.page.ring import SECONDS
from stallscope.page.rounds import against_peers, late_step
from stallscope.page.verdict_state import shown
from stallscope.serve.sql.values import clean, plain

if TYPE_CHECKING:
    from stallscope.store.hub.store import HubStore

_MOST_INCIDENTS = 20
_MOST_LONGEST = 5
_MOST_STACKS = 40
_MOST_FRAMES = 24
_MOST_LEDGER_ROWS = 250_000
"""Rows of a mean ledger: a job that sends more gets the mean of its latest rounds."""

_MOST_EVENTS = 400
_BUDGET_LABELS = {category.name.lower(): label for category, label in LABELS.items()}

Row = dict[str, Any]


def overview(jobs: Jobs, tenant: str, key: str, *, from_ns: int | None = None) -> Row:
    """The row of a job, its verdict with bounded lists, and its incidents, the newest first.

    from_ns: of the incidents. The verdict is the open verdict, or the newest of the incidents.
    """
    rows = [row for row in jobs.rows(tenant) if row["job"] == key]
    cluster = key.rpartition(":")[0]
    stored = jobs.verdicts(tenant, cluster=cluster, from_ns=from_ns, max_rows=500)
    own = [row for row in stored if jobs.id_of_verdict(tenant, row) == key]
    open_id = rows[0]["verdict_id"] if rows else None
    verdict = next((row for row in own if row["verdict_id"] == open_id), None)
    return {
        "job": rows[0] if rows else None,
        "verdict": plain(shown(verdict)) if verdict else None,
        "incidents": [_incident(row) for row in own[:_MOST_INCIDENTS]],
        "n_incidents": len(own),
        "caveat": jobs.store.unexamined.reason(tenant, cluster) or jobs.store.damage.warning(tenant) or "",
    }


def evidence(store: "HubStore", job: Job, rank: int, *, from_ns: int | None, to_ns: int | None) -> Row:
    """What a rank did differently from its peers in a window; None: the seconds in memory."""
    window = {"from_ns": from_ns or job.last_ns - SECONDS * 10**9, "to_ns": to_ns}
    node, pid = job.processes.get(rank, ("", 0))
    return {
        "rank": rank,
        "node": node,
        "pid": pid or None,
        **_ledgers(store, job, rank, window),
        "late_step": _latest_late_step(store, job, rank, window),
        "off_cpu": _longest(store, job, "off_cpu", rank, window),
        "slow_calls": _longest(store, job, "slow_calls", rank, window),
        "stacks": _flame(store, job, node, pid, window),
        "gpu": _gpu(store, job, node, window),
    }


def timeline(store: "HubStore", job: Job, ranks: Sequence[int], *, from_ns: int, to_ns: int) -> Row:
    """Arrivals, waits, off-CPU intervals and calls of some ranks in a short window; the longest of each kind."""
    processes = {f"{node} {pid}": rank for rank in ranks for node, pid in [job.processes.get(rank, ("", 0))]}
    params = {
        "cluster": job.cluster,
        "comms": list(job.comms),
        "ranks": list(ranks),
        "pids": list(processes),
        "from_ns": from_ns,
        "to_ns": to_ns,
        "max_rows": _MOST_EVENTS,
    }
    rows = store.ask("page_timeline", tenant=job.tenant, params=params).to_pylist()
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


def _ledgers(store: "HubStore", job: Job, rank: int, window: Mapping[str, int | None]) -> Row:
    """The mean ledger of a round next to the peers, and the budget of the job."""
    rate = (job.rounds_per_s or 1.0) * job.n_ranks
    shortest_ns = int(max(10.0, _MOST_LEDGER_ROWS / max(rate, 1.0)) * 1e9)
    end_ns = window["to_ns"] or job.last_ns
    begin_ns = max(window["from_ns"] or 0, end_ns - shortest_ns)
    params = {
        "cluster": job.cluster,
        "comms": list(job.comms),
        "from_ns": begin_ns,
        "to_ns": window["to_ns"],
    }
    rows = store.ask("page_ledgers", tenant=job.tenant, params=params).to_pylist()
    a_round = {
        row["rank"]: {
            name: (row[f"{name}_ns"] or 0) / 1000 / (row["n_rounds"] - 1) for name in CATEGORY_NAMES
        }
        for row in rows
    }
    own = next((row for row in rows if row["rank"] == rank), None)
    return {
        "ledger": against_peers(a_round, rank),
        "n_rounds": own["n_rounds"] if own else 0,
        "budget": _budget(rows),
        "ledger_from_ms": begin_ns // 10**6,
    }


def _budget(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The shares of all ranks' time by category, the largest first."""
    total = {name: sum(row[f"{name}_ns"] or 0 for row in rows) for name in CATEGORY_NAMES}
    spent_ns = sum(row["last_ns"] - row["first_ns"] for row in rows)
    if not spent_ns:
        return []
    rest_ns = max(0, spent_ns - sum(total.values()))
    shares = {**total, "not_recorded": rest_ns}
    return [
        {
            "category": name,
            "label": _BUDGET_LABELS.get(name, "not recorded"),
            "share": round(ns / spent_ns, 4),
        }
        for name, ns in sorted(shares.items(), key=lambda item: -item[1])
        if ns / spent_ns >= 0.001
    ]


def _latest_late_step(store: "HubStore", job: Job, rank: int, window: Mapping[str, int | None]) -> Row | None:
    """The ledger of the newest step in which the rank was as late as it typically is when it is late."""
    end_s = (window["to_ns"] or job.last_ns) // 10**9
    cells = job.ring.window(end_s - SECONDS + 1, SECONDS)
    if rank >= len(cells.late):
        return None
    late = cells.late[rank].astype(int)
    late[late == 255] = -1
    if late.max() <= 0:
        return None
    for second in range(SECONDS - 1, -1, -1):
        if late[second] >= late.max() - 16 and cells.seq[second] >= 0:
            comm = job.ring.comms[int(cells.comm[second])]
            at_ns = (end_s - SECONDS + 1 + second) * 10**9
            step = late_step(store, job, rank=rank, comm=comm, seq=int(cells.seq[second]), at_ns=at_ns)
            if step:
                return step
            break
    return None


def _longest(
    store: "HubStore", job: Job, question: str, rank: int, window: Mapping[str, int | None]
) -> list[Row]:
    params = {"cluster": job.cluster, "rank": rank, "max_rows": _MOST_LONGEST, **window}
    rows = store.ask(question, tenant=job.tenant, params=params).to_pylist()
    return [
        {
            "time_ms": row["ts_ns"] // 10**6,
            "name": clean(row.get("category") or row.get("symbol") or row.get("op") or ""),
            "ms": round(row["duration_ns"] / 1e6, 3),
            "taken_by": clean(row.get("by_comm") or ""),
            "stack": frames(row["frames"])[:_MOST_FRAMES],
        }
        for row in rows
    ]


def _flame(store: "HubStore", job: Job, node: str, pid: int, window: Mapping[str, int | None]) -> list[Row]:
    """Stacks with their time off the CPU: outermost frame first, in ms."""
    if not pid:
        return []
    params = {"node": node, "pid": pid, "max_rows": _MOST_STACKS, **window}
    rows = store.ask("page_stacks", tenant=job.tenant, params=params).to_pylist()
    return [
        {
            "frames": list(reversed(frames(row["frames"])[:_MOST_FRAMES])),
            "category": row["category"],
            "ms": round(row["duration_ns"] / 1e6, 3),
            "n": row["n"],
        }
        for row in rows
        if row["frames"]
    ]


def _gpu(store: "HubStore", job: Job, node: str, window: Mapping[str, int | None]) -> list[Row]:
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
    return {name: _BUDGET_LABELS.get(name, name) for name in CATEGORY_NAMES} | {
        Category.WAIT_GPU.name.lower(): "waiting for collectives"
    }
