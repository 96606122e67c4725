"""Transfers of NCCL's proxies between machines: a slow interface names its rank, a slow path its two ends."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from stallscope.capture.gpu.nccl_ring import PROXY, RECORD, RecordFlag
from stallscope.diagnose import Report, diagnose
from stallscope.events.layout import Array
from stallscope.events.names import Op
from stallscope.events.trace import Trace

from .test_gpu_arrival import trace as job_trace
from .test_nccl_trace import N_RANKS, N_ROUNDS, Fault, job, trace_of

_MS = 1_000_000
Edge = tuple[int, int]


def proxies(operations: Array, sender: int, slow: Mapping[Edge, float], *, seed: int = 1) -> Array:
    """The transfers of a rank to the next rank of a ring, on two channels, with the receiver's view of the same data.

    slow: times as long, by sender and receiver. The side that receives waits for a late sender as well.
    """
    chance = np.random.default_rng(seed + sender)
    parts = []
    for channel in range(2):
        for peer, is_send in (((sender + 1) % N_RANKS, True), ((sender - 1) % N_RANKS, False)):
            edge = (sender, peer) if is_send else (peer, sender)
            rows = np.zeros(len(operations), RECORD)
            for name in ("comm_hash", "seq", "host_ns", "func", "rank"):
                rows[name] = operations[name]
            took = 2 * _MS * (1 + 0.1 * chance.random(len(rows))) * slow.get(edge, 1.0)
            took += 0 if is_send else 30 * _MS * (chance.random(len(rows)) < 0.1)
            rows["kind"], rows["peer"], rows["n_channels"] = PROXY, peer, channel
            rows["flags"] = RecordFlag.IS_SEND if is_send else 0
            rows["start_ns"], rows["stop_ns"] = took + 0.1 * _MS, took
            parts.append(rows)
    return np.concatenate(parts)


def recorded(slow: Mapping[Edge, float], fault: Fault | None = None) -> Trace:
    """A record of four ranks, one on each machine, by `plugin record`."""
    processes = job(fault or Fault(), runs_ahead=True)
    for pid, each in processes.items():
        each.records = np.concatenate([each.records, proxies(each.records, pid - 100, slow)])
    return on_four_nodes(trace_of(processes))


def on_four_nodes(trace: Trace) -> Trace:
    """The trace with each rank on a node of its own, whose clocks are equal."""
    tables = {}
    for name in ("processes", "gpu_kernels", "collectives"):
        rows = getattr(trace, name).copy()
        rows["node"] = rows["pid"] - 100
        tables[name] = rows
    clocks = tuple(replace(clock, node=node) for clock in trace.clocks for node in range(N_RANKS))
    nodes = tuple(f"n{node}" for node in range(N_RANKS))
    return replace(trace, **tables, nodes=nodes, clocks=clocks, ends_ns=trace.ends_ns * N_RANKS)


def links(report: Report) -> list[tuple[list[int], list[str], list[int] | None]]:
    return [
        (verdict.ranks, verdict.nodes, verdict.evidence.suspects)
        for verdict in report.verdicts
        if verdict.kind == "link"
    ]


def test_connections_of_similar_speed_are_healthy():
    report = diagnose(recorded({}))
    assert report.verdicts == [] and report.answer == "healthy", report.gaps


def test_a_slow_path_names_the_ranks_at_its_ends():
    report = diagnose(recorded({(1, 2): 4.0}))
    assert links(report) == [([], ["n1", "n2"], [1, 2])]
    (verdict,) = report.verdicts
    assert verdict.evidence.times_as_long == pytest.approx(4, rel=0.1)
    assert verdict.late_ms is not None and verdict.late_ms["median"] == pytest.approx(6.3, abs=0.6)
    assert verdict.summary.startswith("The network between ranks 1, 2 is slow: transfers take")
    assert verdict.cost is not None and verdict.cost.at_most_gpu_seconds == pytest.approx(
        N_ROUNDS * 6.3e-3 * N_RANKS, rel=0.1
    )


def test_a_slow_interface_names_its_rank_and_machine():
    report = diagnose(recorded({(1, 2): 5.0, (2, 3): 5.0}))
    assert links(report) == [([2], ["n2"], [1, 2, 3])]
    assert report.verdicts[0].summary.startswith("The network interface of rank 2 (n2) is slow")


def test_transfers_that_are_slow_for_a_few_rounds_are_not_reported():
    trace = recorded({(1, 2): 5.0})
    rows = trace.gpu_kernels
    is_slow = (rows["network_ns"] > 8 * _MS) & (rows["seq"] % 7 != 0)
    rows["network_ns"] = np.where(is_slow, 2 * _MS, rows["network_ns"])
    assert links(diagnose(trace)) == []


def test_a_path_that_is_slow_in_bursts_is_named():
    trace = recorded({(1, 2): 5.0})
    rows = trace.gpu_kernels
    is_fast = (rows["network_ns"] > 8 * _MS) & (rows["seq"] // 8 % 3 != 0)
    rows["network_ns"] = np.where(is_fast, 2 * _MS, rows["network_ns"])
    assert links(diagnose(trace)) == [([], ["n1", "n2"], [1, 2])]


def test_a_connection_that_becomes_slow_is_named_in_a_job_of_two_operations():
    """Each operation has numbers of its own."""
    trace = recorded({(1, 2): 4.0})
    rows = trace.gpu_kernels
    is_slow = (rows["network_ns"] > 7 * _MS) & (rows["seq"] < N_ROUNDS - 24)
    rows["network_ns"] = np.where(is_slow, 2 * _MS, rows["network_ns"])
    (one,) = diagnose(trace).verdicts
    rows["op"] = np.where(rows["seq"] % 2, Op.ALL_GATHER, Op.REDUCE_SCATTER)
    rows["seq"] //= 2
    (both,) = diagnose(trace).verdicts
    assert one.evidence.suspects == both.evidence.suspects == [1, 2]
    assert one.n_late_rounds == both.n_late_rounds == 24


def test_a_late_gpu_is_named_and_not_the_network():
    report = diagnose(recorded({}, Fault(2, 1)))
    assert [verdict.ranks for verdict in report.verdicts] == [[2]] and links(report) == []


def test_a_slow_interface_is_named_although_all_hosts_arrive_in_time():
    whole = job_trace(Fault())
    kernels = recorded({(0, 1): 5.0, (3, 0): 5.0}).gpu_kernels
    report = diagnose(replace(on_four_nodes(whole), gpu_kernels=kernels))
    assert links(report) == [([0], ["n0"], [0, 1, 3])]
