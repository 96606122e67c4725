"""The live demo starts the agent first, lets the job run under it, and ends it as Ctrl-C would."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from stallscope.demo import live_demo, traced
from stallscope.errors import BadInput, CannotTrace

from ..patience import until

pytestmark = [pytest.mark.compiler, pytest.mark.live]

ATTACHES = """
import json, signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: (open(sys.argv[3], "w").write(json.dumps(sys.argv)), sys.exit(%d)))
print("attached to 30 functions of libcudart.so.12", flush=True)
time.sleep(0.2)
print("attached to 20 functions of libnccl.so.2", flush=True)
while True:
    time.sleep(0.1)
"""


def agent(code: str) -> tuple[str, ...]:
    """A program in place of the agent: the demo's handling of an agent needs no kernel."""
    return (sys.executable, "-c", code)


def test_the_job_runs_between_attach_and_ctrl_c(tmp_path: Path):
    lines: list[str] = []
    db = tmp_path / "trace.db"
    trace_job = traced.trace_job(
        "healthy", ranks=2, seconds=0.3, trace_db=db, note=lines.append, command=agent(ATTACHES % 0)
    )
    assert trace_job == db
    assert db.read_text().count('"--pid"') == 2
    assert len(lines) == 3


def processes_with(word: str) -> list[str]:
    return [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if word in cmdline(path)]


def cmdline(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().replace("\0", " ")
    return ""


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_killed_leaves_no_process(tmp_path: Path, by: signal.Signals):
    db = tmp_path / "trace.db"
    ends = "import signal; from stallscope.demo.plan import end_with_parent; end_with_parent(signal.SIGINT)"
    here = ends + ATTACHES % 0
    demo = f"""
from pathlib import Path
from stallscope.demo import traced
traced.trace_job("hang", ranks=2, seconds=60, trace_db=Path({str(db)!r}), note=print, command={agent(here)!r})
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-uc", demo], stdout=subprocess.PIPE, text=True, env=environment
    ) as shown:
        assert shown.stdout
        while "libnccl" not in shown.stdout.readline():
            pass
        (agent_pid,) = (pid for pid in processes_with(str(db)) if pid != str(shown.pid))
        arguments = cmdline(Path(f"/proc/{agent_pid}/cmdline")).split()
        pids = [pid for flag, pid in pairwise(arguments) if flag == "--pid"]
        assert len(pids) == 2
        folder = Path(cmdline(Path(f"/proc/{pids[0]}/cmdline")).split()[-2])
        shown.send_signal(by)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (*pids, agent_pid)))
    assert not processes_with(str(db))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert db.exists(), "the agent ended as by Ctrl-C"
    assert folder.exists() == (by == signal.SIGKILL), "no cleaning up after SIGKILL"
    shutil.rmtree(folder, ignore_errors=True)


def test_a_hanging_job_is_left_while_it_hangs(tmp_path: Path):
    db = tmp_path / "trace.db"
    traced.trace_job("hang", ranks=2, seconds=0.3, trace_db=db, command=agent(ATTACHES % 0))
    assert db.exists()


def test_an_agent_that_cannot_trace_is_quoted(tmp_path: Path):
    refuses = agent("import sys; print('needs root'); sys.exit(5)")
    with pytest.raises(CannotTrace, match=r"did not attach .*: needs root"):
        traced.trace_job("healthy", ranks=2, seconds=0.3, trace_db=tmp_path / "trace.db", command=refuses)
    with pytest.raises(CannotTrace, match="ended with code 4: attached to 20"):
        traced.trace_job(
            "healthy", ranks=2, seconds=0.3, trace_db=tmp_path / "t", command=agent(ATTACHES % 4)
        )


@pytest.mark.pure
def test_a_scenario_is_described_in_a_line():
    assert traced.described(live_demo.plan_for("healthy")) == "4 ranks, none disturbed"
    assert traced.described(live_demo.plan_for("sleep")) == "rank 2 of 4 sleeps 290 ms every 14 steps"
    with pytest.raises(BadInput):
        traced.trace_job("nothing", trace_db=Path("none"))
