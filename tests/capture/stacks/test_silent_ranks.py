"""Which of the processes that have made no traced call are examined."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from stallscope.capture.process.process_identity import identity
from stallscope.capture.stacks.sampler import Stacks
from stallscope.capture.stacks.silent_ranks import SilentRanks

from ...patience import until

SECOND_NS = 10**9
CHILD = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()']).pid, flush=True); input()"
CHAIN = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"
NO_STACKS = cast(
    "Stacks", SimpleNamespace(peek=None, python_threads=lambda pid: [], current_stacks=lambda pid, tids: {})
)


@pytest.mark.parametrize("program", [CHILD, CHAIN], ids=["child", "child of a server of forks"])
@pytest.mark.parametrize(("parent_is_on_gpu", "is_examined"), [(True, False), (False, True)])
def test_a_worker_of_a_rank_is_left_out_and_the_child_of_a_script_is_not(
    parent_is_on_gpu: bool, is_examined: bool, program: str
):
    """All processes have the environment of the rank."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=-1, stdout=-1, env={"RANK": "2", "WORLD_SIZE": "4"}
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        # A process that has just begun its program has no environment yet.
        until(lambda: identity(child).rank == 2)
        on_gpu = [child, parent.pid] if parent_is_on_gpu else [child]
        silent = SilentRanks(0, NO_STACKS, lambda: on_gpu, Path("/proc"))
        assert silent.examine([], 0).pids == []
        examined = silent.examine([], 10 * SECOND_NS).pids
        parent.communicate(b"\n\n")
    assert (child in examined) is is_examined
    assert (parent.pid in examined) is parent_is_on_gpu
