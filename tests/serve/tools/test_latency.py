"""Requests to inference engines at the hub: percentiles over machines, and the oldest open request."""

import numpy as np
import pytest
from tests.serve.tools import cluster

from stallscope.events.histograms import histogram
from stallscope.serve.tools.latency import LatencyParams, latency
from stallscope.serve.tools.tenant_context import TenantContext
from stallscope.store.hub.store import Batch

S = 1_000_000_000


def latency_row(now_ns: int, node: str, first_ms: int, n: int) -> dict[str, object]:
    lengths = histogram(np.full(n, first_ms * 1_000_000)).decode()
    names = {"cluster_id": "alpha", "node_id": node, "pid": 7, "engine": "vllm", "model": "m", "path": "/v1"}
    counts = {"n": n, "n_failed": 1, "n_aborted": 0, "n_tokens": 10 * n}
    return {"ts_ns": now_ns - S, **names, **counts, "first": lengths, "whole": lengths, "between": "{}"}


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """Two machines with the same model; a request on the second machine waits for its first token."""
    with cluster.hub_in(tmp_path_factory.mktemp("hub")) as hub:
        now_ns = hub.now_ns()
        sums = [latency_row(now_ns, "node-0", 10, 90), latency_row(now_ns, "node-1", 1000, 10)]
        server = {"cluster_id": "alpha", "node_id": "node-1", "pid": 7, "group_pid": 7, "engine": "vllm"}
        counts = {"n_open": 3, "n_full": 1, "oldest_ns": now_ns - 9 * S, "oldest_progress_ns": now_ns - 9 * S}
        servers = [{"ts_ns": now_ns - S, **server, **counts, "model": "m", "oldest_path": "/v1"}]
        tables = {"latencies": cluster.table("latencies", sums), "servers": cluster.table("servers", servers)}
        hub.store.append(Batch("", "a", tables)).result(30)
        yield TenantContext(hub, "a")


def test_percentiles_are_over_all_machines(context):
    (row,) = latency(context, LatencyParams()).rows
    assert (row.engine, row.model, row.path) == ("vllm", "m", "/v1")
    assert (row.n_requests, row.n_failed) == (100, 2)
    assert row.first_ms["p50"] == pytest.approx(10, rel=0.1)
    assert row.first_ms["p99"] == pytest.approx(1000, rel=0.1)
    assert row.between_ms == {}
    assert row.tokens_per_second == pytest.approx(10 * row.per_second, rel=1e-3)


def test_the_oldest_open_request_states_what_it_waits_for(context):
    answer = latency(context, LatencyParams())
    (waiting,) = answer.open_requests
    assert (waiting.node, waiting.n_open, waiting.n_full, waiting.still_s) == ("node-1", 3, 1, 8)
    assert "waits for the first token: 8 s" in answer.summary


def test_other_machines_and_tenants_have_no_rows(context):
    assert latency(context, LatencyParams(node="node-0")).open_requests == []
    assert latency(context, LatencyParams(cluster="beta")).rows == []
    assert latency(TenantContext(context.hub, "b"), LatencyParams()).rows == []
