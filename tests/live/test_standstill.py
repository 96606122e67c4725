"""What the page says of a job that stood still before the trace began."""

import json
import os
import subprocess
import sys

from tests.diagnose.test_already_still import SLEEPS, WAITS, trace

from stallscope.diagnose.thresholds import Thresholds
from stallscope.live.records import changed
from stallscope.live.standstill import Standstill
from stallscope.store import node


def test_the_page_tells_who_is_likely_waited_for_until_there_are_rounds(tmp_path):
    db = tmp_path / "trace.db"
    node.write(db, trace(WAITS, SLEEPS, WAITS))
    page = Standstill(db, Thresholds())
    said = page.verdict(has_rounds=False)
    assert said is not None and not said.is_over
    assert "likely wait for rank 1" in said.summary
    assert page.verdict(has_rounds=True) is None


def test_the_page_says_nothing_before_it_has_lasted(tmp_path):
    db = tmp_path / "trace.db"
    node.write(db, trace(WAITS, SLEEPS, WAITS, looks_s=(3, 8)))
    assert Standstill(db, Thresholds()).verdict(has_rounds=False) is None


def test_as_records_it_is_an_incident_that_is_over_when_the_job_goes_on(tmp_path):
    db = tmp_path / "trace.db"
    node.write(db, trace(WAITS, SLEEPS, WAITS))
    told = Standstill(db, Thresholds())
    (opened,) = map(changed, told.changes(has_rounds=False))
    assert (opened["change"], opened["verdict"]["ranks"]) == ("opened", [1])
    assert told.changes(has_rounds=False) == []
    (closed,) = map(changed, told.changes(has_rounds=True))
    assert (closed["change"], closed["incident"]) == ("closed", opened["incident"])
    assert told.changes(has_rounds=True) == []


def test_the_records_of_a_trace_tell_it(tmp_path):
    """As `trace --json` prints them."""
    db = tmp_path / "trace.db"
    node.write(db, trace(WAITS, SLEEPS, WAITS))
    task = {"db": str(db), "since_ns": 0, "agent": os.getpid(), "is_json": True}
    watching = subprocess.Popen(
        [sys.executable, "-m", "stallscope.live.watching", json.dumps(task)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert watching.stdin and watching.stdout
    verdicts = (one for one in map(json.loads, watching.stdout) if one["record"] == "verdict")
    assert next(verdicts)["verdict"]["evidence"]["captured_late"]
    watching.stdin.close()  # as when the agent ends
    assert watching.wait() == 0
    watching.stdout.close()
