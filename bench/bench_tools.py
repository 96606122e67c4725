"""The hub's tools over 14 million collective records, quiet and while more arrive; ingest while SQL attacks run.

A cluster of 64 ranks on 8 machines, one of them late in every round; its records are appended to a store as a
receiver does it and sealed as the store does it, but for the last. Each tool is asked as HTTP asks it, without the
network.
"""

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from report import report

from stallscope import rates
from stallscope.errors import Overloaded, StallscopeError
from stallscope.events.names import CATEGORY_NAMES
from stallscope.serve import tools
from stallscope.serve.sql.sources import of_store
from stallscope.serve.sql.workers import QueryLimits, Workers
from stallscope.serve.tools.tenant_context import Hub, TenantContext
from stallscope.serve.tools.tool_registry import answer, collected
from stallscope.store.hub import schema
from stallscope.store.hub.store import Batch, HubStore, Receipt

N_RANKS = 64
ROUNDS_A_BATCH = 500
T0_NS = time.time_ns() - 5 * 86_400 * 10**9
"""A recent time, because rows older than the store's retention would be dropped during the run."""

STEP_NS = 100_000_000
N_HOT_ROWS = 300_000
N_VERDICTS = 1_000
N_ASKED = 5
PACE = 100_000  # rows a second, a busy cluster
ASKED: dict[str, dict[str, Any]] = {
    "fleet.cluster.find_outlier_nodes": {"cluster": "bench"},
    "fleet.cluster.explain_rank": {"cluster": "bench", "rank": 5},
    "fleet.cluster.get_cost": {"cluster": "bench"},
    "fleet.cluster.event_history": {"cluster": "bench", "rank": 5},
    "fleet.cluster.summary": {},
}
GROUP = "SELECT rank, count(*), max(ts_ns) FROM collectives GROUP BY rank"
ATTACKS = (
    "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT count(*) FROM t",
    "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b",
    "SELECT count(*) FROM range(100000000) WHERE regexp_matches(range::VARCHAR, '(.*)(.*)(.*)(.*)x')",
    "SELECT count(DISTINCT range) FROM range(2000000000)",
    "SELECT list(range) FROM range(2000000000)",
)


def rows(first_round: int, n_rounds: int = ROUNDS_A_BATCH) -> pa.Table:
    """Collectives of all ranks in some rounds."""
    n = n_rounds * N_RANKS
    seq = np.repeat(np.arange(first_round, first_round + n_rounds), N_RANKS)
    rank = np.tile(np.arange(N_RANKS), n_rounds)
    jitter = np.random.default_rng(first_round).integers(0, 200_000, n)
    ts = T0_NS + seq * STEP_NS + jitter + np.where(rank == 5, 8_000_000, 0)
    words = pa.array([f"node-{i}" for i in range(N_RANKS // 8)])
    return pa.table(
        {
            "ts_ns": ts,
            "cluster_id": pa.array(["bench"]).take(pa.array(np.zeros(n, np.int32))),
            "node_id": words.take(pa.array(rank // 8)),
            "rank": pa.array(rank.astype(np.int32)),
            "nranks": pa.array(np.full(n, N_RANKS, np.int32)),
            "op": pa.array(["all_reduce"]).take(pa.array(np.zeros(n, np.int32))),
            "comm_hash": pa.array(["00112233aabbccdd"]).take(pa.array(np.zeros(n, np.int32))),
            "seq": seq,
            "pid": 1000 + rank,
            "count_bytes": np.full(n, 1 << 20),
            **{f"{name}_ns": (seq + 1) * (number * 100_000) for number, name in enumerate(CATEGORY_NAMES)},
        }
    )


def kept() -> dict[str, pa.Table]:
    """Verdicts and machines."""
    verdicts = [
        {
            "cluster_id": "bench",
            "verdict_id": f"v{i}",
            "state": "closed",
            "kind": "straggler",
            "summary": "rank 5 is late",
            "since_ns": T0_NS + i * STEP_NS,
            "until_ns": T0_NS + (i + 50) * STEP_NS,
            "node_id": "node-0",
            "rank": i % N_RANKS,
            "gpu_seconds": 25.0,
            "is_lower_bound": False,
        }
        for i in range(N_VERDICTS)
    ]
    nodes = [
        {
            "cluster_id": "bench",
            "node_id": f"node-{i}",
            "gpu_model": "NVIDIA H100 80GB HBM3",
            "provider": "aws",
        }
        for i in range(N_RANKS // 8)
    ]
    return {
        "verdicts": pa.Table.from_pylist(
            verdicts, schema=schema.arrow_schema(schema.VERDICTS, without=["tenant"])
        ),
        "nodes": pa.Table.from_pylist(nodes, schema=schema.arrow_schema(schema.NODES, without=["tenant"])),
    }


def fill(store: HubStore, n_rows: int) -> int:
    """Append this many rows, all sealed except the last N_HOT_ROWS. Returns the number of the next round."""
    store.append(Batch("kept", "a", kept())).result()
    first = appended(store, 0, n_rows - N_HOT_ROWS)
    store.seal_all()
    return appended(store, first, n_rows)


def stored(store: HubStore, batch: Batch) -> "Future[Receipt]":
    """Append a batch, again while the store accepts no more rows."""
    while True:
        try:
            return store.append(batch)
        except Overloaded:
            time.sleep(0.05)


def appended(store: HubStore, first: int, n_rows: int) -> int:
    """Append rounds from first on until this many rows exist. Returns the number of the next round."""
    waiting = []
    while first * N_RANKS < n_rows:
        waiting.append(stored(store, Batch(f"b{first}", "a", {"collectives": rows(first)})))
        first += ROUNDS_A_BATCH
        if len(waiting) > 4:
            waiting.pop(0).result()
    for each in waiting:
        each.result()
    return first


@contextmanager
def ingest(
    store: HubStore, first_round: int, rows_a_second: float | None = None
) -> Iterator[Callable[[], float]]:
    """Append more rows in a thread; yields a function that returns the rate. rows_a_second: None is unlimited."""
    stop, n_rows, begin_s = threading.Event(), [0], time.monotonic()

    def append() -> None:
        first, batch = first_round, ROUNDS_A_BATCH // 10
        while not stop.is_set():
            stored(store, Batch(f"i{first}", "a", {"collectives": rows(first, batch)})).result()
            first += batch
            n_rows[0] += batch * N_RANKS
            if rows_a_second:
                stop.wait(max(0.0, begin_s + n_rows[0] / rows_a_second - time.monotonic()))

    thread = threading.Thread(target=append)
    thread.start()
    try:
        yield lambda: n_rows[0] / (time.monotonic() - begin_s)
    finally:
        stop.set()
        thread.join()


def timed(hub: Hub) -> dict[str, float]:
    """Seconds of each tool and of a grouping in SQL: median, and the first time."""
    known, context = collected(tools), TenantContext(hub, "a")
    out: dict[str, float] = {}
    calls: dict[str, Callable[[], object]] = {
        name.rsplit(".", 1)[1]: partial(_rows, known[name], context, arguments)
        for name, arguments in ASKED.items()
    }
    calls["sql_group"] = lambda: hub.workers.query(GROUP, tenant="a").rows
    for name, call in calls.items():
        seconds = []
        for _ in range(N_ASKED):
            begin_s = time.monotonic()
            assert call(), name
            seconds.append(time.monotonic() - begin_s)
        out |= {f"{name}_s": round(statistics.median(seconds), 3), f"{name}_first_s": round(seconds[0], 3)}
    return out


def _rows(tool: Any, context: TenantContext, arguments: dict[str, Any]) -> object:
    return answer(tool, context, arguments)["rows"]


def under_attack(hub: Hub, first_round: int) -> dict[str, Any]:
    """Rows a second appended, alone and while attacks keep the SQL workers busy: as fast as it goes, and at a pace."""
    with ingest(hub.store, first_round) as rate:
        time.sleep(10)
        alone = rate()
    outcomes: list[str] = []

    def attack(sql: str) -> None:
        try:
            hub.workers.query(sql, tenant="a")
            outcomes.append("answered")
        except StallscopeError as error:
            outcomes.append(type(error).__name__)

    attacked = []
    for number, pace in enumerate((None, PACE), 1):
        with ingest(hub.store, first_round + number * 1_000_000, pace) as rate:
            for sql in ATTACKS:
                attack(sql)
            attacked.append(round(rate()))
    return {
        "ingest_alone_rows_per_s": round(alone),
        "ingest_under_sql_attack_rows_per_s": attacked[0],
        f"ingest_of_{PACE}_rows_per_s_under_sql_attack": attacked[1],
        "attacks_ended_in": outcomes,
    }


def main(n_rows: int) -> None:
    """Fill a store, ask, and report."""
    table = rates.load()
    limits = QueryLimits(timeout_s=5)
    with tempfile.TemporaryDirectory() as folder, closing(HubStore.open(Path(folder))) as store:
        data = of_store(store, table, max_hot_rows=limits.max_hot_rows)
        with closing(Workers(data, limits=limits)) as workers:
            hub = Hub(store, table, workers)
            begin_s = time.monotonic()
            first = fill(store, n_rows)
            filled_s = time.monotonic() - begin_s
            quiet = timed(hub)
            with ingest(store, first, PACE):
                busy = timed(hub)
            snapshot = store.snapshot("a")
            report(
                "tools",
                {
                    "n_records": n_rows,
                    "n_ranks": N_RANKS,
                    "n_hot_rows": len(snapshot.hot.get("collectives", ())),
                    "n_segments": len(snapshot.segments.get("collectives", ())),
                    "filled_s": round(filled_s, 1),
                    "quiet": quiet,
                    f"during_ingest_of_{PACE}_rows_per_s": busy,
                    **under_attack(hub, first + 2_000_000),
                },
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 14_000_000)
