"""Sample data to try queries on: three node traces and a hub's folder of one simulated job, with its known answer.

The job has 12 ranks on 3 nodes; from step 40 on, one rank waits for its disk every 7 steps. The traces need no optional
package; the hub's folder needs the extra `hub`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.errors import StorageFailed
from stallscope.events import layout
from stallscope.events.trace import Clock, Trace
from stallscope.store import node

RANKS, RANKS_PER_NODE, STEPS = 12, 4, 200
LATE_RANK, FIRST_STEP, EVERY, DELAY_MS = 6, 40, 7, 120
CLUSTER, TENANT = "demo", "default"
HUB_FOLDER, ANSWER_FILE = "hub", "answer.json"
_N_REQUESTS = 6
_PATIENCE_S = 60.0
_MAX_REQUEST_BYTES = 1 << 28


def write(folder: Path) -> list[Path]:
    """Write the data into a new folder. Returns the written files and folders.

    Raises StorageFailed for a folder that exists or cannot be written. Without the extra `hub` its folder is left out.
    """
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise StorageFailed(
            f"cannot create {folder}: {error.strerror}; name a folder that does not exist"
        ) from error
    traces = list(_by_node(_simulated()))
    paths = [folder / f"{each.nodes[0]}.db" for each in traces]
    for path, each in zip(paths, traces, strict=True):
        node.write(path, each)
    answer = folder / ANSWER_FILE
    answer.write_text(json.dumps(_answer(), indent=2) + "\n")
    try:
        _write_hub(folder / HUB_FOLDER, traces)
    except ModuleNotFoundError:
        return [*paths, answer]
    return [*paths, answer, folder / HUB_FOLDER]


def _simulated() -> Trace:
    from stallscope.synth import HostStall, Job, Schedule, simulate

    stall = HostStall(
        cause="block_io",
        ranks=(LATE_RANK,),
        delay_ns=DELAY_MS * 10**6,
        schedule=Schedule(first=FIRST_STEP, every=EVERY),
    )
    job = Job(dp=RANKS, ranks_per_node=RANKS_PER_NODE, steps=STEPS)
    trace, _ = simulate(job, [stall], seed=1, has_twin=False)
    return trace


def _answer() -> dict[str, Any]:
    """The known answer, from the fault that was injected."""
    return {
        "kind": "straggler",
        "ranks": [LATE_RANK],
        "cause": "block_io",
        "late_ms": DELAY_MS,
        "period_steps": EVERY,
        "first_step": FIRST_STEP,
    }


def _by_node(trace: Trace) -> Iterator[Trace]:
    """The trace of each node, as its own agent would have written it."""
    tables = (*layout.TABLES, *layout.NODE_TABLES)
    names = [table.name for table in tables if hasattr(trace, table.name)]
    for number, name in enumerate(trace.nodes):
        rows = {}
        for table in names:
            own = getattr(trace, table)
            own = own[own["node"] == number].copy()
            own["node"] = 0
            rows[table] = own
        yield replace(
            trace,
            nodes=(name,),
            clocks=tuple(replace(clock, node=0) for clock in trace.clocks if clock.node == number),
            ends_ns=(trace.ends_ns[number],),
            **rows,
        )


def _write_hub(folder: Path, traces: list[Trace]) -> None:
    """The folder of a hub that received the traces in small requests and diagnosed them continuously."""
    from stallscope.continuous import ContinuousDiagnosis
    from stallscope.diagnose import Stream
    from stallscope.receive import arrow
    from stallscope.store.hub.store import HubStore

    now_ns = time.time_ns()
    with (
        closing(HubStore.open(folder)) as store,
        closing(ContinuousDiagnosis(store, lambda: Stream(linger_ns=0))) as diagnosis,
    ):
        for part in range(_N_REQUESTS):
            for trace in traces:
                body = _request(trace, part, now_ns)
                store.append(arrow.decode(body, TENANT, limit=_MAX_REQUEST_BYTES)).result(_PATIENCE_S)
            _wait_until(diagnosis.is_idle)
        _wait_until(lambda: diagnosis.numbers.verdicts_opened > 0 and diagnosis.is_idle())


def _request(trace: Trace, part: int, now_ns: int) -> bytes:
    """One of the requests of an agent: a part of its collectives; processes first, the time ledger last."""
    from stallscope.exporters import hub_arrow, hub_batches

    clock = Clock(0, max(int(trace.collectives["ts_ns"].max()), *trace.ends_ns), now_ns)
    ranks = {pid: (rank, -1) for pid, rank in trace.processes[["pid", "rank"]].tolist()}
    rows = trace.collectives
    limits = np.linspace(rows["ts_ns"].min(), rows["ts_ns"].max() + 1, _N_REQUESTS + 1)[1:-1]
    tables = {"collectives": rows[np.digitize(rows["ts_ns"], limits) == part]}
    if part == 0:
        tables |= {name: getattr(trace, name) for name in ("processes", "communicators")}
    if part == _N_REQUESTS - 1:
        tables |= {name: getattr(trace, name) for name in ("calls", "snapshots")}
    on_wall = {
        table.name: hub_batches.on_wall_clock(table, tables[table.name], clock, trace.symbols, ranks=ranks)
        for table in layout.TABLES
        if len(tables.get(table.name, ()))
    }
    on_wall["clocks"] = hub_batches.clock_row(clock, is_synchronised=True)
    name = trace.nodes[0]
    return hub_arrow.request(on_wall, batch_id=f"{name}-{part}", node=name, cluster=CLUSTER, about={})


def _wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise StorageFailed(
                "the hub's folder was not diagnosed in time; run the command on an idle machine"
            )
        time.sleep(0.05)
