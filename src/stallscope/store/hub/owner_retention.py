"""Deletes the owners of ended jobs and closed incidents from the rows that stay, in a hub's jobs and verdicts."""

import json

import duckdb

from stallscope.events.owner import GROUP_LABELS, column

OWNER_TABLES = ("owners", "idle_gpus")
"""The tables whose rows are owners."""

HELD = "GPUs were held without use; their owner has been deleted."
"""The summary of such an incident."""
_COLUMNS = tuple(map(column, GROUP_LABELS))
NO_OWNER = ", ".join(f"{name} = NULL" for name in _COLUMNS)
HAS_OWNER = f"({' OR '.join(f'{name} IS NOT NULL' for name in _COLUMNS)})"
_OLD_VERDICT = f"state = 'closed' AND epoch_us(coalesce(closed_at, updated_at)) < ? AND {HAS_OWNER}"


def delete_owners(db: duckdb.DuckDBPyConnection, before_us: int) -> int:
    """In a transaction: of jobs that ended and incidents that closed before a time. Returns the rows changed."""
    ((n_jobs,),) = db.execute(
        f"UPDATE jobs SET {NO_OWNER} WHERE ended_ns IS NOT NULL AND epoch_us(updated_at) < ? AND {HAS_OWNER}",
        [before_us],
    ).fetchall()
    rows = db.execute(
        f"SELECT tenant, verdict_id, kind, summary, verdict FROM verdicts WHERE {_OLD_VERDICT}", [before_us]
    ).fetchall()
    for tenant, verdict_id, kind, summary, text in rows:
        is_idle = kind == "idle"
        verdict = without_owner(kind, text)
        db.execute(
            f"UPDATE verdicts SET {NO_OWNER}, summary = ?, verdict = ? WHERE tenant = ? AND verdict_id = ?",
            [HELD if is_idle else summary, verdict, tenant, verdict_id],
        )
        if is_idle:
            db.execute(
                "UPDATE causal_chains SET summary = ?, explanation = '{}' WHERE tenant = ? AND causal_chain_id = ?",
                [HELD, tenant, verdict_id],
            )
    return int(n_jobs) + len(rows)


def without_owner(kind: str, text: str | None) -> str:
    """A verdict (JSON) without its owner. A verdict on idle GPUs names its holder in the summary and the evidence."""
    kept = {name: value for name, value in json.loads(text or "{}").items() if name != "owner"}
    return json.dumps(kept | {"summary": HELD, "evidence": {}} if kind == "idle" else kept)
