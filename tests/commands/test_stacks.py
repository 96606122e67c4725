"""`stallscope stacks`: groups of similar stacks, outliers first."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stallscope.cli import app
from stallscope.diagnose.report.budget import LABELS
from stallscope.diagnose.views.stack_groups import ProcessStack, groups, latest_stacks
from stallscope.errors import NotFound
from stallscope.events import layout
from stallscope.events.names import Category, SampleRole
from stallscope.events.trace import Trace
from stallscope.store import node

from ..patience import until

SAME = ("/job/train.py:10 wait", "/job/train.py:20 step", "/job/train.py:30 loop", "/job/train.py:40 main")
ODD = ("/job/data.py:1 read", "/job/data.py:5 load", "/job/train.py:30 loop")


def stack(rank: int, *frames: str) -> ProcessStack:
    return ProcessStack("host", 100 + rank, rank, "python3", "lock", "", frames)


def test_the_outlier_comes_first_and_line_numbers_do_not_split_a_group():
    moved = tuple(frame.replace(":20", ":21") for frame in SAME)
    result = groups([stack(0, *SAME), stack(1, *moved), stack(2, *ODD), stack(3, *SAME)])
    assert [[member.rank for member in group.members] for group in result] == [[2], [0, 1, 3]]


def trace_of_samples() -> Trace:
    """Three ranks at one location and one at another, which changed its location in the last second."""
    rows = layout.empty(layout.SAMPLES, 5)
    rows["pid"] = 1, 2, 3, 4, 4
    rows["ts_ns"] = np.array([50, 50, 50, 20, 50]) * 10**9
    rows["role"], rows["category"], rows["n"] = SampleRole.GPU, Category.LOCK, 5
    rows["stack"] = 1, 1, 1, 1, 2
    processes = layout.empty(layout.PROCESSES, 4)
    processes["pid"], processes["rank"] = (1, 2, 3, 4), (0, 1, 2, 3)
    return Trace(samples=rows, processes=processes, stacks={1: SAME, 2: ODD}, nodes=("host",))


def test_the_recent_stack_of_a_trace_counts():
    result = groups(latest_stacks(trace_of_samples()))
    assert [[member.rank for member in group.members] for group in result] == [[3], [0, 1, 2]]


def test_the_state_of_a_rank_without_samples_is_its_last_recorded_state():
    """A rank that hung before the agent was attached has positions only."""
    trace = trace_of_samples()
    positions = layout.empty(layout.POSITIONS, 1)
    positions["pid"] = positions["tid"] = 4
    positions["stack"] = 2
    states = layout.empty(layout.SNAPSHOTS, 2)
    states["pid"], states["ts_ns"], states["category"] = 4, (10, 20), (Category.ON_CPU, Category.SLEEP)
    stacks = latest_stacks(
        replace(
            trace, samples=trace.samples[trace.samples["pid"] != 4], positions=positions, snapshots=states
        )
    )
    assert [each.state for each in stacks if each.pid == 4] == [LABELS[Category.SLEEP]]
    assert [each.frames for each in stacks if each.pid == 4] == [ODD]


def test_the_command_reads_a_trace(tmp_path: Path):
    db = tmp_path / "a.db"
    node.write(db, trace_of_samples())
    result = CliRunner().invoke(app, ["stacks", str(db), "--json"])
    assert result.exit_code == 0, result.output
    first = json.loads(result.output)[0]
    assert [process["rank"] for process in first["processes"]] == [3]
    assert first["frames"] == list(ODD)
    assert "rank 3" in CliRunner().invoke(app, ["stacks", str(db)]).output


@pytest.mark.bpf
@pytest.mark.live
@pytest.mark.parametrize(
    "start", ["rest()", "import threading; t = threading.Thread(target=rest); t.start(); t.join()"]
)
def test_the_command_lists_the_stacks_of_a_running_process(start):
    script = (
        "import time\nfrom stallscope.demo import build\nfrom stallscope.demo.gpu import Gpu\n"
        "gpu = Gpu(build.build())\nprint('ready', flush=True)\n"
        "def rest():\n    time.sleep(60)\n" + start
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "ready\n"

            def frames() -> list[str]:
                result = CliRunner().invoke(app, ["stacks", "--json"])
                groups = json.loads(result.output)
                return [
                    frame
                    for group in groups
                    if job.pid in [process["pid"] for process in group["processes"]]
                    for frame in group["frames"]
                ]

            until(lambda: any("rest" in frame for frame in frames()))
        finally:
            job.kill()


def test_a_trace_without_stacks_is_named_as_the_reason(tmp_path: Path):
    db = tmp_path / "a.db"
    node.write(db, Trace(nodes=("host",)))
    result = CliRunner().invoke(app, ["stacks", str(db)])
    assert isinstance(result.exception, NotFound) and "the trace has no stacks" in str(result.exception)
