"""Real processes, real probes: every collective of every rank is in the trace, once, in order."""

import csv
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from stallscope.agent import Options, raw_path, trace
from stallscope.demo.job import BUCKET_COUNT, N_BUCKETS
from stallscope.demo.live_demo import Job
from stallscope.events import kernel
from stallscope.events.names import CollectiveFlag, Datatype, HostKind, Op
from stallscope.events.trace import Trace
from stallscope.store import node

from ..patience import until

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

ROUNDS_A_STEP = N_BUCKETS + 1  # gradients, and the loss
STEPS = 150  # some seconds: who a process is is read once a second


def steps(job: Job, rank: int) -> int:
    """The steps that the rank itself recorded."""
    with (job.folder / f"rank{rank}.csv").open() as file:
        return len(list(csv.DictReader(file)))


def of_rank(trace: Trace, job: Job, rank: int) -> np.ndarray:
    return trace.collectives[trace.collectives["pid"] == job.pids[rank]]


def check_complete(trace: Trace, job: Job, *, n_rounds: int) -> None:
    """Every rank has rounds 0 .. n-1 of one communicator, in order, and nothing was lost."""
    assert trace.lost == {}
    assert set(trace.collectives["pid"].tolist()) == set(job.pids)
    assert len(np.unique(trace.collectives["comm_hash"])) == 1
    for rank in range(job.plan.ranks):
        rows = of_rank(trace, job, rank)
        assert rows["seq"].tolist() == list(range(n_rounds))
        assert (np.diff(rows["ts_ns"]) > 0).all()
        assert set(rows["comm_rank"].tolist()) == {rank}
        assert set(rows["nranks"].tolist()) == {job.plan.ranks}


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_round_of_every_rank_is_recorded(agent, job, only, ranks):
    job = job(ranks=ranks, steps=STEPS)
    tracer = agent(*only(job))
    for library in ("libcudart.so.12", "libnccl.so.2"):
        tracer.says("attached", library)
    job.go()
    assert job.wait(60)
    assert tracer.ended(signal.SIGINT) == 0
    result = node.read(tracer.db)
    assert [steps(job, rank) for rank in range(ranks)] == [STEPS] * ranks
    check_complete(result, job, n_rounds=STEPS * ROUNDS_A_STEP)
    ends = result.host_events[result.host_events["kind"] == HostKind.EXIT]
    ends = ends[np.isin(ends["pid"], job.pids)]
    assert (sorted(ends["pid"].tolist()), set(ends["value"].tolist())) == (sorted(job.pids), {0})


def test_the_trace_has_the_calls_ledger_and_state_of_a_rank(agent, job, only):
    job = job(steps=STEPS)
    tracer = agent(*only(job))
    tracer.says("attached", "libnccl")
    job.go()
    assert job.wait(60)
    assert tracer.ended(signal.SIGTERM) == 0
    result = node.read(tracer.db)
    rows = of_rank(result, job, 1)
    assert set(rows["op"].tolist()) == {Op.ALL_REDUCE}
    assert not (rows["flags"] & CollectiveFlag.LATE_ATTACH).any()
    gradients, losses = (
        rows[rows["seq"] % ROUNDS_A_STEP < N_BUCKETS],
        rows[rows["seq"] % ROUNDS_A_STEP == N_BUCKETS],
    )
    assert set(gradients["count"].tolist()) == {BUCKET_COUNT}
    assert set(gradients["count_bytes"].tolist()) == {4 * BUCKET_COUNT}
    assert set(losses["datatype"].tolist()) == {Datatype.FLOAT64}
    assert set(rows["device"].tolist()) == {1}

    elapsed = np.diff(rows["ts_ns"])
    charged = np.diff(rows["ledger_ns"].sum(axis=1))
    assert np.array_equal(elapsed, charged)
    assert (np.diff(rows["ledger_ns"], axis=0) >= 0).all()

    (process,) = result.processes[result.processes["pid"] == job.pids[1]]
    assert (process["rank"], process["local_rank"]) == (1, 1)
    assert 0 < process["ts_ns"] <= rows["ts_ns"][0]
    assert process["ended_ns"] > rows["ts_ns"][-1]
    (member,) = result.communicators[result.communicators["pid"] == job.pids[1]]
    assert (member["comm_rank"], member["nranks"]) == (1, 2)
    assert member["ended_ns"] > rows["ts_ns"][-1]

    snapshots = result.snapshots[result.snapshots["pid"] == job.pids[1]]
    assert snapshots["alive"].tolist() == [1] * (len(snapshots) - 1) + [0]
    assert len(result.clocks) >= 2
    assert result.ends_ns[0] >= process["ended_ns"]
    assert result.facts["boot_id"]


def test_split_communicators_are_known_with_their_ranks(agent, job, only):
    """Tensor parallel pairs, split from the job's communicator: ranks 0 and 1, ranks 2 and 3."""
    job = job(ranks=4, steps=20, groups="tp")
    tracer = agent(*only(job))
    tracer.says("attached", "libnccl")
    job.go()
    assert job.wait(60)
    assert tracer.ended(signal.SIGINT) == 0
    result = node.read(tracer.db)
    whole = {
        int(communicator["comm_hash"]) for communicator in result.communicators if communicator["nranks"] == 4
    }
    pairs = result.communicators[result.communicators["nranks"] == 2]
    assert len(whole) == 1
    assert set(pairs["parent_hash"].tolist()) == whole
    for ranks in ((0, 1), (2, 3)):
        members = pairs[np.isin(pairs["pid"], [job.pids[rank] for rank in ranks])]
        assert len(np.unique(members["comm_hash"])) == 1
        assert {int(communicator["pid"]): int(communicator["comm_rank"]) for communicator in members} == {
            job.pids[rank]: index for index, rank in enumerate(ranks)
        }
    assert len(np.unique(pairs["comm_hash"])) == 2


def test_all_raw_events_are_kept_when_asked_for(agent, job, only):
    job = job(steps=20)
    tracer = agent("--record-all", *only(job))
    tracer.says("attached", "libnccl")
    job.go()
    assert job.wait(60)
    assert tracer.ended(signal.SIGINT) == 0
    result, raw = node.read(tracer.db), np.fromfile(raw_path(tracer.db), kernel.RAW)
    kinds = {kind.name: int((raw["kind"] == kind).sum()) for kind in kernel.Kind if kind >= kernel.FIRST_RAW}
    assert kinds["SNAPSHOT"] == len(result.collectives) == 2 * 20 * ROUNDS_A_STEP
    assert all(kinds[name] > 0 for name in ("ENTER", "RETURN", "OFF", "ON", "BORN"))
    assert set(raw["pid"].tolist()) == set(job.pids)
    assert result.lost == {}


def test_the_trace_can_be_read_while_it_is_written(agent, job, only):
    job = job(seconds=600)
    tracer = agent(*only(job))
    tracer.says("attached", "libnccl")
    job.go()
    n_stored = 0
    for _ in range(3):
        n_stored = tracer.stores(more_than=n_stored)
    assert tracer.process.poll() is None


def test_a_job_that_starts_later_is_traced_from_its_first_round(agent, job):
    """The agent was not informed of it, and it runs a copy of the libraries that has no probes yet."""
    tracer = agent()
    tracer.says("0 processes" if not _others() else "process")
    job = job(steps=STEPS)
    tracer.says("attached", "libnccl")  # a real job takes seconds from loading NCCL to its first communicator
    job.go()
    assert job.wait(60)
    assert tracer.ended(signal.SIGINT) == 0
    result = node.read(tracer.db)
    own_rows = np.isin(result.collectives["pid"], job.pids)
    for rank in range(2):
        assert of_rank(result, job, rank)["seq"].tolist() == list(range(STEPS * ROUNDS_A_STEP))
    assert not (result.collectives["flags"][own_rows] & CollectiveFlag.LATE_ATTACH).any()


def _others() -> bool:
    """Whether other processes run jobs on this machine now."""
    return any(b"libnccl" in maps for maps in map(_maps, Path("/proc").glob("[0-9]*/maps")))


def _maps(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_running_job_is_traced_with_the_late_attach_flag(agent, job, only):
    job = job(seconds=600)
    job.go()
    until(lambda: (job.folder / "rank0.csv").exists() and steps(job, 0))
    tracer = agent(*only(job))
    tracer.stores()
    assert tracer.ended(signal.SIGINT) == 0
    result = node.read(tracer.db)
    assert set(result.collectives["pid"].tolist()) == set(job.pids)
    assert (result.collectives["flags"] & CollectiveFlag.LATE_ATTACH).all()
    for rank in range(2):
        assert (np.diff(of_rank(result, job, rank)["seq"]) == 1).all()
    assert result.lost == {}


def test_descendants_of_a_chosen_process_are_traced(agent, job):
    """The chosen process is this process, which started the ranks."""
    tracer = agent("--pid", str(os.getpid()))
    tracer.says("0 process")
    job = job(steps=20)
    tracer.says("attached", "libnccl")
    job.go()
    assert job.wait(60)
    assert tracer.ended(signal.SIGINT) == 0
    check_complete(node.read(tracer.db), job, n_rounds=20 * ROUNDS_A_STEP)


def test_a_duration_ends_the_trace(agent):
    begin_s = time.monotonic()
    tracer = agent("--duration", "1500ms")
    assert tracer.ended() == 0
    assert time.monotonic() - begin_s > 1.5
    assert any("lost" in line for line in tracer.lines())
    assert len(node.read(tracer.db).clocks) >= 2


def test_the_size_of_the_trace_is_kept_by_dropping_the_oldest(agent, job, only):
    job = job(seconds=6)
    tracer = agent(*only(job))
    tracer.says("attached to", "libcudart")
    job.go()
    assert job.wait(60)
    assert tracer.ended(signal.SIGINT) == 0
    whole = node.read(tracer.db)
    empty = tracer.db.with_name("empty.db")
    node.NodeTrace(empty).close()
    half = (empty.stat().st_size + tracer.db.stat().st_size) // 2
    options = Options(db=tracer.db, node="here", max_db_bytes=half, pids=(os.getpid(),), duration_s=0.5)
    trace(options, out=io.StringIO())
    kept = node.read(tracer.db)
    assert 0 < len(kept.collectives) < len(whole.collectives)
    assert kept.collectives["ts_ns"][-1] == whole.collectives["ts_ns"][-1]
    assert kept.collectives["ts_ns"][0] > whole.collectives["ts_ns"][0]
    assert len(kept.processes) == len(whole.processes)
    assert tracer.db.stat().st_size < 1.2 * half


def test_the_sudo_user_can_read_the_trace_without_root(agent, job, only, monkeypatch):
    """While it is written, and afterwards."""
    monkeypatch.setenv("SUDO_GID", "65534")
    job = job(seconds=600)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        db = Path(folder) / "trace.db"
        tracer = agent("--db", str(db), *only(job))
        tracer.db = db
        job.go()
        tracer.stores()
        assert n_read(db, uid=65534, gid=65534) > 0
        assert n_read(db, uid=65534, gid=65533) < 0
        assert tracer.ended(signal.SIGINT) == 0
        assert n_read(db, uid=65534, gid=65534) > 0


def n_read(db: Path, *, uid: int, gid: int) -> int:
    """Collectives that a user with no more rights than these reads; -1: none, by a clear error."""
    # A separate process, not a fork of this process: gRPC's threads do not survive a fork.
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from stallscope.errors import BadTrace\nfrom stallscope.store import node\n"
        "db, uid, gid = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])\n"
        "node.read(db)  # also imports modules that this user may not read\n"
        "os.setgroups([]), os.setgid(gid), os.setuid(uid)\n"
        "try:\n    print(len(node.read(db).collectives))\n"
        "except BadTrace:\n    print(-1)"
    )
    arguments = [sys.executable, "-c", code, str(db), str(uid), str(gid)]
    return int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
