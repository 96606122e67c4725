"""From rows to metrics: every count equals the number of rows, for any split into batches."""

import numpy as np
import pytest

from stallscope.events import layout
from stallscope.events.names import CATEGORY_NAMES, P2P_OPS, Direction, MemoryKind, Op
from stallscope.events.trace import Trace
from stallscope.exporters.metric_updates import MetricUpdates
from stallscope.exporters.metric_values import Meter
from stallscope.synth import HostStall, Job, Schedule, simulate


@pytest.fixture(scope="module")
def trace() -> Trace:
    fault = HostStall(
        cause="host_sleep", ranks=(2,), delay_ns=50_000_000, schedule=Schedule(first=10, every=2)
    )
    return simulate(Job(dp=4, ranks_per_node=4, steps=30), [fault], seed=1, has_twin=False)[0]


def counted(trace: Trace, n_batches: int) -> dict[str, dict]:
    """The metrics after the rows arrived in this many batches, by time: name -> values -> series."""
    updates = MetricUpdates(Meter(0))
    updates.take(layout.PROCESSES, trace.processes)
    rows = trace.collectives[np.argsort(trace.collectives["ts_ns"], kind="stable")]
    for part in np.array_split(rows, n_batches):
        updates.take(layout.COLLECTIVES, part)
    updates.take(layout.SNAPSHOTS, trace.snapshots)
    return {m.name: {entry.values: entry for entry in series} for m, series in updates.meter.read()}


@pytest.mark.parametrize("n_batches", [1, 7])
def test_collectives_are_counted_by_rank_and_operation(trace: Trace, n_batches: int):
    result = counted(trace, n_batches)["nccl.collective.calls"]
    rank_of = dict(zip(trace.processes["pid"].tolist(), trace.processes["rank"].tolist(), strict=True))
    for (rank, op), entry in result.items():
        pids = [pid for pid, r in rank_of.items() if str(r) == rank]
        rows = trace.collectives
        assert entry.number == int((np.isin(rows["pid"], pids) & (rows["op"] == Op[op.upper()])).sum())
    assert sum(entry.number for entry in result.values()) == len(trace.collectives)


def test_batches_make_no_difference(trace: Trace):
    whole, parts = counted(trace, 1), counted(trace, 9)
    for name in ("nccl.collective.lateness", "nccl.collective.wait.duration", "gpu.cuda.calls"):
        for values, entry in whole[name].items():
            other = parts[name][values]
            assert (entry.number, entry.histogram and entry.histogram.counts) == (
                other.number,
                other.histogram and other.histogram.counts,
            )


def test_the_late_rank_is_late_and_waits_least(trace: Trace):
    result = counted(trace, 5)
    late = {
        values[0]: entry.histogram.total / entry.histogram.n
        for values, entry in result["nccl.collective.lateness"].items()
    }
    waits = {
        values[0]: entry.histogram.total for values, entry in result["nccl.collective.wait.duration"].items()
    }
    assert max(late, key=late.get) == "2"
    assert min(waits, key=waits.get) == "2"
    n_rounds = sum(entry.histogram.n for entry in result["nccl.collective.lateness"].values())
    assert n_rounds == int((~np.isin(trace.collectives["op"], P2P_OPS)).sum())


def test_the_ledger_metric_is_in_seconds(trace: Trace):
    result = counted(trace, 1)["gpu.process.time"]
    newest = {}
    for row in np.sort(trace.snapshots, order="ts_ns"):
        newest[int(row["pid"])] = row["ledger_ns"]
    total = np.sum(list(newest.values()), axis=0) / 1e9
    for name, seconds in zip(CATEGORY_NAMES, total.tolist(), strict=True):
        output = sum(entry.number for values, entry in result.items() if values[1] == name)
        assert output == pytest.approx(seconds)


def test_a_process_without_a_rank_has_the_rank_of_its_communicator(trace: Trace):
    updates = MetricUpdates(Meter(0))
    updates.take(layout.COLLECTIVES, trace.collectives)
    (series,) = [s for m, s in updates.meter.read() if m.name == "nccl.collective.wait.duration"]
    assert {entry.values for entry in series} == {("0",), ("1",), ("2",), ("3",)}


def test_call_metrics_have_durations_errors_and_bytes():
    updates = MetricUpdates(Meter(0))
    rows = layout.empty(layout.OPERATIONS, 2)
    rows["op"], rows["direction"], rows["count_bytes"] = Op.COPY, Direction.HOST_TO_DEVICE, 500
    rows["n"] = rows["n_seen"] = 7
    rows["total_ns"], rows["n_failed"] = 9000, [0, 3]
    rows["histogram"] = [b'{"2048":5,"4096":2}', b'{"2048":7}']
    updates.take(layout.OPERATIONS, rows)
    result = {metric.name: series for metric, series in updates.meter.read()}
    (durations,) = result["gpu.cuda.call.duration"]
    assert durations.values == ("unknown", "copy")
    assert durations.histogram.n == 14
    assert durations.histogram.total == pytest.approx(18e-6)
    assert durations.histogram.counts[1] == 12
    assert [entry.number for entry in result["gpu.cuda.errors"]] == [3]
    assert [(entry.values[1], entry.number) for entry in result["gpu.cuda.copied"]] == [
        ("host_to_device", 1000)
    ]


def test_calls_into_the_driver_have_metrics_of_their_own():
    updates = MetricUpdates(Meter(0))
    rows = layout.empty(layout.OPERATIONS, 1)
    rows["op"], rows["n"], rows["n_seen"], rows["total_ns"], rows["n_failed"] = Op.IOCTL, 7, 7, 9000, 2
    rows["histogram"] = [b'{"2048":7}']
    updates.take(layout.OPERATIONS, rows)
    result = {metric.name: series for metric, series in updates.meter.read()}
    (durations,) = result["gpu.driver.ioctl.duration"]
    assert (durations.values, durations.histogram.n) == (("unknown",), 7)
    assert durations.histogram.total == pytest.approx(9e-6)
    assert [entry.number for entry in result["gpu.driver.ioctl.errors"]] == [2]
    assert not result.get("gpu.cuda.call.duration") and not result.get("gpu.cuda.errors")


def test_the_memory_metric_is_the_current_value():
    updates = MetricUpdates(Meter(0))
    rows = layout.empty(layout.MEMORY, 1)
    rows["kind"], rows["device"] = MemoryKind.POOL, 3
    for live_bytes in (500, 200):
        rows["live_bytes"] = live_bytes
        updates.take(layout.MEMORY, rows)
    result = {metric.name: series for metric, series in updates.meter.read()}
    assert [(entry.values, entry.number) for entry in result["gpu.cuda.memory.usage"]] == [
        (("unknown", "3", "pool"), 200)
    ]


def test_an_owner_is_a_series_while_its_process_runs():
    updates = MetricUpdates(Meter(0))
    rows = layout.empty(layout.OWNERS, 2)
    rows["pid"], rows["owner_user"], rows["owner_namespace"] = [7, 8], [b"ann", b"bob"], b"vision"
    updates.take(layout.OWNERS, rows)
    updates.n_processes(2)
    updates.process_ended(7)
    updates.n_processes(1)
    ((metric, (series,)),) = [
        pair for pair in updates.meter.read() if pair[0].name == "stallscope.owner.info"
    ]
    values = dict(zip(metric.attributes, series.values, strict=True))
    assert {name: value for name, value in values.items() if value} == {
        "process.pid": "8",
        "nccl.rank": "unknown",
        "process.owner": "bob",
        "k8s.namespace.name": "vision",
    }


def test_requests_and_tokens_of_an_engine_are_histograms_by_model_and_path():
    updates = MetricUpdates(Meter(0))
    servers, requests = layout.empty(layout.SERVERS, 1), layout.empty(layout.REQUESTS, 3)
    tokens = layout.empty(layout.TOKENS, 1)
    for rows in (servers, requests):
        rows["pid"], rows["engine"], rows["model"] = 7, b"vllm", b"m"
    requests["path"], requests["end_ns"] = b"/v1", 500_000_000
    requests["first_ns"] = (150_000_000, 30_000_000, layout.UNKNOWN)
    tokens["pid"], tokens["path"], tokens["total_ns"] = 7, b"/v1", 40_000_000
    tokens["histogram"] = b'{"9000": 4}'
    for table, rows in ((layout.SERVERS, servers), (layout.REQUESTS, requests), (layout.TOKENS, tokens)):
        updates.take(table, rows)
    series = {metric.name: entries for metric, entries in updates.meter.read()}
    expected = {
        "time_to_first_token": (2, 0.18),
        "time_per_output_token": (4, 0.04),
        "request.duration": (3, 1.5),
    }
    for name, (n, total_s) in expected.items():
        (entry,) = series[f"gen_ai.server.{name}"]
        assert entry.values == ("vllm", "m", "/v1")
        assert (entry.histogram.n, entry.histogram.total) == (n, pytest.approx(total_s))


def test_the_series_of_open_incidents_follow_an_incident_whose_kind_or_cause_changes():
    updates = MetricUpdates(Meter(0))

    def numbers(name: str) -> dict[tuple[str, ...], float]:
        series = next(series for metric, series in updates.meter.read() if metric.name == name)
        return {entry.values: entry.number for entry in series}

    updates.incident("a", kind="inconclusive", cause="", is_open=True)
    updates.incident("a", kind="inconclusive", cause="", is_open=True)
    updates.incident("a", kind="straggler", cause="block_io", is_open=True)
    updates.incident("b", kind="straggler", cause="block_io", is_open=True)
    open_ = {("inconclusive", ""): 0, ("straggler", "block_io"): 2}
    assert numbers("stallscope.incidents.open") == open_
    assert numbers("stallscope.incidents") == {("inconclusive", ""): 1, ("straggler", "block_io"): 1}
    updates.incident("a", kind="straggler", cause="page_fault", is_open=False)
    updates.incident("b", kind="straggler", cause="block_io", is_open=False)
    assert numbers("stallscope.incidents.open") == dict.fromkeys(open_, 0)
