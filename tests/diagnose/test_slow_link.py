"""A slow link between the ranks of a group shows in its collectives on the GPUs."""

from dataclasses import replace

import numpy as np
import pytest

from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Answer
from stallscope.events import layout
from stallscope.events.trace import Trace

from .builders import MS, START_NS, TRANSFER_NS, Call, Job, trace_of
from .reports import only, report_of

N_STEPS = 60


def job(pairs: list[tuple[int, ...]], *, per_step: int = 4, n_nodes: int = 1, **rest) -> Job:
    """Pairs that reduce some times a step, and all ranks at its end."""
    n_ranks = sum(map(len, pairs))
    calls = tuple(Call(tuple(pairs), count=500 + i, work_ns=MS, gpu_ns=MS // 2) for i in range(per_step))
    everyone = Call((tuple(range(n_ranks)),), work_ns=MS, waits=True)
    return Job(
        (*calls, everyone),
        n_ranks=n_ranks,
        n_steps=N_STEPS,
        node=tuple(rank * n_nodes // n_ranks for rank in range(n_ranks)),
        offset_ns=tuple(5_000 * MS * i for i in range(n_nodes)),
        has_gpu_times=True,
        **rest,
    )


def pairs(n: int) -> list[tuple[int, ...]]:
    return [(2 * i, 2 * i + 1) for i in range(n)]


@pytest.mark.parametrize(
    ("n_pairs", "slow", "since", "longer_ns", "n_nodes"),
    [
        (8, (6, 7), 10, 5 * TRANSFER_NS, 2),
        (4, (0, 1), 0, 8 * TRANSFER_NS, 1),
        (2, (2, 3), 30, 6 * TRANSFER_NS, 1),
        (8, (14, 15), 45, 10 * TRANSFER_NS, 4),
    ],
)
def test_the_group_with_a_slow_link_is_reported(n_pairs, slow, since, longer_ns, n_nodes):
    made = job(pairs(n_pairs), n_nodes=n_nodes, slow_links={slow: (since, longer_ns)})
    report = report_of(trace_of(made))
    verdict = only(report)
    assert report.answer is Answer.FOUND
    assert (verdict.kind, verdict.ranks) == ("link", [])
    assert verdict.evidence.suspects == list(slow)
    assert verdict.late_ms["median"] == pytest.approx(4 * longer_ns / MS, rel=0.1)
    assert verdict.evidence.times_as_long == pytest.approx(1 + longer_ns / TRANSFER_NS, rel=0.1)


def test_a_slowdown_of_all_groups_is_not_a_slow_link():
    slow = dict.fromkeys(pairs(4), (30, 5 * TRANSFER_NS))
    verdicts = report_of(trace_of(job(pairs(4), slow_links=slow))).verdicts
    assert all(verdict.evidence.suspects is None for verdict in verdicts)


def test_groups_that_span_nodes_may_be_slower_than_groups_that_do_not():
    groups: list[tuple[int, ...]] = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 12), (9, 13), (10, 14), (11, 15)]
    slow = dict.fromkeys(groups[4:], (0, 5 * TRANSFER_NS))
    assert report_of(trace_of(job(groups, n_nodes=4, slow_links=slow))).verdicts == []


def test_a_healthy_job_has_no_slow_link():
    assert report_of(trace_of(job(pairs(8), n_nodes=2))).verdicts == []


def with_link_errors(trace: Trace, errors: dict[int, int], **of_faulty: int) -> Trace:
    """Two readings of each rank's GPU. errors: growth of the NVLink errors between the readings, by rank."""
    n = len(trace.processes)
    rows = layout.empty(layout.GPUS, 2 * n)
    rows["ts_ns"] = np.repeat([START_NS, START_NS + 100 * MS], n)
    rows["gpu"] = np.tile(np.arange(n), 2)
    rows["sm_max_mhz"], rows["n_nvlinks_up"], rows["n_nvlink_errors"], rows["n_ecc_corrected"] = (
        1980,
        18,
        7,
        3,
    )
    for rank, grown in errors.items():
        rows["n_nvlink_errors"][n + rank] += grown
        for name, value in of_faulty.items():
            rows[name][n + rank] = value
    processes = trace.processes.copy()
    processes["device"] = processes["rank"]
    return replace(trace, gpus=rows, processes=processes)


def test_a_slow_link_states_the_errors_of_its_gpus():
    slow = trace_of(job(pairs(4), slow_links={(2, 3): (0, 8 * TRANSFER_NS)}))
    report = report_of(with_link_errors(slow, {3: 120}, xid=74, n_ecc_corrected=99))
    verdict = only(report)
    assert verdict.evidence.suspects == [2, 3]
    assert verdict.evidence.link_states == ["rank 3: NVLink errors +120, other GPUs +0; Xid 74"]
    assert "rank 3: NVLink errors +120" in text.report(report)


def test_a_slow_link_without_errors_states_none():
    slow = trace_of(job(pairs(4), slow_links={(2, 3): (0, 8 * TRANSFER_NS)}))
    assert only(report_of(with_link_errors(slow, {}))).evidence.link_states is None
