"""One round on all ranks, and the time ledger of a late step.

A step has many rounds, and a rank that is late in a step is late in all of them. So the ledger of a late step covers
the interval from the last round that the rank entered in time to the first round that it entered late. The mean over
all rounds hides a delay of every seventh step, and the last round of the step shows only its end.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stallscope.errors import NotFound
from stallscope.events.names import CATEGORY_NAMES
from stallscope.page.tenant_jobs import Job

if TYPE_CHECKING:
    from stallscope.store.hub.store_protocol import Store

_MAX_BLOCKS_BACK = 96
_N_PEERS = 24
_MIN_LATE_NS = 1_000_000
_AROUND_NS = 600 * 10**9
_CELL_NS = 10**9

Row = Mapping[str, Any]


def one_round(store: "Store", job: Job, *, comm: str, seq: int, at_ns: int | None = None) -> dict[str, Any]:
    """A round in columns, with the time ledger since the round before it. Times in us after t0_ns. Raises NotFound.

    at_ns: an approximate time of the round, which bounds the search.
    """
    rows = _rows(store, job, comm, seq - 1, seq, at_ns=at_ns)
    current = {row["rank"]: row for row in rows if row["seq"] == seq}
    before = {row["rank"]: row for row in rows if row["seq"] == seq - 1}
    if not current:
        raise NotFound(f"no round {seq} of communicator {comm[:32]}; it may be older than the stored rows")
    t0_ns = min(row["ts_ns"] for row in current.values())
    ranks = sorted(current.keys() | before.keys())
    return {
        "comm": comm,
        "seq": seq,
        "op": next(iter(current.values()))["op"],
        "t0_ns": str(t0_ns),
        "ranks": ranks,
        "missing": _missing(current),
        **{
            name: [_us(current.get(rank), column, t0_ns) for rank in ranks]
            for name, column in (
                ("arrival_us", "ts_ns"),
                ("wait_enter_us", "wait_enter_ns"),
                ("wait_leave_us", "wait_leave_ns"),
            )
        },
        "ledger_us": {
            category: column
            for category in CATEGORY_NAMES
            if any(column := [_spent_us(before.get(rank), current.get(rank), category) for rank in ranks])
        },
    }


def late_step(
    store: "Store", job: Job, *, rank: int, comm: str, seq: int, at_ns: int | None = None
) -> dict[str, Any] | None:
    """The ledger of the late step that a late round of a rank belongs to; None where the rank is not late in it.

    rows: ms by category, of the rank and the median of its peers, the largest excess first. at_ns: begin of the second
    with the round: of its rounds near `seq`, the round that the rank entered latest counts. None: the round `seq`.
    """
    peers = [peer for peer in range(0, job.n_ranks, max(1, job.n_ranks // _N_PEERS)) if peer != rank]
    last_seq = seq if at_ns is None else seq + _MAX_BLOCKS_BACK
    rows = _rows(store, job, comm, seq - _MAX_BLOCKS_BACK, last_seq, at_ns=at_ns, ranks=[rank, *peers])
    late = _lateness(rows, rank)
    if at_ns is not None:
        arrived = {row["seq"]: row["ts_ns"] for row in rows if row["rank"] == rank}
        near = [number for number in late if at_ns <= arrived[number] - late[number] < at_ns + _CELL_NS]
        seq = max(near, key=lambda number: late[number], default=seq)
    bounds = _bounds(late, seq)
    if bounds is None:
        return None
    last_in_time, first_late, late_ns = bounds
    both = _rows(store, job, comm, last_in_time, first_late, at_ns=at_ns, only=(last_in_time, first_late))
    begin = {row["rank"]: row for row in both if row["seq"] == last_in_time}
    end = {row["rank"]: row for row in both if row["seq"] == first_late}
    ledger = against_peers(
        {
            each: {name: _spent_us(begin[each], end[each], name) for name in CATEGORY_NAMES}
            for each in begin.keys() & end.keys()
        },
        rank,
    )
    if not ledger:
        return None
    return {
        "comm": comm,
        "from_seq": last_in_time,
        "to_seq": first_late,
        "late_ms": round(late_ns / 1e6, 3),
        "time_ms": end[rank]["ts_ns"] // 10**6,
        "n_peers": len(begin.keys() & end.keys()) - 1,
        "rows": ledger,
    }


def against_peers(spent_us: Mapping[int, Mapping[str, float | None]], rank: int) -> list[dict[str, Any]]:
    """The ledger of a rank next to the median of the others, in ms; empty where either is unknown."""
    own = spent_us.get(rank)
    others = [values for other, values in spent_us.items() if other != rank]
    if own is None or not others:
        return []
    out = []
    for name in CATEGORY_NAMES:
        known = [values[name] for values in others if values[name] is not None]
        value = own[name]
        if value is None or not known:
            continue
        peers = statistics.median(known)  # type: ignore[type-var]
        if max(value, peers) >= 1:  # type: ignore[type-var, operator]
            out.append(_ledger_row(name, value, float(peers)))  # type: ignore[arg-type]
    return sorted(out, key=lambda row: -row["excess_ms"])


def _ledger_row(name: str, rank_us: float, peers_us: float) -> dict[str, Any]:
    return {
        "category": name,
        "rank_ms": round(rank_us / 1000, 3),
        "peers_ms": round(peers_us / 1000, 3),
        "excess_ms": round((rank_us - peers_us) / 1000, 3),
    }


def _lateness(rows: Sequence[Row], rank: int) -> dict[int, float]:
    """By round: the arrival of a rank minus the median of the given arrivals, in ns."""
    arrivals: dict[int, dict[int, int]] = {}
    for row in rows:
        arrivals.setdefault(row["seq"], {})[row["rank"]] = row["ts_ns"]
    return {
        number: by_rank[rank] - statistics.median(by_rank.values())
        for number, by_rank in arrivals.items()
        if rank in by_rank and len(by_rank) > 1
    }


def _bounds(late: Mapping[int, float], seq: int) -> tuple[int, int, float] | None:
    """The last round before `seq` that the rank entered in time, the next round, and its lateness in ns."""
    if late.get(seq, 0.0) < _MIN_LATE_NS:
        return None
    border_ns = late[seq] / 2
    first_late = seq
    while late.get(first_late - 1, 0.0) > border_ns:
        first_late -= 1
    # Where every round is late, the interval between two rounds is the step.
    return (
        (first_late - 1, first_late, late[first_late])
        if first_late - 1 in late
        else (seq - 1, seq, late[seq])
    )


def _rows(
    store: "Store",
    job: Job,
    comm: str,
    first_seq: int,
    last_seq: int,
    *,
    at_ns: int | None,
    ranks: list[int] | None = None,
    only: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    params = {
        "comm": comm,
        "first_seq": first_seq,
        "last_seq": last_seq,
        "from_ns": None if at_ns is None else at_ns - _AROUND_NS,
        "to_ns": None if at_ns is None else at_ns + _AROUND_NS,
        "ranks": ranks,
    }
    rows = store.ask("page_round", tenant=job.tenant, params=params, job=job.filter).to_pylist()
    return rows if only is None else [row for row in rows if row["seq"] in only]


def _missing(current: Mapping[int, Row]) -> dict[str, Any]:
    """The ranks of the communicator that have not arrived: their number, and the first of them where they are known.

    Ranks count in the job, so they are known for a communicator of the whole job only.
    """
    n_members = max(row["nranks"] or 0 for row in current.values())
    n_absent = max(n_members - len(current), 0)
    absent = [rank for rank in range(n_members) if rank not in current]
    return {"n": n_absent, "first": absent[:3] if len(absent) == n_absent else []}


def _us(row: Row | None, column: str, t0_ns: int) -> int | None:
    value = row[column] if row is not None else None
    return None if value is None or value <= 0 else round((value - t0_ns) / 1000)


def _spent_us(before: Row | None, after: Row | None, category: str) -> float | None:
    if before is None or after is None:
        return None
    begin, end = before[f"{category}_ns"], after[f"{category}_ns"]
    return None if begin is None or end is None else round((end - begin) / 1000, 3)
