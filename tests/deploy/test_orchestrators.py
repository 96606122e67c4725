"""The examples for orchestrators, with the real event socket and substitutes for kubectl and Slurm's commands."""

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stallscope.exporters.event_socket import EventSocket

FOLDER = Path(__file__).parents[2] / "deploy/orchestrators"


def line(action: str, kind: str) -> dict[str, Any]:
    recommendation = {"action": action, "because": "b", "ranks": [2], "nodes": ["gpu-17"], "confidence": 0.97}
    verdict = {
        "kind": kind,
        "severity": "high",
        "ranks": [2],
        "nodes": ["gpu-17"],
        "pids": [7],
        "summary": "It is slow.",
    }
    verdict |= {"confidence": 0.97, "recommendation": recommendation}
    return {
        "incident": "i1",
        "state": "open",
        "change": "opened",
        "at_ns": 5,
        "kind": kind,
        "cause": "gpu_slow",
        "reason": "",
        "is_resolved": False,
        "verdict": verdict,
    }


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder of commands that write their arguments to a file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("kubectl", "scontrol", "logger"):
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/calls\n')
        program.chmod(0o755)
    return folder


def environment(bin_folder: Path, **values: str) -> dict[str, str]:
    return os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"} | values


@pytest.mark.parametrize("acts", [False, True])
def test_kubernetes_node_is_tainted_only_when_asked(tmp_path: Path, bin_folder: Path, acts: bool):
    with closing(EventSocket(tmp_path / "s")) as events:
        events.take(line("drain_node", "straggler"))
        command = [sys.executable, FOLDER / "kubernetes_taint.py", "--once", "--socket", tmp_path / "s"]
        done = subprocess.run(
            [*command, *(["--act"] if acts else [])],
            capture_output=True,
            text=True,
            env=environment(bin_folder),
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    planned = done.stdout.splitlines()
    assert planned[0] == "kubectl taint nodes gpu-17 stallscope.io/slow-gpu=true:NoSchedule --overwrite"
    calls = tmp_path / "calls"
    assert (calls.read_text().splitlines() if acts else calls.exists()) == (planned if acts else False)


def test_hanging_job_is_restarted(tmp_path: Path):
    runs = tmp_path / "runs"
    job = f"echo run >>{runs}; [ $(wc -l <{runs}) -gt 1 ] && exit 7; exec sleep 600"
    with closing(EventSocket(tmp_path / "s")) as events:
        words = ["--act", "--socket", str(tmp_path / "s"), "--", "sh", "-c", job]
        watcher = subprocess.Popen(
            [sys.executable, FOLDER / "torchrun_watch.py", *words], stdout=subprocess.PIPE
        )
        end_s = time.monotonic() + 30
        while not runs.exists():
            assert time.monotonic() < end_s
            time.sleep(0.05)
        events.take(line("restart_job", "hang"))
        out, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 7
    assert out == b"restart_job: It is slow.\n"
    assert runs.read_text().splitlines() == ["run", "run"]


@pytest.mark.parametrize(("action", "acts"), [("drain_node", "1"), ("drain_node", ""), ("look", "1")])
def test_slurm_epilog_drains_the_node_only_if_recommended_and_enabled(
    tmp_path: Path, bin_folder: Path, action: str, acts: str
):
    report = {"verdicts": [line(action, "straggler")["verdict"]]}
    (tmp_path / "report").write_text(json.dumps(report))
    explain = bin_folder / "stallscope"
    explain.write_text(f"#!/bin/sh\ncat {tmp_path}/report\nexit 20\n")
    explain.chmod(0o755)
    values = {"STALLSCOPE_ACT": acts, "SLURMD_NODENAME": "gpu-17", "SLURM_JOB_START_TIME": "1760000000"}
    done = subprocess.run([FOLDER / "slurm_epilog.sh"], env=environment(bin_folder, **values), timeout=60)
    assert done.returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines() if (tmp_path / "calls").exists() else []
    drained = [call for call in calls if call.startswith("scontrol")]
    assert len(drained) == (action == "drain_node" and acts == "1")
    assert bool(calls) == (action == "drain_node")
