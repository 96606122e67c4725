"""Questions over 20 million rows in 16 slots of hubs that share their data, and the cost of storing the rows.

One hub's store, without diagnosis, takes the rows of 16 clusters with 64 ranks and seals them into the bucket. A second
hub with an empty cache then answers: p99 of the lateness of each rank, and the named questions on lateness and time
ledgers; the first time with the transfer of the files, then from its cache. Data is kept in build/ until the end.

    python bench/bench_shared_query.py [--rows N] [--minutes M]
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import duckdb
from report import report
from shared_hubs import Servers, servers

from stallscope.exporters import hub_arrow
from stallscope.receive import arrow
from stallscope.store.hub import views
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore
from stallscope.store.shared.shared_store import SharedStore, Sharing
from stallscope.store.shared.slots import N_SLOTS, slot_of
from stallscope.stress import load

RANKS, BATCH_ROUNDS, SLOTS, REPEATS = 64, 800, 16, 5
INTERVAL_NS = 20_000_000
TENANT = "a"
P99 = """
SELECT cluster_id, rank, count(*) AS n, quantile_cont(late_ns, 0.99) AS p99_ns
FROM collectives GROUP BY cluster_id, rank
"""


class _NoWork:
    def close(self) -> None:
        """Nothing was started."""


def main() -> None:
    """Fill, ask, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--minutes", type=float, default=20.0, help="of filling; then with fewer rows")
    arguments = parser.parse_args()
    folder = Path(__file__).resolve().parent.parent / "build" / "shared_query"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            of = stack.enter_context(servers(folder))
            with closing(_store(of, "fill")) as store:
                filled = fill(
                    store, of, n_rows=arguments.rows, until_s=time.monotonic() + 60 * arguments.minutes
                )
            with closing(_store(of, "ask")) as store:
                report("shared_query", {**filled, "questions": asked(store)})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _store(of: Servers, name: str) -> SharedStore:
    sharing = Sharing(
        postgres=of.dsn, bucket=of.bucket, cache=of.folder / name, name=name, version="0",
        peer_listen="127.0.0.1:0", peer_host="127.0.0.1",
    )  # fmt: skip
    store = SharedStore(sharing, Limits(max_hot_bytes=8 << 30), work=lambda _: _NoWork())
    while len(store.membership.owned_slots()) < N_SLOTS:
        time.sleep(0.1)
    return store


def clusters() -> list[str]:
    """Names of clusters, each in a slot of its own."""
    by_slot: dict[int, str] = {}
    number = 0
    while len(by_slot) < SLOTS:
        by_slot.setdefault(slot_of(TENANT, f"c{number}"), f"c{number}")
        number += 1
    return list(by_slot.values())


def fill(store: SharedStore, of: Servers, *, n_rows: int, until_s: float) -> dict[str, Any]:
    """Store rows, and seal them all."""
    names, n_stored, round_number = clusters(), 0, 1_000_000
    wall_ns = time.time_ns()
    servers_s, own_s, making_s = of.cpu_s(), time.process_time(), 0.0
    while n_stored < n_rows and time.monotonic() < until_s:
        for name in names:
            begin_s = time.thread_time()
            job = load.Job(
                name=name, ranks=RANKS, first_rank=0, world=RANKS, interval_ns=INTERVAL_NS, straggler=3,
                late_ns=3_000_000,
            )  # fmt: skip
            rows = load.collectives(job, round_number, BATCH_ROUNDS, origin_round=1_000_000)
            for column in ("ts_ns", "wait_enter_ns", "wait_leave_ns"):
                rows[column] += wall_ns - 1_000_000 * INTERVAL_NS
            batch_id = f"{name}-{round_number}"
            body = hub_arrow.request(
                {"collectives": rows}, batch_id=batch_id, node=f"node-{name}", cluster=name, about={}
            )
            making_s += time.thread_time() - begin_s
            store.append(arrow.decode(body, TENANT, limit=1 << 30)).result(300)
            n_stored += len(rows)
        round_number += BATCH_ROUNDS
        print(f"{n_stored:,} rows", file=sys.stderr, flush=True)
    stored: list[HubStore] = store.membership.stores()
    for each in stored:
        each.seal_all()
    cpu_s = {"hub": time.process_time() - own_s - making_s}
    cpu_s |= {name: s - servers_s[name] for name, s in of.cpu_s().items()}
    segments = _segments(of)
    return {
        "rows": n_stored,
        "slots": SLOTS,
        "ranks_of_a_cluster": RANKS,
        "files": segments[0],
        "sealed_bytes_per_row": round(segments[1] / n_stored, 2),
        "cpu_us_per_row_stored_and_sealed": {name: round(s * 1e6 / n_stored, 2) for name, s in cpu_s.items()},
    }


def _segments(of: Servers) -> tuple[int, int]:
    import psycopg

    with psycopg.connect(of.dsn, options="-c search_path=stallscope") as db:
        n, n_bytes = db.execute("SELECT count(*), sum(n_bytes)::bigint FROM segments").fetchall()[0]
    return int(n), int(n_bytes)


def asked(store: SharedStore) -> dict[str, Any]:
    """Each question: the first time with an empty cache, then repeated."""
    window = {"cluster": None, "from_ns": None, "to_ns": None}
    questions: dict[str, Callable[[], int]] = {
        "p99_of_each_rank": lambda: _sql(store, P99),
        "lateness_of_each_rank": lambda: (
            store.ask("lateness", tenant=TENANT, params={**window, "min_late_ns": 1_000_000}).num_rows
        ),
        "time_ledger_of_each_rank": lambda: store.ask("rank_ledgers", tenant=TENANT, params=window).num_rows,
    }
    begin_s = time.monotonic()
    store.snapshot(TENANT, tables=("collectives",))
    out: dict[str, Any] = {"transfer_of_all_files_s": round(time.monotonic() - begin_s, 2)}
    for name, question in questions.items():
        times = [_timed(question) for _ in range(1 + REPEATS)]
        assert {n for n, _, _ in times} == {SLOTS * RANKS}
        repeated = times[1:]
        out[name] = {
            "first_s": round(times[0][1], 2),
            "first_cpu_s": round(times[0][2], 2),
            "median_s": round(statistics.median(s for _, s, _ in repeated), 2),
            "max_s": round(max(s for _, s, _ in repeated), 2),
            "median_cpu_s": round(statistics.median(s for _, _, s in repeated), 2),
        }
    return out


def _timed(question: Callable[[], int]) -> tuple[int, float, float]:
    begin_s, cpu_s = time.monotonic(), time.process_time()
    n_rows = question()
    return n_rows, time.monotonic() - begin_s, time.process_time() - cpu_s


def _sql(store: SharedStore, text: str) -> int:
    """As a tenant's SQL is answered: from one snapshot, over the files in the cache and the unsealed rows."""
    snapshot = store.snapshot(TENANT, tables=("collectives",))
    paths = {name: [str(store.folder / s.path) for s in each] for name, each in snapshot.segments.items()}
    with duckdb.connect(config={"threads": os.cpu_count() or 1}) as db:
        for name, rows in snapshot.hot.items():
            db.register(f"hot_{name}", rows)
        for statement in views.statements(
            paths, {name: f"hot_{name}" for name in snapshot.hot}, only=("collectives",)
        ):
            db.execute(statement)
        return len(db.execute(text).fetchall())


if __name__ == "__main__":
    main()
