"""Time to explain a trace: the largest recording once, and repeated 16 and 131 times (a million collectives).

The copies follow each other in time like one longer job: the numbers of rounds, ledgers and counts continue. The time
includes reading the node trace. The memory is the peak of the process.
"""

import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench_import import recordings
from report import report

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.engine import diagnose
from stallscope.events.layout import TABLES, UNKNOWN, Array, Table
from stallscope.events.names import P2P_OPS
from stallscope.events.trace import Trace
from stallscope.importers import importer_for
from stallscope.store import node

TIMES = (1, 16, 131)
N_TURNS = 3
RUNNING_SUMS = ("ledger_ns", "n_syncs", "n_allocs", "n_copies", "n_launches")
NO_EVENT_TIME = ("duration_ns", "runnable_ns", "ledger_ns")


def main() -> None:
    """Measure and report."""
    folder = max(recordings(), key=lambda path: (path / "events.parquet").stat().st_size)
    trace = importer_for(folder).read(folder)
    measureds = [measured(repeated(trace, n), n) for n in TIMES]
    rss_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report("explain", {"recording": folder.name, "sizes": measureds, "max_rss_mib": round(rss_mib)})


def measured(trace: Trace, n_times: int) -> dict[str, object]:
    """Times of reading and of diagnosing one trace, and the named ranks."""
    with tempfile.TemporaryDirectory() as target:
        path = Path(target) / "trace.db"
        node.write(path, trace)
        turns = [timed(path) for _ in range(N_TURNS)]
    read_s, diagnose_s, named, *_ = min(turns, key=lambda turn: turn[0] + turn[1])
    return {
        "times": n_times,
        "n_collectives": len(trace.collectives),
        "explain_s": round(read_s + diagnose_s, 3),
        "read_s": round(read_s, 3),
        "diagnose_s": round(diagnose_s, 3),
        "explain_cpu_s": round(min(turn[3] + turn[4] for turn in turns), 2),
        "read_cpu_us_per_collective": round(min(turn[3] for turn in turns) / len(trace.collectives) * 1e6, 2),
        "diagnose_cpu_us_per_collective": round(
            min(turn[4] for turn in turns) / len(trace.collectives) * 1e6, 2
        ),
        "named": named,
    }


def timed(path: Path) -> tuple[float, float, list[int], float, float]:
    """Seconds to read and to diagnose, the ranks named, and the processor time of both parts."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    trace = node.read(path)
    read, read_cpu = time.perf_counter(), time.process_time()
    result = diagnose(trace)
    end, end_cpu = time.perf_counter(), time.process_time()
    named = sorted({rank for verdict in result.verdicts for rank in verdict.ranks})
    return read - begin, end - read, named, read_cpu - begin_cpu, end_cpu - read_cpu


def repeated(trace: Trace, n_times: int) -> Trace:
    """The trace n times, one after the other."""
    rows = trace.collectives
    gap_ns = int(np.median(np.diff(np.sort(rows["ts_ns"])))) + 1
    span_ns = int(rows["ts_ns"].max() - rows["ts_ns"].min()) + gap_ns
    tables = {table.name: _repeated(table, getattr(trace, table.name), n_times, span_ns) for table in TABLES}
    tables["collectives"] = _continued(trace, n_times, span_ns)
    ends_ns = tuple(end + (n_times - 1) * span_ns if end != UNKNOWN else end for end in trace.ends_ns)
    return replace(trace, **tables, ends_ns=ends_ns)


def _repeated(table: Table, rows: Array, n_times: int, span_ns: int) -> Array:
    if any(field.name == "ended_ns" for field in table.fields):
        return rows
    return np.concatenate([_later(rows, k * span_ns) for k in range(n_times)])


def _continued(trace: Trace, n_times: int, span_ns: int) -> Array:
    """Arrivals with round numbers and running sums that go on from copy to copy."""
    rows = trace.collectives
    parts = [_later(rows, k * span_ns) for k in range(n_times)]
    is_p2p = np.isin(rows["op"], P2P_OPS)
    counted_apart = [rows["comm_hash"], rows["pid"], rows["op"] * is_p2p, rows["peer_rank"] * is_p2p]
    comm = numbered(*counted_apart)[0]
    n_rounds = np.zeros(comm.max() + 1, np.int64)
    np.maximum.at(n_rounds, comm, rows["seq"] + 1)
    for pid in np.unique(rows["pid"]):
        indexes = np.flatnonzero(rows["pid"] == pid)
        first, last = rows[indexes[0]], rows[indexes[-1]]
        for k, part in enumerate(parts):
            for name in RUNNING_SUMS:
                part[name][indexes] += k * (last[name] - first[name]).astype(part[name].dtype)
    for k, part in enumerate(parts):
        part["seq"] += k * n_rounds[comm]
    return np.concatenate(parts)


def _later(rows: Array, ns: int) -> Array:
    out = rows.copy()
    for name in out.dtype.names or ():
        if name.endswith("_ns") and name not in NO_EVENT_TIME:
            out[name] = np.where(out[name] == UNKNOWN, UNKNOWN, out[name] + ns)
    return out


if __name__ == "__main__":
    main()
