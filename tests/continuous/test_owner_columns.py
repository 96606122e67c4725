"""The owner of a job on its way from the agent to the hub's columns, whichever way the rows are sent."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from stallscope.continuous import ContinuousDiagnosis
from stallscope.events import layout
from stallscope.events.owner import column
from stallscope.events.trace import Clock, Trace
from stallscope.exporters import hub_arrow, hub_batches, hub_logs
from stallscope.receive import arrow
from stallscope.receive.otlp_requests import Decoder
from stallscope.store.hub.store import Batch, HubStore

from ..patience import until
from ..store.hub.rows import sql
from .test_continuous_diagnosis import TENANT, slow_job, store  # noqa: F401 (a fixture)


def owned(trace: Trace) -> Trace:
    """The trace with an owner for each process: one user, a pod of its own."""
    rows = layout.empty(layout.OWNERS, len(trace.processes))
    for name in ("ts_ns", "node", "pid"):
        rows[name] = trace.processes[name]
    rows[column("user")], rows[column("job")] = b"ann", b"4711"
    rows[column("pod")] = [b"p%d" % rank for rank in trace.processes["rank"]]
    return replace(trace, owners=rows)


def body(trace: Trace, request) -> bytes:
    latest_ns = int(trace.collectives["ts_ns"].max())
    clock = Clock(0, latest_ns, latest_ns + 10**18)
    tables = {
        table.name: hub_batches.on_wall_clock(table, getattr(trace, table.name), clock, trace.symbols)
        for table in layout.SENT_TABLES
        if len(getattr(trace, table.name))
    }
    return request(tables, batch_id="b", node="host-a", cluster="c1", about={})


def as_arrow(trace: Trace) -> Batch:
    return arrow.decode(body(trace, hub_arrow.request), TENANT, limit=1 << 28)


def as_logs(trace: Trace) -> Batch:
    return Decoder().decode("logs", body(trace, hub_logs.request), TENANT).batch


@pytest.mark.parametrize("form", [as_arrow, as_logs])
def test_verdicts_and_jobs_have_the_owner_in_columns(store: HubStore, form):  # noqa: F811
    trace = owned(slow_job())
    with closing(ContinuousDiagnosis(store)):
        store.append(form(trace)).result(30)
        until(lambda: sql(store, "SELECT 1 FROM verdicts", TENANT))
        until(lambda: sql(store, "SELECT 1 FROM jobs WHERE owner_user IS NOT NULL", TENANT))
        columns = "owner_user, owner_job, owner_pod, owner_account"
        # Rank 2 is named, and has a pod; the ranks of the job have no pod in common.
        assert sql(store, f"SELECT {columns} FROM verdicts", TENANT) == [("ann", "4711", "p2", None)]
        assert sql(store, f"SELECT {columns} FROM jobs", TENANT) == [("ann", "4711", None, None)]
        n = len(np.unique(trace.processes["pid"]))
        question = "SELECT count(DISTINCT pid), min(owner_user), min(node_id) FROM owners"
        assert sql(store, question, TENANT) == [(n, "ann", "host-a")]
