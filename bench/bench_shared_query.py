"""Questions over 20 million rows in 16 slots of hubs that share their data, and the cost of storing the rows.

One hub's store, without diagnosis, takes the rows of 16 clusters with 64 ranks and seals them into the bucket. A second
hub with an empty cache then answers: SQL as users send it, in a process of its own (p99 of the lateness of each rank of
all clusters, of one cluster, and of the last minutes), and the named questions on lateness and time ledgers. The first
time includes the transfer of the files, the other times use the cache. CPU times contain the processes for SQL. Data is
kept in build/ until the end.

    python bench/bench_shared_query.py [--rows N] [--minutes M]
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

from report import report
from shared_hubs import Servers, servers, tree_cpu_s

from stallscope import rates
from stallscope.errors import Busy
from stallscope.exporters import hub_arrow
from stallscope.receive import arrow
from stallscope.serve.sql.sources import of_store
from stallscope.serve.sql.workers import QueryLimits, Workers
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
FROM collectives WHERE {} GROUP BY cluster_id, rank
"""
LAST_NS = 180 * 10**9


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
                report("shared_query", {**filled, "questions": asked(store, _segments(of)[2])})
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


def _segments(of: Servers) -> tuple[int, int, int]:
    import psycopg

    with psycopg.connect(of.dsn, options="-c search_path=stallscope") as db:
        n, n_bytes, last_ns = db.execute(
            "SELECT count(*), sum(n_bytes)::bigint, max(max_ts_ns) FROM segments"
        ).fetchall()[0]
    return int(n), int(n_bytes), int(last_ns)


def asked(store: SharedStore, last_ns: int) -> dict[str, Any]:
    """Each question: the first time with the transfer of the files that it needs, then repeated."""
    window = {"cluster": None, "from_ns": None, "to_ns": None}
    limits = QueryLimits(timeout_s=60)
    with closing(
        Workers(of_store(store, rates.load(), max_hot_rows=limits.max_hot_rows), limits=limits)
    ) as sql:
        sql.start()

        def p99(condition: str) -> int:
            while True:
                with suppress(Busy):  # the files are still being fetched
                    return len(sql.query(P99.format(condition), tenant=TENANT).rows)

        questions: dict[str, tuple[int, Callable[[], int]]] = {
            "p99_of_each_rank_of_a_cluster": (RANKS, lambda: p99(f"cluster_id = '{clusters()[0]}'")),
            "p99_of_each_rank_in_the_last_minutes": (
                SLOTS * RANKS,
                lambda: p99(f"ts_ns > {last_ns - LAST_NS}"),
            ),
            "p99_of_each_rank": (SLOTS * RANKS, lambda: p99("true")),
            "lateness_of_each_rank": (
                SLOTS * RANKS,
                lambda: (
                    store.ask("lateness", tenant=TENANT, params={**window, "min_late_ns": 10**6}).num_rows
                ),
            ),
            "time_ledger_of_each_rank": (
                SLOTS * RANKS,
                lambda: store.ask("rank_ledgers", tenant=TENANT, params=window).num_rows,
            ),
        }
        return {name: _asked(store, *question) for name, question in questions.items()}


def _asked(store: SharedStore, n_rows: int, question: Callable[[], int]) -> dict[str, Any]:
    n_fetched = int(store.numbers()["fetched_segments"])
    times = [_timed(question) for _ in range(1 + REPEATS)]
    assert {n for n, _, _ in times} == {n_rows}
    repeated = times[1:]
    return {
        "fetched_files": int(store.numbers()["fetched_segments"]) - n_fetched,
        "first_s": round(times[0][1], 2),
        "first_cpu_s": round(times[0][2], 2),
        "median_s": round(statistics.median(s for _, s, _ in repeated), 2),
        "max_s": round(max(s for _, s, _ in repeated), 2),
        "median_cpu_s": round(statistics.median(s for _, _, s in repeated), 2),
    }


def _timed(question: Callable[[], int]) -> tuple[int, float, float]:
    begin_s, cpu_s = time.monotonic(), tree_cpu_s(os.getpid())
    n_rows = question()
    return n_rows, time.monotonic() - begin_s, tree_cpu_s(os.getpid()) - cpu_s


if __name__ == "__main__":
    main()
