"""An agent that is nobody, with five capabilities, traces a job of somebody else."""

import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallscope.store import node

from .conftest import Agent

pytestmark = [pytest.mark.bpf, pytest.mark.compiler]

NOBODY = 65534
CAPABILITIES = "-all,+bpf,+perfmon,+sys_ptrace,+dac_read_search,+checkpoint_restore"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of that user's."""
    with tempfile.TemporaryDirectory(prefix="stallscope-nobody-") as path:
        os.chown(path, NOBODY, NOBODY)
        yield Path(path)


@pytest.mark.skipif(not shutil.which("setpriv"), reason="other: no setpriv")
def test_five_capabilities_are_enough(folder, job, only):
    job = job(seconds=3)
    user = ("--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups")
    sets = [f"--{each}={CAPABILITIES}" for each in ("inh-caps", "ambient-caps", "bounding-set")]
    tracer = Agent(folder / "trace.db", *only(job), prefix=("setpriv", *user, *sets))
    try:
        tracer.says("attached", "libnccl")
        job.go()
        tracer.says("1 communicator")
        assert job.wait(60)
    finally:
        assert tracer.ended(signal.SIGINT) == 0
    found = node.read(tracer.db)
    assert set(found.collectives["pid"].tolist()) == set(job.pids)
    assert tracer.db.stat().st_uid == NOBODY
    assert not stat.S_IMODE(tracer.db.stat().st_mode) & 0o007
