"""However the agent ends: no probe stays, the trace is sound, and the next start goes on with it."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stallscope.demo.job import N_BUCKETS
from stallscope.diagnose import diagnose
from stallscope.events.layout import UNKNOWN
from stallscope.store import node

from ..memory_disk import memory_disk
from ..patience import PATIENCE_S

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

needs_bpftool = pytest.mark.skipif(not shutil.which("bpftool"), reason="bpftool lists what is loaded")


def loaded_by(pid: int, what: str) -> set[int]:
    """Numbers of the BPF programs ("prog") or links ("link") that a process holds, by its open files."""
    result = set()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        facts = dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line)
        if f"{what}_id" in facts and ("link_id" in facts) == (what == "link"):
            result.add(int(facts[f"{what}_id"]))
    return result


def all_loaded(what: str) -> set[int]:
    text = subprocess.run(["bpftool", "-j", what, "show"], check=True, capture_output=True).stdout
    return {entry["id"] for entry in json.loads(text)}


def left_of(programs: set[int], links: set[int]) -> set[int]:
    """The programs that are still loaded after a while: the kernel frees them with some delay."""
    end_s = time.monotonic() + PATIENCE_S
    while (left := programs & all_loaded("prog") | links & all_loaded("link")) and time.monotonic() < end_s:
        time.sleep(0.1)
    return left


@needs_bpftool
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_probe_stays(agent, job, only, how):
    job = job(seconds=600)
    tracer = agent(*only(job))
    tracer.says("attached", "libnccl")
    job.go()
    tracer.says("1 communicator")
    programs, links = loaded_by(tracer.process.pid, "prog"), loaded_by(tracer.process.pid, "link")
    assert len(programs) >= 5
    assert len(links) >= 5
    tracer.ended(how)
    assert left_of(programs, links) == set()
    assert not job.wait(0.5)  # no rank has failed


def test_after_kill_9_the_trace_opens_and_the_next_start_goes_on(agent, job, only):
    job = job(seconds=600)  # the fixture ends it
    first = agent(*only(job))
    first.says("attached", "libnccl")
    job.go()
    first.stores()
    assert first.ended(signal.SIGKILL) == -signal.SIGKILL
    killed = node.read(first.db)
    assert len(killed.collectives) > 0
    assert killed.ends_ns[0] >= killed.collectives["ts_ns"][-1]
    second = agent(*only(job))
    second.stores(more_than=len(killed.collectives))
    assert second.ended(signal.SIGINT) == 0
    whole = node.read(first.db)
    assert len(whole.collectives) > len(killed.collectives)
    with sqlite3.connect(first.db) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT COUNT(*) FROM sessions").fetchone() == (2,)
    db.close()


def test_a_job_that_ended_without_an_agent_is_no_hang(agent, job, only):
    start = job
    job = start(seconds=600)
    first = agent(*only(job))
    first.says("attached", "libnccl")
    job.go()
    first.stores()
    assert first.ended(signal.SIGKILL) == -signal.SIGKILL
    assert (node.read(first.db).processes["ended_ns"] == UNKNOWN).any()
    for process in job.processes:
        process.kill()
        process.wait()
    second = agent(*only(start(seconds=1)))
    second.says("attached", "libnccl")
    assert second.ended(signal.SIGINT) == 0
    trace = node.read(first.db)
    assert (trace.processes["ended_ns"] != UNKNOWN).all()
    later = replace(trace, ends_ns=tuple(end_ns + 600 * 10**9 for end_ns in trace.ends_ns))
    assert [verdict.kind for verdict in diagnose(later).verdicts if verdict.kind == "hang"] == []


def test_ctrl_c_keeps_the_last_moment(agent, job, only):
    """All steps that the job itself had recorded before the end are in the trace, not only the committed ones."""
    job = job(seconds=600)
    tracer = agent(*only(job))
    tracer.says("attached", "libnccl")
    job.go()
    tracer.stores()
    n_steps = (job.folder / "rank0.csv").read_text().count("\n") - 1
    assert tracer.ended(signal.SIGINT) == 0
    assert not tracer.db.with_name("trace.db-wal").exists()
    trace = node.read(tracer.db)
    of_rank = trace.collectives[trace.collectives["pid"] == job.pids[0]]
    assert len(of_rank) >= n_steps * (N_BUCKETS + 1)


def test_a_closed_terminal_ends_the_trace_cleanly(agent):
    tracer = agent()
    tracer.says("process")
    assert tracer.ended(signal.SIGHUP) == 0
    assert not tracer.db.with_name("trace.db-wal").exists()


def test_a_second_tracer_of_the_same_trace_is_refused(agent):
    first = agent()
    first.says("process")
    second = agent()
    assert second.ended() == 4
    assert len(second.lines()) == 1
    assert "another stallscope trace" in second.lines()[0]
    assert first.ended(signal.SIGINT) == 0


def test_the_agent_imports_no_heavy_modules():
    code = "import sys, stallscope.agent; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not {"pyarrow", "duckdb", "pandas", "rich", "yaml"} & set(modules.split())


# ---- failures are reported in one line ----


def refusal(tracer, exit_code: int) -> str:
    assert tracer.ended() == exit_code
    (line,) = tracer.lines()
    assert line.startswith("stallscope: ")
    return line


def test_missing_capabilities_are_named(agent):
    confined = ("setpriv", "--bounding-set=-sys_admin,-bpf,-perfmon")
    message = refusal(agent(prefix=confined), 5)
    assert "CAP_BPF" in message
    assert "CAP_PERFMON" in message
    assert "CAP_SYS_PTRACE" not in message


def test_a_kernel_without_btf_is_named(agent):
    """An empty folder is mounted over the kernel's, for this process only."""
    hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs x /sys/kernel/btf && exec "$@"', "sh")
    assert "BTF" in refusal(agent(prefix=hidden), 5)


def test_a_container_with_process_numbers_of_its_own_is_named(agent):
    inside = ("unshare", "--pid", "--fork", "--mount-proc")
    assert "--pid=host" in refusal(agent(prefix=inside), 5)


def test_a_process_that_does_not_exist_is_named(agent):
    assert "4194999" in refusal(agent("--pid", "4194999"), 3)


def test_a_trace_that_cannot_be_written_is_named(agent):
    tracer = agent("--db", "/proc/nothing/trace.db")
    assert "/proc/nothing" in refusal(tracer, 4)


def test_a_file_that_is_not_a_trace_is_left_unchanged(agent, tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("my notes, which are no database\n" * 100)
    assert "notes.txt" in refusal(agent("--db", str(text)), 2)
    assert text.read_text().startswith("my notes")


def test_a_full_disk_ends_the_trace_and_stored_rows_remain(agent, job, only, tmp_path):
    with memory_disk(tmp_path / "small") as small:
        job = job(seconds=600)
        tracer = agent("--db", str(small / "trace.db"), *only(job))
        tracer.says("attached", "libnccl")
        job.go()
        assert tracer.ended() == 4
        last = tracer.lines()[-1]
        assert last.startswith("stallscope: ")
        assert "full" in last
        assert len(node.read(small / "trace.db").collectives) > 0
        assert not any("Traceback" in line for line in tracer.lines())
    assert os.path.ismount(small) is False
