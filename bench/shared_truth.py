"""What hubs that share their data have stored, read without a hub, compared with what senders know."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_hubs import Servers
from shared_load import FaultyJob, Period

_SLACK_NS = 2_000_000_000
"""The first late round is named some rounds later, and a verdict ends at its last late round."""


def stored_rows(servers: Servers, folder: Path) -> tuple[Counter[tuple[str, int, int]], list[dict[str, Any]]]:
    """How often each (cluster, rank, round) is stored, and the rows of the verdicts."""
    import pyarrow.parquet as pq

    from stallscope.store.shared.bucket import Bucket
    from stallscope.store.shared.postgres import Postgres
    from stallscope.store.shared.segment_cache import SegmentCache
    from stallscope.store.shared.tenant_snapshots import Snapshots

    database, objects = Postgres(servers.dsn, name="prove"), Bucket(servers.bucket)
    cache = SegmentCache(folder, objects, max_bytes=1 << 40)
    snapshot = Snapshots(database, objects).snapshot("default", ("collectives", "verdicts"))
    segments = snapshot.segments.get("collectives", ())
    cache.fetch(segments)
    columns = ["cluster_id", "rank", "seq"]
    tables = [
        pq.read_table(cache.folder / each.path, columns=columns, partitioning=None) for each in segments
    ]
    if "collectives" in snapshot.hot:
        tables.append(snapshot.hot["collectives"].select(columns))
    rows: Counter[tuple[str, int, int]] = Counter()
    for table in tables:
        rows.update(zip(*(table[name].to_pylist() for name in columns), strict=True))
    verdicts = snapshot.hot["verdicts"].to_pylist()
    database.close()
    cache.close()
    return rows, verdicts


def verdict_figures(
    jobs: Sequence[FaultyJob],
    verdicts: Sequence[dict[str, Any]],
    *,
    now_ns: int,
    min_s: float,
    max_open_s: float,
) -> dict[str, Any]:
    """Verdicts compared with the periods of the jobs.

    min_s: shorter periods, as the last of a run may be, need no verdict. max_open_s: a verdict may stay open for this
    time after its period; longer if the job sends no more rows, because nothing then shows that the fault is over.
    """
    lost, wrong, split, open_late, n_periods = [], [], [], [], 0
    for job in jobs:
        of_job = [row for row in verdicts if row["cluster_id"] == job.name]
        matched: set[str] = set()
        for period in job.periods:
            found = [row for row in of_job if row["rank"] == period.rank and _overlaps(row, period, now_ns)]
            matched |= {row["verdict_id"] for row in found}
            n_periods += 1
            name = f"{job.name} rank {period.rank} {(period.end_ns - period.begin_ns) / 1e9:.0f} s"
            if not found and period.end_ns - period.begin_ns >= min_s * 1e9:
                lost.append(name)
            if len(found) > 1:
                split.append(f"{name}: {len(found)} verdicts")
            is_long_over = period.is_over and now_ns - period.end_ns > max_open_s * 1e9
            if is_long_over and any(row["state"] == "open" for row in found):
                open_late.append(name)
        wrong += [
            f"{job.name} {row['kind']} rank {row['rank']}: {row['summary']}"
            for row in of_job
            if row["verdict_id"] not in matched
        ]
    return {
        "fault_periods": n_periods,
        "healthy_clusters": sum(job.is_healthy for job in jobs),
        "verdicts": len(verdicts),
        "lost_verdicts": lost,
        "verdicts_without_a_fault": wrong,
        "faults_with_several_verdicts": split,
        "verdicts_open_after_their_fault": open_late,
    }


def _overlaps(row: dict[str, Any], period: Period, now_ns: int) -> bool:
    begin_ns = row["since_ns"] if row["since_ns"] is not None else int(row["opened_at"].timestamp() * 1e9)
    end_ns = now_ns if row["state"] == "open" or row["until_ns"] is None else row["until_ns"]
    return bool(begin_ns <= period.end_ns + _SLACK_NS and end_ns >= period.begin_ns - _SLACK_NS)
