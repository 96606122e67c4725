"""Removes objects of the bucket that no list names any more, and reports the damage that a check of the bucket finds.

An object whose rows were merged, sealed or expired stays for some minutes, because readers hold snapshots. If its
folder is a Delta table, it stays until that table no longer names it (delta_tables.py), for a day at most. An object
that no list has named for a day was left by a hub that died between its upload and its commit. Logs of Delta tables
are not touched.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from stallscope.errors import StorageFailed
from stallscope.store.hub.journal import Segment
from stallscope.store.hub.segments import FOLDER
from stallscope.store.shared.bucket import Bucket
from stallscope.store.shared.postgres import Postgres
from stallscope.store.shared.segment_cache import SegmentCache

JOURNAL_FOLDER = "journal"
UNLISTED_S = 86_400.0
PUBLISHED_S = 86_400.0
"""Without `hub publish` for this time, objects are deleted although a Delta table names them."""
_DELTA_LOG = "/_delta_log/"
_AT_ONCE = 500


@dataclass
class BucketProblems:
    """Problems as sentences. n_unlisted: objects that no list names, young ones included."""

    n_segments: int = 0
    n_rows: int = 0
    n_unlisted: int = 0
    problems: list[str] = field(default_factory=list)


def remove_dropped(postgres: Postgres, bucket: Bucket, slots: list[int], *, grace_s: float) -> int:
    """Delete objects of these slots that were dropped grace_s ago. Returns their number. Raises Overloaded."""
    with postgres.transaction() as db:
        rows = db.execute(
            "SELECT path FROM dropped WHERE slot = ANY(%s)"
            " AND dropped_at < clock_timestamp() - make_interval(secs => %s)"
            " AND (released_at < clock_timestamp() - make_interval(secs => %s) OR NOT EXISTS (SELECT 1 FROM published"
            " WHERE starts_with(path, folder || '/') AND published_at > clock_timestamp() - make_interval(secs => %s)))"
            " ORDER BY dropped_at LIMIT %s",
            [slots, grace_s, grace_s, PUBLISHED_S, _AT_ONCE],
        ).fetchall()
    paths = [path for (path,) in rows]
    for path in paths:
        bucket.remove(path)
    if paths:  # after the objects: a crash between both repeats the deletion
        with postgres.transaction() as db:
            db.execute("DELETE FROM dropped WHERE path = ANY(%s)", [paths])
    return len(paths)


def remove_unlisted(postgres: Postgres, bucket: Bucket, *, older_s: float = UNLISTED_S) -> int:
    """Delete old objects that no list names. Returns their number. Raises Overloaded."""
    n_removed = 0
    for path in _unlisted(postgres, bucket, older_s=older_s):
        bucket.remove(path)
        n_removed += 1
    return n_removed


def _unlisted(postgres: Postgres, bucket: Bucket, *, older_s: float) -> Iterator[str]:
    """The bucket is listed before the lists are read: an object is uploaded before a list names it.

    Ages are by the clock of the bucket: a wrong clock here must not make a new object old.
    """
    border_ns = bucket.now_ns() - int(older_s * 1e9)
    found = [
        each.key
        for folder in (FOLDER, JOURNAL_FOLDER)
        for each in bucket.listed(folder)
        if each.modified_ns <= border_ns and _DELTA_LOG not in each.key
    ]
    with postgres.transaction(is_snapshot=True) as db:
        listed = {
            path
            for (path,) in db.execute(
                "SELECT path FROM segments UNION ALL SELECT path FROM dropped"
                " UNION ALL SELECT DISTINCT object FROM journal WHERE object IS NOT NULL"
            ).fetchall()
        }
    return (path for path in found if path not in listed)


def check(postgres: Postgres, bucket: Bucket, cache: SegmentCache) -> BucketProblems:
    """Read every listed object. Raises Overloaded."""
    out = BucketProblems()
    with postgres.transaction(is_snapshot=True) as db:
        segments = [
            Segment(*row)
            for row in db.execute(
                "SELECT tenant, table_name, path, n_rows, n_bytes, min_ts_ns, max_ts_ns, sealed_us FROM segments"
                " ORDER BY path"
            ).fetchall()
        ]
        objects = db.execute(
            "SELECT object, max(at + n_bytes), sum(n_rows)::bigint FROM journal WHERE object IS NOT NULL"
            " GROUP BY object ORDER BY object"
        ).fetchall()
        ((n_inline,),) = db.execute(
            "SELECT coalesce(sum(n_rows), 0)::bigint FROM journal WHERE object IS NULL"
        ).fetchall()
    out.n_rows += n_inline
    for segment in segments:
        out.n_segments += 1
        cache.forget(segment)  # the object is checked, not a copy
        try:
            reason = cache.reason_unreadable_inside(segment)
        except StorageFailed as error:
            reason = str(error)
        if reason:
            out.problems.append(f"segment {segment.path} ({segment.n_rows:,} rows): {reason}")
        else:
            out.n_rows += segment.n_rows
        cache.forget(segment)
    for path, n_bytes, n_rows in objects:
        try:
            n_found = len(bucket.get(path))
        except StorageFailed as error:
            out.problems.append(f"journal object {path} ({n_rows:,} rows): {error}")
            continue
        if n_found < n_bytes:
            out.problems.append(f"journal object {path} ({n_rows:,} rows): it has only {n_found:,} bytes")
        else:
            out.n_rows += n_rows
    out.n_unlisted = sum(1 for _ in _unlisted(postgres, bucket, older_s=0))
    return out
