"""One fault is one incident on every surface of a live trace, also after a late attach and next to another job."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stallscope.demo.traced import MIN_OCCURRENCES
from stallscope.store import node

from ..exporters.test_otlp import Receiver, over_http
from ..surfaces.test_one_diagnosis import of_hub_tool
from .conftest import COMMAND, Agent

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

LATE_S = 6.0
AFTERWARDS_S = 22.0  # the agent needs up to half of it to start on a loaded machine
MIN_LATE_OCCURRENCES = 40
"""On a loaded machine the job lasts longer, so that enough delays follow the late attach. Otherwise it has about 60."""


def explained(db: Path) -> list[dict[str, Any]]:
    """The verdicts of `stallscope explain`; its exit code states the answer."""
    words = [*COMMAND, "explain", "--json", "--db", str(db)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["verdicts"]


def stored(db: Path) -> list[dict[str, Any]]:
    """The changes of incidents in the trace, oldest first."""
    with sqlite3.connect(db) as connection:
        return [
            json.loads(text) for (text,) in connection.execute("SELECT verdict FROM verdicts ORDER BY id")
        ]


def printed(tracer: Agent) -> list[str]:
    """The changes of incidents, as a journal shows them."""
    return [line for line in tracer.lines() if "verdict opened" in line or "verdict closed" in line]


@pytest.mark.parametrize("late_s", [LATE_S, pytest.param(60.0, marks=pytest.mark.prove)])
def test_after_a_late_attach_one_incident_stays_open_until_the_end(agent, job, only, late_s):
    running = job("sleep", ranks=3, seconds=late_s + AFTERWARDS_S, min_occurrences=MIN_LATE_OCCURRENCES)
    receiver = Receiver()
    running.go()
    time.sleep(late_s)
    with over_http(receiver) as url:
        tracer = agent(*only(running), "--otlp", url)
        assert running.wait(90)
        assert tracer.ended(signal.SIGINT) == 0
    changes = stored(tracer.db)
    assert [attribute["change"] for attribute in changes if attribute["change"] != "updated"] == [
        "opened",
        "closed",
    ]
    assert len({attribute["incident"] for attribute in changes}) == 1
    assert [line.split("verdict ")[1].split()[0].strip(":") for line in printed(tracer)] == [
        "opened",
        "closed",
    ]
    (verdict,) = explained(tracer.db)
    (span,) = (s for request in receiver.spans for s in request.resource_spans[0].scope_spans[0].spans)
    output = {attribute.key: attribute.value for attribute in span.attributes}
    ranks = [value.int_value for value in output["stallscope.ranks"].array_value.values]
    last = changes[-1]
    assert verdict["ranks"] == ranks == last["ranks"] == [2]
    assert verdict["kind"] == output["stallscope.kind"].string_value == last["kind"] == "straggler"
    assert verdict["pids"] == last["pids"] == [running.pids[2]]
    assert named(of_hub_tool(tracer.db, node.read(tracer.db))) == [("straggler", [2], [running.pids[2]])]


def named(rows: list[dict[str, Any]]) -> list[tuple[str, list[int], list[int]]]:
    return [(row["kind"], row["ranks"], row["pids"]) for row in rows]


def test_two_jobs_of_one_size_that_were_attached_late_are_never_mixed(agent, job, only):
    faulty = job("sleep", ranks=2, seconds=LATE_S + AFTERWARDS_S, min_occurrences=MIN_LATE_OCCURRENCES)
    healthy = job("healthy", ranks=2, seconds=LATE_S + AFTERWARDS_S)
    faulty.go()
    healthy.go()
    time.sleep(LATE_S)
    tracer = agent(*only(faulty), *only(healthy))
    assert faulty.wait(90) and healthy.wait(90)
    assert tracer.ended(signal.SIGINT) == 0
    expected = [("straggler", [1], [faulty.pids[1]])]
    assert named(explained(tracer.db)) == expected
    assert named(of_hub_tool(tracer.db, node.read(tracer.db))) == expected
    assert {tuple(change["pids"]) for change in stored(tracer.db)} == {(faulty.pids[1],)}


def test_of_two_jobs_on_one_machine_only_the_faulty_one_is_named(agent, job, only):
    faulty = job("sleep", ranks=2, seconds=10.0, min_occurrences=MIN_OCCURRENCES)
    healthy = job("healthy", ranks=2, seconds=10.0)
    tracer = agent(*only(faulty), *only(healthy))
    tracer.says("attached", "libnccl")
    faulty.go()
    healthy.go()
    assert faulty.wait(90) and healthy.wait(90)
    assert tracer.ended(signal.SIGINT) == 0
    (verdict,) = explained(tracer.db)
    assert (verdict["kind"], verdict["ranks"], verdict["pids"]) == ("straggler", [1], [faulty.pids[1]])
    assert {tuple(entry["pids"]) for entry in stored(tracer.db)} == {(faulty.pids[1],)}
