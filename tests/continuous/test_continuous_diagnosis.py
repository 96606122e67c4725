"""The continuous diagnosis of a hub: rows of a job as agents send them, verdicts as rows, across a restart."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stallscope.continuous import ContinuousDiagnosis
from stallscope.continuous.backlog import BacklogLimits
from stallscope.diagnose import Stream, diagnose
from stallscope.errors import Overloaded
from stallscope.events import layout
from stallscope.events.names import Category
from stallscope.events.trace import Clock, Trace
from stallscope.exporters import hub_arrow, hub_batches, hub_logs
from stallscope.receive import arrow
from stallscope.receive.otlp_requests import Decoder
from stallscope.store.hub.store import Batch, HubStore

from ..diagnose.builders import MS, Job, data_parallel, dp_trace, every, trace_of
from ..diagnose.slack import slack_trace
from ..patience import until
from ..store.hub.rows import sql, without_commits

TENANT = "a"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HubStore]:
    with closing(HubStore.open(tmp_path)) as made:
        yield made


def slow_job() -> Trace:
    """A data-parallel job in which rank 2 is stalled by a disk in every seventh step."""
    return dp_trace(every(2, 7, 50 * MS, category=Category.IO))


def sent(
    trace: Trace, request: Callable[..., bytes], batch_id: str, cluster: str = "c1", *, n_lost: int = 0
) -> bytes:
    """The trace's rows as an agent of its node would send them now. n_lost: records that the agent lost."""
    latest_ns = max(int(rows["ts_ns"].max()) for rows in (trace.collectives,) if len(rows))
    clock = Clock(0, latest_ns, time.time_ns())
    tables: Mapping[str, layout.Array] = {
        table.name: hub_batches.on_wall_clock(table, getattr(trace, table.name), clock, trace.symbols)
        for table in layout.TABLES
        if len(getattr(trace, table.name))
    }
    if n_lost:
        tables = {**tables, "losses": hub_batches.loss_rows(clock.wall_ns, {"ring": n_lost})}
    return request(tables, batch_id=batch_id, node="host-a", cluster=cluster, about={"agent": "stallscope 1"})


def as_arrow(trace: Trace, batch_id: str, cluster: str = "c1", *, n_lost: int = 0) -> Batch:
    request = sent(trace, hub_arrow.request, batch_id, cluster, n_lost=n_lost)
    return arrow.decode(request, TENANT, limit=1 << 28)


def as_logs(trace: Trace, batch_id: str, *, n_lost: int = 0) -> Batch:
    request = sent(trace, hub_logs.request, batch_id, n_lost=n_lost)
    return Decoder().decode("logs", request, TENANT).batch


def parts(trace: Trace, n: int) -> list[Trace]:
    """The trace in n pieces of time."""
    edges = np.linspace(trace.collectives["ts_ns"].min(), trace.collectives["ts_ns"].max() + 1, n + 1)
    which = np.digitize(trace.collectives["ts_ns"], edges[1:-1])
    return [
        replace(
            trace,
            collectives=trace.collectives[which == i],
            processes=trace.processes if not i else trace.processes[:0],
            communicators=trace.communicators if not i else trace.communicators[:0],
        )
        for i in range(n)
    ]


def verdicts(store: HubStore) -> list[tuple[object, ...]]:
    return sql(
        store, "SELECT kind, rank, node_id, cluster_id, cause, state FROM verdicts ORDER BY opened_at", TENANT
    )


@pytest.mark.parametrize("form", [as_arrow, as_logs], ids=["arrow", "otlp"])
def test_a_straggler_is_a_row_with_its_cause_whichever_way_the_events_came(store: HubStore, form):
    with closing(ContinuousDiagnosis(store)) as diagnosis:
        store.append(form(slow_job(), "b1")).result(30)
        until(lambda: verdicts(store))
        assert verdicts(store) == [("straggler", 2, "host-a", "c1", "block_io", "open")]
        ((share, ranks, whole),) = sql(store, "SELECT cause_share, ranks, verdict FROM verdicts", TENANT)
        assert share == pytest.approx(1.0, abs=0.02) and json.loads(str(ranks)) == [2]
        assert json.loads(str(whole))["causes"][0]["cause"] == "block_io"
        ((chain, severity, state),) = sql(
            store, "SELECT causal_chain_id, severity, state FROM causal_chains", TENANT
        )
        ((of_verdict,),) = sql(store, "SELECT severity FROM verdicts", TENANT)
        assert (severity, state) == (str(of_verdict).upper(), "open")
        assert sql(store, "SELECT verdict_id FROM verdicts", TENANT) == [(chain,)]
        assert diagnosis.numbers.diagnosis_failures == 0


def test_events_that_come_in_pieces_and_twice_make_one_verdict(store: HubStore):
    with closing(ContinuousDiagnosis(store)) as diagnosis:
        pieces = parts(slow_job(), 6)
        first = max(int(piece.collectives["ts_ns"].max()) for piece in pieces)
        clock = Clock(0, first, time.time_ns())
        for number, piece in enumerate(pieces):
            tables = {
                table.name: hub_batches.on_wall_clock(table, getattr(piece, table.name), clock, piece.symbols)
                for table in layout.TABLES
                if len(getattr(piece, table.name))
            }
            body = hub_arrow.request(tables, batch_id=f"p{number}", node="host-a", cluster="c1", about={})
            for _ in range(2):
                store.append(arrow.decode(body, TENANT, limit=1 << 28)).result(30)
        until(diagnosis.is_idle)
        assert verdicts(store) == [("straggler", 2, "host-a", "c1", "block_io", "open")]


COSTS = "gpu_seconds, at_most_gpu_seconds, usd, at_most_usd"


@pytest.mark.parametrize(("trace", "is_range"), [(slow_job(), False), (slack_trace(), True)])
def test_a_verdict_row_has_an_upper_cost_bound_only_for_a_range(
    store: HubStore, trace: Trace, is_range: bool
):
    with closing(ContinuousDiagnosis(store, lambda: Stream(usd_per_gpu_hour=3600.0))):
        store.append(as_arrow(trace, "b1")).result(30)
        until(lambda: verdicts(store))
        ((seconds, max_seconds, usd, max_usd, whole),) = sql(
            store, f"SELECT {COSTS}, verdict FROM verdicts", TENANT
        )
    assert seconds == pytest.approx(usd, abs=0.001)
    if is_range:
        assert max_seconds > seconds and max_usd == pytest.approx(max_seconds, abs=0.001)
    else:
        assert (max_seconds, max_usd) == (None, None)
    cost = json.loads(str(whole))["cost"]
    assert [cost[name] for name in COSTS.split(", ")] == [seconds, max_seconds, usd, max_usd]


def test_a_healthy_job_has_no_verdict(store: HubStore):
    with closing(ContinuousDiagnosis(store)) as diagnosis:
        store.append(as_arrow(dp_trace(n_ranks=8), "b1")).result(30)
        until(lambda: diagnosis.numbers.diagnosis_rows and diagnosis.is_idle())
        assert verdicts(store) == []


@pytest.mark.parametrize("form", [as_arrow, as_logs])
@pytest.mark.parametrize(("n_lost", "answer"), [(0, "healthy"), (400, "inconclusive")])
def test_a_job_whose_agents_lost_records_is_inconclusive(store: HubStore, form, n_lost: int, answer: str):
    with closing(ContinuousDiagnosis(store)) as diagnosis:
        store.append(form(dp_trace(n_ranks=8), "b1", n_lost=n_lost)).result(30)
        until(lambda: diagnosis.numbers.diagnosis_rows and diagnosis.is_idle())
        until(lambda: [row[0] for row in sql(store, "SELECT answer FROM jobs", TENANT)] == [answer])


def test_clusters_are_diagnosed_apart(store: HubStore):
    with closing(ContinuousDiagnosis(store)):
        store.append(as_arrow(slow_job(), "b1", "c1")).result(30)
        store.append(as_arrow(dp_trace(), "b2", "c2")).result(30)
        until(lambda: verdicts(store))
        assert {row[3] for row in verdicts(store)} == {"c1"}


def test_after_a_restart_the_stored_verdicts_are_continued(tmp_path: Path):
    with closing(HubStore.open(tmp_path)) as store, closing(ContinuousDiagnosis(store)):
        store.append(as_arrow(slow_job(), "b1")).result(30)
        until(lambda: verdicts(store))
        before = sql(store, "SELECT verdict_id, opened_at FROM verdicts", TENANT)
        store.seal_all()
    with closing(HubStore.open(tmp_path)) as store, closing(ContinuousDiagnosis(store)) as diagnosis:
        until(lambda: diagnosis.numbers.diagnosis_rows and diagnosis.is_idle())
        assert sql(store, "SELECT verdict_id, opened_at FROM verdicts WHERE state = 'open'", TENANT) == before


def test_an_open_incident_that_no_stream_sees_again_is_closed(tmp_path: Path, monkeypatch):
    with closing(HubStore.open(tmp_path)) as store, closing(ContinuousDiagnosis(store)):
        store.append(as_arrow(slow_job(), "b1")).result(30)
        until(lambda: verdicts(store))
    monkeypatch.setattr("stallscope.continuous.shard._TAIL_S", 0.0)
    monkeypatch.setattr("stallscope.continuous.continued.GRACE_S", 0.0)
    with closing(HubStore.open(tmp_path)) as store, closing(ContinuousDiagnosis(store)):
        until(lambda: verdicts(store)[0][-1] == "closed")


def test_an_incident_that_cannot_be_closed_while_the_store_refuses_rows_is_closed_later(
    tmp_path: Path, monkeypatch
):
    with closing(HubStore.open(tmp_path)) as store, closing(ContinuousDiagnosis(store)):
        store.append(as_arrow(slow_job(), "b1")).result(30)
        until(lambda: verdicts(store))
    monkeypatch.setattr("stallscope.continuous.shard._TAIL_S", 0.0)
    monkeypatch.setattr("stallscope.continuous.continued.GRACE_S", 0.0)
    with closing(HubStore.open(tmp_path)) as store:
        commit, n_refused = store._journal.commit, 0

        def refused_twice(*args, **named):
            nonlocal n_refused
            if n_refused < 2:
                n_refused += 1
                raise Overloaded("the database does not answer", 0.1)
            commit(*args, **named)

        monkeypatch.setattr(store._journal, "commit", refused_twice)
        with closing(ContinuousDiagnosis(store)):
            until(lambda: verdicts(store)[0][-1] == "closed")
        assert n_refused == 2


def test_an_open_incident_keeps_its_id_and_cost_after_a_restart(tmp_path: Path, monkeypatch):
    long_job = trace_of(
        Job(
            data_parallel(4), n_steps=240, delays=tuple(every(2, 5, 50 * MS, category=Category.IO, until=240))
        )
    )
    bodies = requests_of(long_job, 8)
    columns = "verdict_id, opened_at, since_ns, gpu_seconds"
    with closing(HubStore.open(tmp_path)) as store, closing(ContinuousDiagnosis(store)) as diagnosis:
        for body in bodies[:4]:
            store.append(arrow.decode(body, TENANT, limit=1 << 28)).result(30)
            until(diagnosis.is_idle)
        ((*before, _),) = sql(store, f"SELECT {columns} FROM verdicts", TENANT)
    monkeypatch.setattr("stallscope.continuous.shard._TAIL_S", 0.0)
    with closing(HubStore.open(tmp_path)) as store:
        with closing(ContinuousDiagnosis(store, lambda: Stream(linger_ns=0))) as diagnosis:
            for body in bodies[4:]:
                store.append(arrow.decode(body, TENANT, limit=1 << 28)).result(30)
                until(diagnosis.is_idle)
            until(lambda: verdicts(store)[0][-1] == "closed")
        ((*after, cost),) = sql(store, f"SELECT {columns} FROM verdicts", TENANT)
    assert after == before
    (whole,) = diagnose(long_job).verdicts
    assert whole.cost is not None and cost == pytest.approx(whole.cost.gpu_seconds, rel=0.1)


def test_a_closed_incident_is_neither_opened_again_nor_stored_twice_by_a_restart(tmp_path: Path):
    with closing(HubStore.open(tmp_path)) as store:
        with closing(ContinuousDiagnosis(store, lambda: Stream(linger_ns=0))) as diagnosis:
            for body in requests_of(slow_job(), 3):
                store.append(arrow.decode(body, TENANT, limit=1 << 28)).result(30)
                until(diagnosis.is_idle)
            until(lambda: verdicts(store)[0][-1] == "closed")
        before = sql(store, "SELECT * FROM verdicts", TENANT)
        with closing(ContinuousDiagnosis(store, lambda: Stream(linger_ns=0))) as diagnosis:
            until(lambda: diagnosis.numbers.diagnosis_rows and diagnosis.is_idle())
            until(lambda: not diagnosis.confirmed_ns(TENANT))
            assert (diagnosis.numbers.verdicts_opened, diagnosis.numbers.verdicts_closed) == (0, 0)
        assert sql(store, "SELECT * FROM verdicts", TENANT) == before


def requests_of(trace: Trace, n: int) -> list[bytes]:
    """The trace in requests of equal time; processes end with the last."""
    end_ns = int(trace.collectives["ts_ns"].max())
    clock = Clock(0, end_ns, time.time_ns())
    bodies = []
    for number, part in enumerate(parts(trace, n)):
        tables = {name: getattr(part, name) for name in ("collectives", "processes", "communicators")}
        if number == n - 1:
            tables["processes"] = trace.processes.copy()
            tables["processes"]["ended_ns"] = end_ns
        on_wall = {
            table.name: hub_batches.on_wall_clock(table, tables[table.name], clock, trace.symbols)
            for table in layout.TABLES
            if len(tables.get(table.name, ()))
        }
        bodies.append(
            hub_arrow.request(on_wall, batch_id=f"r{number}", node="host-a", cluster="c1", about={})
        )
    return bodies


def test_a_flood_of_one_cluster_neither_delays_another_nor_stays_unsaid(store: HubStore):
    """More rows of c1 than the diagnosis examines, and a straggler in c2 behind them."""
    with closing(
        ContinuousDiagnosis(store, bounds=BacklogLimits(turn_rows=500, max_rows=1_000))
    ) as diagnosis:
        with without_commits(store):
            flood = [store.append(as_arrow(dp_trace(seed=seed), f"f{seed}", "c1")) for seed in range(8)]
            late = store.append(as_arrow(slow_job(), "s1", "c2"))
        for entry in (*flood, late):
            entry.result(30)
        until(lambda: diagnosis.is_idle() and verdicts(store))
        assert {row[1:4] for row in verdicts(store)} == {(2, "host-a", "c2")}
        assert diagnosis.numbers.diagnosis_rows_left_out > 0
