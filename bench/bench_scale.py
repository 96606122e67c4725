"""Time and memory of the diagnosis of a large job: up to 10,240 ranks that enter 1,000 rounds each.

The job is a simulated data-parallel job in which one rank sleeps at times. Its collectives are columns, sorted by
process and time: only the columns that a diagnosis reads, and a single value for a constant column. Each size runs in
a separate process. The time is the duration of diagnose() on that trace. The memory is the peak of the resident set
during the diagnosis (VmHWM, reset before), the trace included.
"""

import json
import re
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
from report import report

from stallscope.diagnose.arrays.grouping import numbered, order_of
from stallscope.diagnose.engine import diagnose
from stallscope.events.columns import Columns
from stallscope.events.layout import COLLECTIVES, UNKNOWN, Array
from stallscope.events.names import N_CATEGORIES
from stallscope.events.trace import Trace
from stallscope.synth import HostStall, Job, Phase, Schedule, batches

RANKS = (1_280, 2_560, 5_120, 10_240)
ROUNDS = 1_000
CULPRIT = 7
ASKED_FOR = (
    *("ts_ns", "node", "pid", "comm_hash", "comm_handle", "comm_rank", "nranks", "seq", "op", "datatype"),
    *("flags", "peer_rank", "count", "gpu_start_ns", "gpu_end_ns", "wait_leave_ns"),
    *("n_syncs", "n_allocs", "n_copies", "n_launches", "ledger_ns"),
)


def main() -> None:
    """Measure each size in a process of its own, and report."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, help="measure this size only, in this process, and print it")
    ranks = parser.parse_args().ranks
    if ranks:
        print(json.dumps(measured(ranks)))
        return
    aparts = [_apart(n) for n in RANKS]
    per_row = [entry["us_per_row"] for entry in aparts]
    report(
        "scale", {"rounds": ROUNDS, "sizes": aparts, "us_per_row_ratio": round(per_row[-1] / per_row[0], 2)}
    )


def _apart(n_ranks: int) -> dict[str, float]:
    words = [sys.executable, __file__, "--ranks", str(n_ranks)]
    data: dict[str, float] = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    return data


def measured(n_ranks: int) -> dict[str, object]:
    """The diagnosis of one job."""
    begin = time.perf_counter()
    trace = simulated(n_ranks)
    made = time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak: see proc(5)
    held_mib, cpu = _resident_mib("VmRSS"), time.process_time()
    result = diagnose(trace)
    end, cpu = time.perf_counter(), time.process_time() - cpu
    n_rows = len(trace.collectives)
    return {
        "ranks": n_ranks,
        "rows": n_rows,
        "made_s": round(made - begin, 1),
        "diagnose_s": round(end - made, 2),
        "cpu_s": round(cpu, 2),
        "us_per_row": round((end - made) / n_rows * 1e6, 3),
        "trace_mib": held_mib,
        "peak_rss_mib": _resident_mib("VmHWM"),
        "named": sorted({rank for verdict in result.verdicts for rank in verdict.ranks}),
        "expected": [CULPRIT],
    }


def _resident_mib(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) // 1024 if match else UNKNOWN


def simulated(n_ranks: int) -> Trace:
    """A job whose ranks enter at least ROUNDS collectives each; its collectives column by column."""
    stall = HostStall(
        cause="host_sleep",
        ranks=(CULPRIT,),
        delay_ns=50_000_000,
        schedule=Schedule(first=10, every=7, where=Phase.BEGIN),
    )
    job = Job(dp=n_ranks, steps=ROUNDS)
    parts: dict[tuple[str, int], list[Array]] = {}
    n = 0
    for rows in batches(job, [stall], seed=1, n_rounds=ROUNDS):
        n += len(rows)
        for name in ASKED_FOR:
            column = rows[name].reshape(len(rows), -1)
            for i in range(column.shape[1]):
                parts.setdefault((name, i), []).append(_lean(column[:, i].copy()))
    order = order_of(*numbered(np.concatenate(parts["node", 0]), np.concatenate(parts["pid", 0])))
    held = {key: _joined(parts.pop(key), order) for key in list(parts)}
    ledger = tuple(held.pop(("ledger_ns", i)) for i in range(N_CATEGORIES))
    columns = {name: column for (name, _), column in held.items()} | {"ledger_ns": ledger}
    return Trace(
        collectives=Columns(COLLECTIVES, n, columns),  # type: ignore[arg-type]
        nodes=tuple(f"node{number:04d}" for number in range(job.n_nodes)),
        source=f"simulated job: {n_ranks} ranks",
    )


def _lean(column: Array) -> Array:
    """The column, as one value seen n times where it is."""
    return np.broadcast_to(column[0], column.shape) if (column == column[0]).all() else column


def _joined(parts: list[Array], order: Array) -> Array:
    """A column in order; the same value everywhere takes no memory."""
    if len({(part.strides, part[0]) for part in parts}) == 1 and parts[0].strides == (0,):
        return np.broadcast_to(parts[0][0], (len(order),))
    return np.concatenate(parts)[order]


if __name__ == "__main__":
    main()
