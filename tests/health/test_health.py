"""The health of machines: signals, thresholds, states; emulated machines of one job."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from stallscope.check import machine_speed
from stallscope.errors import BadInput
from stallscope.health import WINDOW_S, state_file
from stallscope.health.cohorts import DEVIATIONS, QUORUM, Cohorts, thresholds
from stallscope.health.node_state import ENTER_WINDOWS, LEAVE_WINDOWS, NodeState
from stallscope.health.signals import SIGNALS
from stallscope.health.windows import WARM_UP_WINDOWS

from .emulated import N_COLLECTIVES, WORK_S, Fault, Jitter, Job

TWENTY_PERCENT_SLOWER = Fault(slowness=lambda at_s: 1.25)


def named_after_s(job: Job, number: int, patience_s: float = 120) -> float:
    """Simulated time until a machine is a straggler."""
    return next(at_s for at_s in job.run(patience_s) if job.machines[number].state.state == "straggler")


def test_throughput_is_collectives_per_second_of_own_time(tmp_path: Path):
    job = Job(tmp_path, n_nodes=1)
    for _ in job.run(60):
        pass
    signals = job.machines[0].signals[-1]
    assert signals["throughput"] == pytest.approx(N_COLLECTIVES / WORK_S, rel=0.01)
    assert signals["memory"] == 1.0
    assert signals["cpu"] > 0.97
    assert 0.95 <= signals["compute"] <= 0.99


@pytest.mark.parametrize(
    ("fault", "signal"),
    [
        (TWENTY_PERCENT_SLOWER, "throughput"),
        (Fault(preempted=0.3), "cpu"),
        (Fault(clock=0.8), "compute"),
        (Fault(available=0.03), "memory"),
    ],
)
def test_machine_that_was_always_slow_is_named_with_its_signal(tmp_path: Path, fault: Fault, signal: str):
    job = Job(tmp_path, jitter=Jitter(speed=0.02, noise=0.02), faults={5: fault})
    warm_up_s = WARM_UP_WINDOWS * WINDOW_S
    assert named_after_s(job, 5) - warm_up_s < 30
    machine = job.machines[5]
    assert machine.state.reason.startswith(signal)
    own = median(each[signal] for each in machine.signals)
    assert all(each[signal] > own * (1 - SIGNALS[signal].floor) for each in machine.signals)
    assert {other.state.state for other in job.machines if other is not machine} == {"healthy"}
    for _ in job.run(WINDOW_S):
        pass
    assert [row["node"] for row in job.hub.stragglers("a")] == ["n5"]
    assert job.hub.stragglers("b") == []


def test_pause_of_one_machine_is_not_a_straggler(tmp_path: Path):
    paused = Fault(slowness=lambda at_s: 20.0 if 60 <= at_s < 63 else 1.0)
    job = Job(tmp_path, faults={3: paused})
    states = {job.machines[3].state.state for at_s in job.run(150) if at_s > 50}
    assert "straggler" not in states


def test_straggler_that_recovers_is_healthy_after_some_windows(tmp_path: Path):
    job = Job(tmp_path, faults={2: Fault(slowness=lambda at_s: 1.3 if at_s < 100 else 1.0)})
    named_after_s(job, 2)
    at_s = next(at_s for at_s in job.run(200) if job.machines[2].state.state == "healthy")
    assert 100 + (LEAVE_WINDOWS - 1) * WINDOW_S <= at_s <= 100 + (LEAVE_WINDOWS + 2) * WINDOW_S


def test_without_a_quorum_the_state_is_unknown_with_the_reason(tmp_path: Path):
    job = Job(tmp_path, n_nodes=QUORUM - 1, faults={0: TWENTY_PERCENT_SLOWER})
    for _ in job.run(90):
        pass
    state = job.machines[0].state
    assert (state.state, state.reason) == (
        "unknown",
        f"{QUORUM - 1} machines of the job report to the hub; a comparison needs {QUORUM}",
    )


def test_threshold_is_the_median_less_the_larger_of_spread_and_floor():
    values = [9.0, 10.0, 10.0, 10.0, 11.0]
    (signal,) = thresholds([{"throughput": value} for value in values]).items()
    assert signal == ("throughput", {"median": 10.0, "threshold": 9.0})  # MAD 0: the floor of 10 %
    wide = thresholds([{"throughput": value} for value in (6.0, 8.0, 10.0, 12.0, 14.0)])["throughput"]
    assert wide["threshold"] == pytest.approx(10 - DEVIATIONS * 1.4826 * 2)
    assert thresholds([{"throughput": value} for value in values[: QUORUM - 1]]) == {}


def test_one_window_below_the_threshold_is_only_suspect():
    answer = {"n_nodes": 8, "quorum": 4, "signals": {"cpu": {"median": 1.0, "threshold": 0.95}}}
    state = NodeState()
    states = []
    for cpu in [0.9, 0.99] + [0.9] * ENTER_WINDOWS + [0.96] * LEAVE_WINDOWS:
        state.update({"cpu": cpu}, answer)
        states.append(state.state)
    # 0.96 is above the threshold, but nearer to it than to the median: the straggler stays.
    assert states == ["suspect", "healthy", "suspect", "straggler"] + ["straggler"] * LEAVE_WINDOWS
    for _ in range(3):
        state.update({"cpu": 0.9}, None)
        assert state.state == "straggler"
    state.update({"cpu": 0.9}, None)
    assert (state.state, state.reason) == ("unknown", "the hub does not answer with thresholds")


def test_machine_that_stops_reporting_leaves_the_cohort(tmp_path: Path):
    job = Job(tmp_path)
    for _ in job.run(60):
        pass
    assert job.hub.n_nodes("a") == 16
    job.at_s += 4 * WINDOW_S
    assert job.hub.n_nodes("a") == 0


def test_a_machine_counts_in_its_present_cohort_only():
    now_s = [0.0]
    hub = Cohorts(clock_s=lambda: now_s[0])

    def n_peers(node: str, cohort: str) -> int:
        report = {"node": node, "cluster": "c", "cohort": cohort, "signals": {"cpu": 1.0}, "state": "unknown"}
        return int(hub.report(json.dumps(report | {"score": None, "reason": ""}).encode(), "a")["n_nodes"])

    assert [n_peers("n1", "1"), n_peers("n2", "1"), n_peers("n1", "2"), n_peers("n3", "1")] == [1, 2, 1, 2]
    now_s[0] = 4 * WINDOW_S
    assert n_peers("n4", "1") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda report: report | {"signals": {"cpu": float("nan")}},
        lambda report: report | {"signals": {"cpu": -1}},
        lambda report: report | {"signals": {"cpu": 10**400}},
        lambda report: report | {"signals": []},
        lambda report: report | {"state": "<b>"},
        lambda report: report | {"node": ""},
        lambda report: [report],
        lambda report: {},
    ],
)
def test_wrong_report_is_refused(change: Callable[[dict[str, object]], object]):
    good = {"node": "n", "cluster": "c", "cohort": "1", "signals": {"cpu": 1.0}, "state": "unknown"}
    good |= {"score": None, "reason": ""}
    hub = Cohorts()
    assert hub.report(json.dumps(good).encode(), "a")["n_nodes"] == 1
    with pytest.raises(BadInput):
        hub.report(json.dumps(change(good)).encode(), "a")
    with pytest.raises(BadInput):
        hub.report(np.random.default_rng(1).bytes(100), "a")


def test_check_shows_the_state_of_a_running_agent(tmp_path: Path):
    db = tmp_path / "job.db"
    assert list(machine_speed.findings(db)) == []
    saved = state_file.Saved("straggler", 0.8, "cpu 0.8; the median of 16 machines is 1", 2e10)
    state_file.write(db, saved)
    (finding,) = machine_speed.findings(db)
    assert (finding.state.value, finding.found) == ("warn", f"straggler, score 0.80: {saved.reason}")
    state_file.write(db, state_file.Saved("straggler", 0.8, "", at_s=1.0))
    assert list(machine_speed.findings(db)) == []
