"""A snapshot: one HTML file with the code of the page and the data of one view. It makes no request when it is opened.

Its policy (in a meta element) permits its script and its style sheet by their SHA-256, and nothing else.
"""

import base64
import gzip
import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from stallscope.errors import NotFound
from stallscope.page.assets import script_and_style
from stallscope.page.http_messages import plain_tree
from stallscope.page.job_list import Jobs
from stallscope.page.matrix import matrix
from stallscope.page.round_details import one_round
from stallscope.page.verdict_evidence import evidence, labels, overview
from stallscope.serve.plain_text import visible


@dataclass(frozen=True, kw_only=True)
class SnapshotView:
    """The view to keep. query: of the page's link. comm, seq: the round; rank: of the evidence, None: the culprit."""

    query: str
    job: str
    from_ns: int
    to_ns: int
    n: int
    rank: int | None = None
    comm: str = ""
    seq: int | None = None


def snapshot(jobs: Jobs, tenant: str, view: SnapshotView) -> str:
    """The file. Raises NotFound for a job that is not in memory, or a page that was not built."""
    script, style = script_and_style()
    script = script.replace("</script", "<\\/script")
    data = json.dumps(visible(plain_tree(_data(jobs, tenant, view))), separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>stallscope snapshot</title><style>{style}</style></head>"
        f'<body><div id="app"></div><script type="application/json" id="snapshot">{data}</script>'
        f'<script type="module">{script}</script></body></html>'
    )


def _data(jobs: Jobs, tenant: str, view: SnapshotView) -> dict[str, Any]:
    whole = overview(jobs, tenant, view.job)
    job = jobs.table.job(tenant, view.job)
    if job is None and whole["job"] is None:
        raise NotFound(f"no job {view.job[:80]!r}; GET /api/v1/page/jobs lists the jobs")
    out: dict[str, Any] = {
        "made_ms": time.time_ns() // 10**6,
        "query": view.query,
        "labels": labels(),
        "rows": [whole["job"]] if whole["job"] else [],
        "overview": whole,
    }
    if job is None:
        return out
    cells = matrix(jobs.store, jobs.memory, job, from_ns=view.from_ns, to_ns=view.to_ns, n=view.n)
    out["matrix"] = base64.b64encode(gzip.compress(cells.frame(), 9)).decode()
    rank = view.rank if view.rank is not None else (whole["job"] or {}).get("rank")
    if rank is not None:
        out["evidence"] = evidence(jobs, job, rank, from_ns=view.from_ns, to_ns=view.to_ns)
    if view.seq is not None:
        out["round"] = one_round(jobs.store, job, comm=view.comm or job.id, seq=view.seq)
    return out


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
