"""From a disturbed job to the answer, as a user gets it: trace, then explain."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stallscope.demo import live, traced
from stallscope.demo.faults import FAULTS

pytestmark = [pytest.mark.bpf, pytest.mark.compiler]

SECONDS = 7.0


def explained(db: Path) -> dict[str, Any]:
    """The report on a trace, by the command."""
    command = [*traced.COMMAND, "explain", "--json", "--db", str(db)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("scenario", ["sleep", "stop", "lock"])
def test_the_disturbed_rank_is_named_with_its_cause(tmp_path, scenario):
    db = traced.trace_job(scenario, seconds=SECONDS, trace_db=tmp_path / "trace.db")
    report = explained(db)
    victim = live.plan_for(scenario).victim
    (verdict,) = report["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("straggler", [victim])
    assert verdict["causes"][0]["cause"] == FAULTS[scenario].cause
    assert verdict["causes"][0]["share"] >= 0.8
    assert verdict["period_steps"] == (FAULTS[scenario].every_steps or None)
    assert report["looked_at"]["n_lost_records"] == 0


def test_a_healthy_job_is_called_healthy(tmp_path):
    db = traced.trace_job("healthy", ranks=2, seconds=SECONDS, trace_db=tmp_path / "trace.db")
    report = explained(db)
    assert report["healthy"], report["verdicts"]
    assert report["looked_at"]["n_ranks"] == 2


def test_the_missing_rank_of_a_hang_is_named(tmp_path):
    db = traced.trace_job("hang", ranks=2, trace_db=tmp_path / "trace.db")
    (verdict,) = explained(db)["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("hang", [1])
    assert verdict["causes"][0]["cause"] == "missing_rank"
