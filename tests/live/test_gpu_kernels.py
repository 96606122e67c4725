"""The agent reads the NCCL profiler plugin of traced processes: the trace holds the operations on the GPUs."""

import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from stallscope.diagnose.gpu.gpu_rounds import gpu_arrivals
from stallscope.store import node

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]
STEPS = 250
ROUNDS_A_STEP = 5


@pytest.fixture
def plugin(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugin, which the ranks of a job load."""
    library = tmp_path / "plugin.so"
    subprocess.run(["make", "-s", "-C", repository / "nccl_plugin", f"OUT={library}"], check=True)
    monkeypatch.setenv("NCCL_PROFILER_PLUGIN", str(library))
    return library


@pytest.mark.parametrize("mode", ["on", "off"])
def test_operations_on_the_gpus_are_in_the_trace_if_the_setting_asks_for_them(agent, job, only, plugin, mode):
    job = job(ranks=2, steps=STEPS)
    tracer = agent(*only(job), "--gpu-times", mode)
    tracer.says("attached", "libnccl.so.2")
    job.go()
    assert job.wait(60)
    assert tracer.ended(signal.SIGINT) == 0
    trace = node.read(tracer.db)
    if mode == "off":
        assert len(trace.gpu_kernels) == 0
        return
    assert set(trace.gpu_kernels["pid"].tolist()) == set(job.pids) and trace.lost == {}
    rounds = gpu_arrivals(trace.gpu_kernels)
    for pid in job.pids:
        of_rank = rounds[rounds["pid"] == pid]
        assert len(of_rank) > 50 * ROUNDS_A_STEP
        assert (np.diff(of_rank["seq"]) == 1).all()
        hosts = trace.collectives[trace.collectives["pid"] == pid]
        # An operation starts on the GPU after its host has arrived; both count the calls of the communicator.
        assert (of_rank["ts_ns"] > hosts["ts_ns"][of_rank["seq"]]).all()
