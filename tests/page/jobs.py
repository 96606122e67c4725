"""Jobs for tests of the page: rows of collectives whose lateness, waits and time ledgers are known."""

import json
import time
from collections.abc import Iterable, Mapping

import pyarrow as pa

from stallscope.events.names import CATEGORY_NAMES

S = 10**9
MS = 10**6
COMM = "00000000000000aa"


def code_ms(code: int) -> float:
    """The duration in ms that a code of a cell stands for."""
    return 0.1 * 2 ** (code / 16)


def recent_s() -> int:
    """A whole second a little ago, since 1970."""
    return time.time_ns() // S - 20


def arrivals(
    n_ranks: int,
    n_rounds: int,
    *,
    begin_s: int,
    late_ms: Mapping[tuple[int, int], float] | None = None,
    missing: Iterable[tuple[int, int]] = (),
    rounds_per_s: int = 2,
    first_seq: int = 0,
    comm: str = COMM,
    ranks: Iterable[int] | None = None,
    cluster: str = "c1",
    first_pid: int = 100,
    node: str = "",
) -> pa.Table:
    """Rows of one communicator.

    late_ms: by (rank, round), how much later the rank arrives, because it waited for a disk. The others wait
    for the latest rank. missing: (rank, round) without a row.
    """
    late, absent = late_ms or {}, set(missing)
    spent = {rank: dict.fromkeys(CATEGORY_NAMES, 0) for rank in (ranks or range(n_ranks))}
    rows = []
    for number in range(n_rounds):
        begin_ns = begin_s * S + number * S // rounds_per_s
        max_ms = max((late.get((rank, number), 0.0) for rank in spent), default=0.0)
        for rank, ledger in spent.items():
            own_ns = int(late.get((rank, number), 0.0) * MS)
            ledger["io"] += own_ns
            ledger["on_cpu"] += S // rounds_per_s - int(max_ms * MS)
            wait_ns = int(max_ms * MS) - own_ns
            ledger["wait_gpu"] += wait_ns
            if (rank, number) in absent:
                continue
            rows.append(
                {
                    "ts_ns": begin_ns + own_ns,
                    "cluster_id": cluster,
                    "node_id": node or f"node-{rank // 8}",
                    "pid": first_pid + rank,
                    "rank": rank,
                    "comm_rank": rank,
                    "nranks": n_ranks,
                    "comm_hash": comm,
                    "op": "all_reduce",
                    "seq": first_seq + number,
                    "flags": 0,
                    "wait_enter_ns": begin_ns - S // rounds_per_s + own_ns,
                    "wait_leave_ns": begin_ns - S // rounds_per_s + own_ns + wait_ns,
                    **{f"{name}_ns": value for name, value in ledger.items()},
                }
            )
    return pa.Table.from_pylist(rows)


def verdict_row(**fields: object) -> pa.Table:
    """A row of `verdicts`: an open straggler verdict on rank 2, changed by the fields."""
    now_us = time.time_ns() // 1000
    row = {
        "cluster_id": "c1",
        "verdict_id": "v1",
        "state": "open",
        "opened_at": now_us,
        "updated_at": now_us,
        "closed_at": None,
        "node_id": "node-0",
        "rank": 2,
        "kind": "straggler",
        "severity": "high",
        "summary": "Rank 2 slows down the job.",
        "since_ns": (now_us - 60_000_000) * 1000,
        "until_ns": now_us * 1000,
        "ranks": "[2]",
        "nodes": '["node-0"]',
        "pids": "[102]",
        "victims": "[0, 1, 3]",
        "comm_hash": COMM,
        "late_ms": 50.0,
        "cause": "block_io",
        "confidence": 0.99,
        "gpu_seconds": 30.0,
        "at_most_gpu_seconds": 60.0,
        "advice": "[]",
        "verdict": "{}",
    } | fields
    from stallscope.continuous.verdict_rows import table_of
    from stallscope.store.hub import schema

    return table_of(schema.VERDICTS, [row])


def job_row(
    rows: pa.Table,
    *,
    answer: str = "healthy",
    reasons: Iterable[tuple[str, str]] = (),
    has_ended: bool = False,
    **fields: object,
) -> pa.Table:
    """The row of `jobs` that the continuous diagnosis writes about these collectives. reasons: (reason, action)."""
    from stallscope.continuous.verdict_rows import table_of
    from stallscope.store.hub import schema

    columns = rows.select(["node_id", "pid", "rank"]).group_by(["node_id", "pid", "rank"]).aggregate([])
    members = sorted(zip(*(column.to_pylist() for column in columns.columns), strict=True))
    times = rows["ts_ns"].to_pylist()
    row = {
        "cluster_id": rows["cluster_id"][0].as_py(),
        "job": max(zip(rows["nranks"].to_pylist(), rows["comm_hash"].to_pylist(), strict=True))[1],
        "begin_ns": min(times),
        "last_ns": max(times),
        "ended_ns": max(times) if has_ended else None,
        "n_ranks": len(members),
        "members": json.dumps(members),
        "answer": answer,
        "reasons": json.dumps([{"reason": reason, "action": action} for reason, action in reasons]),
        "evidence": "null",
        "updated_at": time.time_ns() // 1000,
    } | fields
    return table_of(schema.JOBS, [row])
