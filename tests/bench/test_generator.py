"""The second generator obeys physics, states the truth, and its judge is neither blind nor lenient."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "bench" / "accuracy"
sys.path.insert(0, str(FOLDER))

from answers import answer  # noqa: E402
from generator import jobs  # noqa: E402
from generator.device import Device, Meeting, Work  # noqa: E402
from generator.machine import QUEUE, Group, Machine  # noqa: E402
from generator.program import Collective, Host, Kernel, Stop, Sync  # noqa: E402

from stallscope.diagnose.report.verdict import Report, Verdict  # noqa: E402
from stallscope.events.names import Category, Op  # noqa: E402
from stallscope.events.trace import Trace  # noqa: E402

MS = 1_000_000
REDUCE = Collective(0, Op.ALL_REDUCE, 1000, MS, 100_000)


def run(*programs: list[object]) -> Machine:
    """Processes of one group, each with a program of one step."""
    machine = Machine(
        [Group(tuple(range(len(programs))), 1)], [[list(made)] for made in programs], [0] * len(programs)
    )
    machine.run(range(len(programs)))
    return machine


def test_a_collective_begins_with_its_last_member_and_ends_for_all_together() -> None:
    device, meeting = Device(), Meeting(2)
    first, second = Work(0, 3 * MS, 0, meeting), Work(7 * MS, 2 * MS, 0, meeting)
    device.enqueue(first, ())
    assert first.end_ns is None
    device.enqueue(second, ())
    assert first.end_ns == second.end_ns == 7 * MS + 3 * MS


def test_ranks_wait_for_a_late_rank_in_the_synchronise_call() -> None:
    machine = run([REDUCE, Sync(10_000)], [Host(Category.IO, 20 * MS), REDUCE, Sync(10_000)])
    on_time, late = machine.hosts
    assert late.ledger[Category.IO - 1] == 20 * MS
    assert on_time.ledger[Category.WAIT_GPU - 1] - late.ledger[Category.WAIT_GPU - 1] == 20 * MS
    assert on_time.now_ns == late.now_ns


def test_the_gpu_absorbs_a_delay_of_the_host() -> None:
    def ends(delay_ns: int) -> int:
        busy = [Kernel(50 * MS, 8, 100_000), Host(Category.SLEEP, delay_ns), Kernel(MS, 8, 100_000)]
        return max(host.now_ns for host in run([*busy, REDUCE, Sync(0)], [*busy, REDUCE, Sync(0)]).hosts)

    assert ends(30 * MS) == ends(0)
    assert ends(80 * MS) > ends(0) + 25 * MS


def test_a_host_runs_ahead_by_the_launch_queue_only() -> None:
    kernels = [Kernel(10 * MS, QUEUE // 4, 100_000) for _ in range(8)]
    assert run([*kernels, Sync(0)]).log.calls[0][3] == Op.LAUNCH
    assert [call[3] for call in run([*kernels[:4], Sync(0)]).log.calls] == [Op.SYNC]


def test_a_rank_that_stops_holds_the_others_in_the_synchronise_call() -> None:
    machine = run([REDUCE, Sync(0)], [Stop(Category.SLEEP)])
    assert [host.done for host in machine.hosts] == [False, False]
    machine.watch([0, 1], 5_500 * MS)
    assert [(row[0], row[3]) for row in machine.log.snapshots if row[1] == 5_000 * MS] == [
        (0, Category.WAIT_GPU),
        (1, Category.SLEEP),
    ]


@pytest.mark.parametrize("shape", ["run_ahead", "experts", "elastic", "attached_late", "subgroups"])
def test_ledgers_fill_the_time_and_no_rank_is_released_early(shape: str) -> None:
    trace, truth = jobs.job(shape, "", 3)
    assert truth.fault is None
    begins = {(node, pid): ts_ns for node, pid, ts_ns in trace.processes[["node", "pid", "ts_ns"]].tolist()}
    for rows in (trace.collectives, trace.snapshots):
        since = rows["ts_ns"] - np.array([begins[process] for process in rows[["node", "pid"]].tolist()])
        assert (rows["ledger_ns"].sum(axis=1) == since).all()
        assert (rows["ledger_ns"] >= 0).all()
    assert _n_released_early(trace) == 0


def _n_released_early(trace: Trace) -> int:
    """Waits on the first node that ended before all its members had entered the last round before them."""
    kept = trace.collectives
    kept = kept[(kept["node"] == 0) & (kept["op"] == Op.ALL_REDUCE) & (kept["comm_hash"] != 0)]
    rows = kept[["pid", "comm_hash", "seq", "ts_ns", "wait_enter_ns", "wait_leave_ns"]].tolist()
    arrived: dict[tuple[int, int], int] = {}
    for _, comm, seq, ts_ns, _, _ in rows:
        arrived[comm, seq] = max(arrived.get((comm, seq), 0), ts_ns)
    n = 0
    last: dict[tuple[int, int], tuple[int, int]] = {}
    for pid, comm, seq, ts_ns, enter_ns, leave_ns in rows:
        seq_before, ts_before = last.get((pid, comm), (-1, 0))
        n += seq_before >= 0 and ts_before <= enter_ns and leave_ns < arrived[comm, seq_before]
        last[pid, comm] = seq, ts_ns
    return n


def test_the_same_seed_gives_the_same_job() -> None:
    entry, other = (jobs.job("gan", "lock", 5)[0].collectives for _ in range(2))
    assert (entry == other).all()


def test_the_true_cost_is_the_additional_duration_of_the_job() -> None:
    _, truth = jobs.job("plain", "one_stop", 3)
    assert truth.fault
    assert 0.4 * (truth.n_ranks - 1) < truth.cost_gpu_s < 2.1 * (truth.n_ranks - 1)
    assert truth.recorded_gpu_s == truth.cost_gpu_s


def test_the_judge_distinguishes_the_marks() -> None:
    _, truth = jobs.job("plain", "one_stop", 3)
    assert truth.fault
    healthy = replace(truth, fault=None)

    def mark(truth: jobs.Truth, *verdicts: Verdict) -> str:
        return answer(Report("", {}, list(verdicts)), truth).mark

    culprit, other = truth.fault.ranks[0], (truth.fault.ranks[0] + 1) % truth.n_ranks
    straggler, innocent = (Verdict("straggler", "", ranks=[rank]) for rank in (culprit, other))
    unknown = Verdict("inconclusive", "")
    assert [mark(truth, made) for made in (straggler, innocent, unknown)] == [
        "right",
        "wrong",
        "inconclusive",
    ]
    assert mark(truth, straggler, innocent) == "wrong"
    assert mark(truth) == "missed"
    assert mark(replace(truth, recorded_gpu_s=0.0)) == "right"
    assert mark(healthy, innocent) == "accused"
    assert mark(healthy, unknown) == "inconclusive"
    slow_gpu = Verdict("device", "", ranks=[0])
    assert mark(replace(healthy, may_name=frozenset({0})), Verdict("straggler", "", ranks=[0])) == "right"
    assert mark(replace(healthy, may_name=frozenset({0})), slow_gpu) == "accused"
