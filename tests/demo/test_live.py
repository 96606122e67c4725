"""Each fault causes its delay, by the loop's own clock, in the victim and in no other rank."""

import csv
import json
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from stallscope.demo import faults, live_demo, outside
from stallscope.demo.faults import FAULTS
from stallscope.demo.live_demo import Job
from stallscope.demo.plan import Plan
from stallscope.errors import BadInput, StallscopeError

from ..patience import PATIENCE_S, until

pytestmark = [pytest.mark.compiler, pytest.mark.live]

MS = 1_000_000
DELAY_MS = {
    "sleep": 1e3 * faults.SLEEP_S,
    "compute": 1e3 * faults.COMPUTE_S,
    "disk": 1e3 * faults.DISK_S,
    "lock": 1e3 * faults.LOCK_S,
    "net": 1e3 * faults.ANSWER_S,
    "input": 0.8e3 * faults.LOADER_S,  # a step's length of it is hidden by the batch that was prefetched
    "alloc": 20.0,
    "sync": 3.0,
    "copy": 5.0,
}
"""The minimum time that a fault in the process adds to a step."""


def clock(job: Job, rank: int) -> np.ndarray:
    """The rows of a rank's clock, one per step, columns by name."""
    with (job.folder / f"rank{rank}.csv").open() as file:
        rows = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return np.array([tuple(row.values()) for row in rows], [(name, "i8") for name in rows[0]])


def run(scenario: str, *, ranks: int = 2, **changes: object) -> tuple[Job, list[np.ndarray]]:
    """Run a job to its end. Returns the job and the ranks' clocks."""
    plan = Plan(**{**vars(live_demo.plan_for(scenario, ranks=ranks)), **changes})
    with live_demo.started(plan) as job:
        job.go()
        assert job.wait(PATIENCE_S)
        clocks = [clock(job, rank) for rank in range(ranks)]
    return job, clocks


def ms(rows: np.ndarray, begin: str, end: str) -> np.ndarray:
    return (rows[end] - rows[begin]) / MS


@pytest.mark.parametrize("scenario", DELAY_MS)
def test_a_fault_delays_its_victim_and_all_others_wait(scenario: str):
    first, every = 4, FAULTS[scenario].every_steps
    job, clocks = run(scenario, steps=first + 2 * max(every, 2) + 2, first_step=first)
    rows, others = clocks[job.plan.victim], clocks[0]
    is_due = (rows["step"] >= first) & ((rows["step"] - first) % every == 0)
    assert is_due.sum() >= 2
    delays_ms = ms(rows, "start_ns", "begin_ns")
    assert (rows["is_disturbed"] == is_due).all()
    assert delays_ms[is_due].min() >= 0.95 * DELAY_MS[scenario]
    assert median(delays_ms[~is_due]) < DELAY_MS[scenario] / 3
    assert others["is_disturbed"].sum() == 0
    waits_ms = ms(others, "forward_ns", "end_ns")
    assert waits_ms[is_due].min() > median(waits_ms[~is_due]) + 0.5 * DELAY_MS[scenario]


def test_a_slow_job_lasts_until_its_fault_has_occurred_often_enough():
    job, clocks = run("lock", seconds=0.05, first_step=4, min_occurrences=2)
    rows = clocks[job.plan.victim]
    assert rows["is_disturbed"].sum() >= 2
    assert len(rows) == 4 + 2 * FAULTS["lock"].every_steps + 1


def test_a_healthy_job_is_not_disturbed_and_its_ranks_agree_to_end():
    _, clocks = run("healthy", ranks=4, seconds=0.5)
    assert len({len(rows) for rows in clocks}) == 1
    assert len(clocks[0]) > 3
    assert not any(rows["is_disturbed"].any() for rows in clocks)
    assert max(rows["end_ns"][-1] - rows["start_ns"][0] for rows in clocks) > 450 * MS


def test_a_stopped_rank_makes_all_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outside, "STARTS_AFTER_S", 0.5)
    _, clocks = run("stop", seconds=1.4)
    stopped_ms = 1e3 * outside.STOPPED_S
    assert all(ms(rows, "start_ns", "end_ns").max() > 0.9 * stopped_ms for rows in clocks)


def test_a_crowded_cpu_makes_its_rank_slow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outside, "STARTS_AFTER_S", 0.8)
    job, clocks = run("cpu-hog", seconds=2.4, host_work_ms=2.0)
    rows = clocks[job.plan.victim]
    forward_ms = ms(rows, "begin_ns", "forward_ns")
    thirds = np.array_split(forward_ms, 3)
    assert np.quantile(thirds[2], 0.9) > 2 * median(thirds[0])


def devices_of(job: Job) -> list[str]:
    """Process ids of the emulated devices: they share their rank's memory, its command line too."""
    result = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "comm").read_text() == "emulated-gpu\n" and str(job.folder) in (
                path / "cmdline"
            ).read_text():
                result.append(path.name)
    return result


def test_a_hanging_rank_leaves_its_peers_waiting_and_the_end_cleans_up(tmp_path: Path):
    plan = Plan(**{**vars(live_demo.plan_for("hang", ranks=3)), "first_step": 3})
    with live_demo.started(plan, tmp_path) as job:
        job.go()
        until(lambda: [path.read_text().count("\n") for path in job.folder.glob("rank*.csv")] == [1 + 3] * 3)
        assert not job.wait(0.5)
        assert [len(clock(job, rank)) for rank in range(3)] == [3, 3, 3]
        assert all(process.poll() is None for process in job.processes)
        assert len(devices_of(job)) == 3 * 2, "two streams a rank"
    until(lambda: not devices_of(job), state=lambda: f"{devices_of(job)} outlive their ranks")
    truth = json.loads((job.folder / live_demo.TRUTH_FILE).read_text())
    assert (truth["culprits"], truth["cause"]) == ([2], "missing_rank")
    assert all(process.poll() is not None for process in job.processes)
    assert not list(live_demo.SHARED.glob(f"emulated-nccl-{tmp_path.name}-*"))


def test_a_job_that_does_not_synchronize_runs_ahead():
    job, clocks = run("sleep", steps=60, first_step=30, synchronize=False)
    early, late = clocks[0], clocks[job.plan.victim]
    assert ms(early[5:30], "start_ns", "end_ns").mean() < 12, "steps are issued faster than they run"
    assert late["begin_ns"][30] - late["start_ns"][30] > 280 * MS
    assert early["start_ns"][31] < late["begin_ns"][30], "a peer went on meanwhile"


def test_pairs_are_communicators_of_their_own():
    _, clocks = run("sleep", ranks=4, groups="tp", steps=8, first_step=4)
    assert [len(rows) for rows in clocks] == [8] * 4
    assert all(ms(rows, "start_ns", "end_ns")[4] > 280 for rows in clocks)


def test_a_failing_rank_is_reported_with_its_error():
    plan = Plan(
        **{**vars(live_demo.plan_for("net", ranks=2)), "fault": "healthy", "groups": "tp", "ranks": 2}
    )
    with live_demo.started(plan) as job:
        (job.folder / "unique_id").mkdir()
        job.go()
        with pytest.raises(StallscopeError, match=r"rank \d of the demo job ended with code 1: \w+Error"):
            job.wait(20)


def test_a_job_that_is_never_let_go_ends():
    with live_demo.started(live_demo.plan_for("healthy", ranks=2)) as job:
        assert all(Path(f"/proc/{pid}").exists() for pid in job.pids)
        time.sleep(0.1)
        assert all(process.poll() is None for process in job.processes)
        maps = Path(f"/proc/{job.pids[0]}/maps").read_text()
        assert "libnccl.so.2" in maps
        assert "libcudart.so.12" in maps
    assert not any(Path(f"/proc/{pid}").exists() for pid in job.pids)
    assert not job.folder.exists()


@pytest.mark.pure
def test_wrong_scenarios_are_refused():
    with pytest.raises(BadInput, match="no scenario 'slep'"):
        live_demo.plan_for("slep")
    with pytest.raises(BadInput, match="1 ranks"):
        live_demo.plan_for("sleep", ranks=1)
