"""Five capabilities suffice: for an agent of an unprivileged user, and after root has dropped the others."""

import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stallscope.capture.probes.privileges import ALWAYS_NEEDED
from stallscope.store import node

from ..patience import until
from .conftest import Agent

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

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
    trace = node.read(tracer.db)
    assert set(trace.collectives["pid"].tolist()) == set(job.pids)
    assert tracer.db.stat().st_uid == NOBODY
    assert not stat.S_IMODE(tracer.db.stat().st_mode) & 0o007


def sets(pid: int) -> set[tuple[str, int]]:
    """The sets of capabilities of all threads of a process."""
    lines = [
        line
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
    ]
    return {
        (name, int(mask, 16)) for name, _, mask in (line.partition(":\t") for line in lines) if "Cap" in name
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="root: what root keeps")
def test_root_keeps_five_capabilities_and_attaches_to_a_later_job(agent, job):
    tracer = agent("--prometheus", "127.0.0.1:0")
    tracer.says("tracing into")
    kept = sum(1 << bit for bit in ALWAYS_NEEDED)
    expected = {("CapInh", 0), ("CapPrm", kept), ("CapEff", kept), ("CapBnd", kept), ("CapAmb", 0)}
    until(lambda: sets(tracer.process.pid) == expected, state=lambda: sets(tracer.process.pid))
    later = job(seconds=3)
    tracer.says("attached", "libnccl")
    later.go()
    assert later.wait(60)
    assert sets(tracer.process.pid) == expected
    assert tracer.ended(signal.SIGINT) == 0
    assert set(later.pids) <= set(node.read(tracer.db).collectives["pid"].tolist())
