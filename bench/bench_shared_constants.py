"""What a row costs in each part of hubs that share their data: the constants of a calculation for a site.

CPU time of the decoding thread, of the diagnosis, of the store (commit and sealing), of PostgreSQL and of the bucket
server; bytes of PostgreSQL's log and of the bucket, and requests to the bucket. For commits of several sizes: above
1 MB the rows are an object of the bucket, below they are in PostgreSQL.

    python bench/bench_shared_constants.py
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
from report import report
from shared_hubs import Servers, servers

from stallscope.continuous.streams import Streams
from stallscope.diagnose import Stream
from stallscope.errors import Overloaded
from stallscope.exporters import hub_arrow
from stallscope.receive import arrow
from stallscope.store.hub.batches import Batch
from stallscope.store.hub.limits import Limits
from stallscope.store.shared.shared_store import SharedStore, Sharing
from stallscope.store.shared.slots import N_SLOTS
from stallscope.stress import load

TENANT, CLUSTER = "a", "c"
INTERVAL_NS, LATE_NS = 20_000_000, 3_000_000
COMMITS = {500: 200_000, 5_000: 600_000, 50_000: 1_000_000}
"""Rows of a commit, and in total."""
DIAGNOSED = {64: 200_000, 1_024: 400_000}
"""Ranks of a job with a straggler, and rows."""


class _NoWork:
    def close(self) -> None:
        """Nothing was started."""


def main() -> None:
    """Measure and report."""
    stored = []
    for rows_a_commit, n_rows in COMMITS.items():
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            folder.chmod(0o755)
            of = stack.enter_context(servers(folder))
            stored.append(commits(of, rows_a_commit, n_rows))
            print(stored[-1], file=sys.stderr, flush=True)
    diagnosed = [diagnosis(ranks, n_rows) for ranks, n_rows in DIAGNOSED.items()]
    report("shared_constants", {"storing": stored, "diagnosis": diagnosed})


def bodies(ranks: int, rows_a_batch: int, n_rows: int) -> Iterator[bytes]:
    """Requests of a job with a straggler, just now."""
    n_rounds = max(1, rows_a_batch // ranks)
    job = load.Job(
        name=CLUSTER, ranks=ranks, first_rank=0, world=ranks, interval_ns=INTERVAL_NS, straggler=3,
        late_ns=LATE_NS,
    )  # fmt: skip
    first = origin = load.rounds_until(job, time.time_ns())
    tables = {"processes": load.processes(job, time.time_ns())}
    yield hub_arrow.request(tables, batch_id="p", node="n", cluster=CLUSTER, about={})
    for number in range(n_rows // (n_rounds * ranks)):
        rows = load.collectives(job, first, n_rounds, origin_round=origin)
        first += n_rounds
        yield hub_arrow.request(
            {"collectives": rows}, batch_id=f"b{number}", node="n", cluster=CLUSTER, about={}
        )


def commits(of: Servers, rows_a_commit: int, n_rows: int) -> dict[str, Any]:
    """Store and seal the rows, one request for each commit."""
    sharing = Sharing(
        postgres=of.dsn, bucket=of.bucket, cache=of.folder / "cache", name="hub", version="0",
        peer_listen="127.0.0.1:0", peer_host="127.0.0.1",
    )  # fmt: skip
    with closing(SharedStore(sharing, Limits(), work=lambda _: _NoWork())) as store:
        while len(store.membership.owned_slots()) < N_SLOTS:
            time.sleep(0.1)
        n_put, n_put_bytes = [0], [0]
        write = store.bucket._write

        def counted(files: Any, path: str, content: bytes) -> None:
            n_put[0] += 1
            n_put_bytes[0] += len(content)
            write(files, path, content)

        store.bucket._write = counted  # type: ignore[method-assign]
        requests = list(bodies(64, rows_a_commit, n_rows))
        idle_s = _idle_cpu_s(of)
        log_bytes, servers_s, begin_s = _log_bytes(of), of.cpu_s(), time.monotonic()
        own_s, decode_s, stored = time.process_time(), 0.0, 0
        for body in requests:
            thread_s = time.thread_time()
            batch = arrow.decode(body, TENANT, limit=1 << 30)
            decode_s += time.thread_time() - thread_s
            stored += _appended(store, batch)
        for each in store.membership.stores():
            each.seal_all()
        seconds = time.monotonic() - begin_s
        parts = {"decoding": decode_s, "store": time.process_time() - own_s - decode_s}
        parts |= {name: s - servers_s[name] for name, s in of.cpu_s().items()}
        parts = {name: s - seconds * idle_s.get(name, 0.0) for name, s in parts.items()}
        with psycopg.connect(of.dsn, options="-c search_path=stallscope") as db:
            ((sealed_bytes,),) = db.execute("SELECT sum(n_bytes)::bigint FROM segments").fetchall()
        return {
            "rows_a_commit": rows_a_commit,
            "rows": stored,
            "commits": len(requests),
            "request_bytes_per_row": round(sum(map(len, requests)) / stored, 1),
            "cpu_us_per_row": {name: round(s * 1e6 / stored, 2) for name, s in parts.items()},
            "idle_cpu_ms_per_s": {name: round(s * 1e3, 1) for name, s in idle_s.items()},
            "postgres_log_bytes_per_row": round((_log_bytes(of) - log_bytes) / stored, 1),
            "sealed_bytes_per_row": round(int(sealed_bytes) / stored, 2),
            "bucket_written_bytes_per_row": round(n_put_bytes[0] / stored, 2),
            "bucket_put_requests_per_million_rows": round(n_put[0] * 1e6 / stored, 1),
        }


def _appended(store: SharedStore, batch: Batch) -> int:
    """Rows stored, as a sender does it: again when the store has room."""
    while True:
        try:
            return store.append(batch).result(300).n_rows
        except Overloaded:
            time.sleep(0.2)


def _idle_cpu_s(of: Servers) -> dict[str, float]:
    """CPU time a second of hub and servers without rows."""
    begin_s, own_s, servers_s = time.monotonic(), time.process_time(), of.cpu_s()
    time.sleep(5)
    seconds = time.monotonic() - begin_s
    idle = {name: (s - servers_s[name]) / seconds for name, s in of.cpu_s().items()}
    return {"store": (time.process_time() - own_s) / seconds, **idle}


def _log_bytes(of: Servers) -> int:
    with psycopg.connect(of.dsn) as db:
        return int(db.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchall()[0][0])


def diagnosis(ranks: int, n_rows: int) -> dict[str, Any]:
    """Feed one job with a straggler to its stream, in requests of 5,000 rows."""
    streams, n_fed, cpu_s, n_changes = Streams(Stream), 0, 0.0, 0
    for body in bodies(ranks, 5_000, n_rows):
        batch: Batch = arrow.decode(body, TENANT, limit=1 << 30)
        begin_s = time.thread_time()
        changes = streams.feed((TENANT, CLUSTER), dict(batch.tables), n_left_out=0, is_behind=False)
        cpu_s += time.thread_time() - begin_s
        n_fed += batch.n_rows
        n_changes += len(changes or ())
    streams.close()
    return {
        "ranks": ranks,
        "rows": n_fed,
        "cpu_us_per_row": round(cpu_s * 1e6 / n_fed, 1),
        "changes_of_verdicts": n_changes,
    }


if __name__ == "__main__":
    main()
