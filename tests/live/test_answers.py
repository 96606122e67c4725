"""From a disturbed job to the answer, as a user gets it: trace, then explain."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stallscope.demo import live_demo, traced
from stallscope.demo.faults import FAULTS
from stallscope.diagnose.thresholds import Thresholds
from stallscope.store import node

from ..patience import PATIENCE_S, until
from .conftest import begun

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

SECONDS = 7.0


def wait_for_silence(db: Path) -> None:
    """Until the job has made no call for two seconds."""

    def is_silent() -> bool:
        arrivals = node.read(db).collectives["ts_ns"]
        return bool(len(arrivals)) and time.monotonic_ns() - int(arrivals.max()) > 2_000_000_000

    until(is_silent, state=lambda: "the job goes on", every_s=0.2)


def explained(db: Path) -> dict[str, Any]:
    """The report on a trace, by the command."""
    command = [*traced.COMMAND, "explain", "--json", "--db", str(db)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    report: dict[str, Any] = json.loads(done.stdout)
    exit_codes = {"healthy": 0, "found": 20, "inconclusive": 21}
    assert done.returncode == exit_codes[report["answer"]], done.stderr
    return report


@pytest.mark.parametrize("scenario", ["sleep", "stop", "lock"])
def test_the_disturbed_rank_is_named_with_its_cause(tmp_path, scenario):
    db = traced.trace_job(scenario, seconds=SECONDS, trace_db=tmp_path / "trace.db")
    report = explained(db)
    victim = live_demo.plan_for(scenario).victim
    (verdict,) = report["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("straggler", [victim])
    assert verdict["causes"][0]["cause"] == FAULTS[scenario].cause
    assert verdict["causes"][0]["share"] >= 0.8
    assert verdict["period_steps"] == (FAULTS[scenario].every_steps or None)
    assert report["examined"]["n_lost_records"] == 0
    if scenario == "stop":
        (by,) = verdict["causes"][0]["evidence"]["stopped_by"]
        assert by.endswith(f"(pid {os.getpid()})") and by in verdict["summary"]


def test_no_rank_of_a_healthy_job_is_named_for_its_own_work(tmp_path):
    db = traced.trace_job("healthy", ranks=2, seconds=SECONDS, trace_db=tmp_path / "trace.db")
    report = explained(db)
    assert report["examined"]["n_ranks"] == 2
    for verdict in report["verdicts"]:  # other programs of a loaded machine do take the CPU from a rank
        assert not verdict["ranks"] or verdict["causes"][0]["cause"] == "cpu_preemption", verdict


def test_the_sender_of_the_signal_that_killed_a_rank_is_reported(agent, job, only):
    job = job("hang", ranks=2)
    tracer = agent(*only(job))
    tracer.says("attached", "libnccl")
    job.go()
    wait_for_silence(tracer.db)
    os.kill(job.pids[1], signal.SIGKILL)
    time.sleep(Thresholds().dead_after_ns / 1e9 + 1.5)
    assert tracer.ended(signal.SIGINT) == 0
    (verdict,) = explained(tracer.db)["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("hang", [1])
    (doing,) = verdict["evidence"]["doing"]
    assert doing["exit_status"] == 128 + signal.SIGKILL
    assert doing["ended_by"].startswith("SIGKILL from ")
    assert doing["ended_by"].endswith(f"(pid {os.getpid()})")


def test_the_missing_rank_of_a_hang_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("STALLSCOPE_HANG_AFTER_S", "4")
    db = traced.trace_job("hang", ranks=2, seconds=12.0, trace_db=tmp_path / "trace.db")
    (verdict,) = explained(db)["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("hang", [1])
    assert verdict["causes"][0]["cause"] == "missing_rank"


def test_a_job_that_hung_before_the_trace_began_is_reported(agent, job, only, monkeypatch):
    job = job("hang", ranks=2)
    job.go()
    wait_until_it_stands(job)
    tracer = agent(*only(job))
    wait_for_looks(tracer.db, 2)
    assert tracer.ended(signal.SIGINT) == 0
    monkeypatch.setenv("STALLSCOPE_HANG_AFTER_S", "4")
    (verdict,) = explained(tracer.db)["verdicts"]
    assert (verdict["kind"], verdict["ranks"], verdict["victims"]) == ("hang", [1], [0])
    assert verdict["confidence"] < 0.7
    assert verdict["summary"].startswith("Attached after the stall began: all 2 ranks have made no progress")
    (doing,) = verdict["evidence"]["doing"]
    assert "disturb" in doing["at"]
    assert (doing["state"], doing["syscall_nr"]) == ("sleep", 230)


def test_a_rank_without_a_first_collective_is_named_with_its_frame(agent, job, only, monkeypatch):
    """It has joined the communicator: it loads data, or compiles, and the others wait in round 0."""
    job = job("hang", ranks=2, first_step=0)
    tracer = agent(*only(job))
    tracer.says("attached", "libnccl")
    job.go()
    wait_for_look(tracer.db, job.pids[1], after_s=4.5)
    assert tracer.ended(signal.SIGINT) == 0
    monkeypatch.setenv("STALLSCOPE_HANG_AFTER_S", "4")
    (verdict,) = explained(tracer.db)["verdicts"]
    assert (verdict["kind"], verdict["ranks"], verdict["victims"]) == ("hang", [1], [0])
    assert verdict["first_round"] == 0
    (doing,) = verdict["evidence"]["doing"]
    assert "disturb" in doing["at"]


def wait_until_it_stands(job) -> None:
    """Returns once no rank has made a step for a second."""
    until_s, n_before, since = time.monotonic() + PATIENCE_S, -1, time.monotonic()
    while time.monotonic() - since < 1:
        n = sum(path.stat().st_size for path in job.folder.glob("rank*.csv"))
        n_before, since = n, since if n == n_before and n else time.monotonic()
        assert time.monotonic() < until_s
        time.sleep(0.1)


def wait_for_look(db: Path, pid: int, *, after_s: float) -> None:
    """Wait until a process was sampled this long after the last call of all processes."""

    def is_examined() -> bool:
        trace = begun(db)
        if trace is None:
            return False
        looks = trace.positions["ts_ns"][trace.positions["pid"] == pid]
        arrivals = trace.collectives["ts_ns"]
        return bool(len(looks) and len(arrivals) and looks.max() - arrivals.max() >= after_s * 1e9)

    until(is_examined, every_s=0.3)


def wait_for_looks(db: Path, n: int) -> None:
    def n_evaluated() -> int:
        trace = begun(db)
        return len(set(trace.positions["ts_ns"].tolist())) if trace else 0

    until(lambda: n_evaluated() >= n, every_s=0.3)
