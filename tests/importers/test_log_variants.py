"""Lines of further launchers and engines, and logs in further containers: the rank that each log states."""

import json
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

FRAME = '  File "/w/train.py", line 31, in step\n    f()\n'
TRACEBACK = f"Traceback (most recent call last):\n{FRAME}"


def with_prefix(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


LOGS = {
    "DeepSpeed's launcher": (
        "".join(
            f"[launch.py:253:main] process {40 + i} spawned with command: ['--local_rank={i}']\n"
            for i in range(4)
        )
        + "[launch.py:322:sigkill_handler] ['/usr/bin/python3', '-u', 't.py', '--local_rank=3'] exits with return "
        "code = -9\n",
        3,
        "killed by SIGKILL",
    ),
    "torch.multiprocessing.spawn": (
        f"{TRACEBACK}torch.multiprocessing.spawn.ProcessRaisedException: \n\n"
        f"-- Process 2 terminated with the following error:\n{TRACEBACK}IndexError: list index out of range\n\n",
        2,
        "IndexError",
    ),
    "a signal in torch.multiprocessing.spawn": (
        f"{TRACEBACK}torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGSEGV\n",
        1,
        "killed by SIGSEGV",
    ),
    "Open MPI": (
        "mpirun detected that one or more processes exited with non-zero status. The first process to do so was:\n\n"
        "  Process name: [[4321,1],3]\n  Exit code:    1\n",
        3,
        "exit status 1",
    ),
    "Hydra": (
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   RANK 2 PID 4242 RUNNING AT node7\n"
        "=   KILLED BY SIGNAL: 9 (Killed)\n",
        2,
        "killed by SIGKILL",
    ),
    "vLLM": (
        with_prefix(
            "(VllmWorker rank=3 pid=44) ERROR 07-01 12:00:00 [multiproc_executor.py:522] ",
            f"{TRACEBACK}RuntimeError: CUDA error: an illegal memory access was encountered",
        )
        + with_prefix(
            "ERROR 07-01 12:00:01 [core.py:588] ",
            f"{TRACEBACK}RuntimeError: Worker failed with error 'CUDA error', please check the stack trace above",
        ),
        3,
        "CUDA error",
    ),
    "vLLM's tensor-parallel worker": (
        with_prefix(
            "(Worker_TP1 pid=4402) ERROR 09-01 12:00:00 [x/core.py:67] ", f"{TRACEBACK}ValueError: bad"
        )
        + with_prefix("(EngineCore_DP0 pid=43) ", f"{TRACEBACK}RuntimeError: Worker failed with error 'bad'"),
        1,
        "ValueError: bad",
    ),
    "SGLang": (
        "sglang.launch_server\n" + with_prefix("[2025-05-01 10:00:00 TP3] ", f"{TRACEBACK}ValueError: bad"),
        3,
        "ValueError: bad",
    ),
    "Ray Train": (
        "".join(
            f"(T pid=8) - (node_id=a, ip=10.0.0.2, pid={11 + i}) world_rank={i}, local_rank={i}\n"
            for i in range(4)
        )
        + with_prefix("(RayTrainWorker pid=13, ip=10.0.0.2) ", f"{TRACEBACK}ValueError: bad shard"),
        2,
        "ValueError: bad shard",
    ),
}


@pytest.mark.parametrize("launcher", LOGS)
def test_the_rank_that_a_launcher_states_is_named(run, tmp_path: Path, launcher: str):
    text, rank, words = LOGS[launcher]
    (tmp_path / "job.log").write_text(text)
    code, out, _ = run("explain", "--json", tmp_path / "job.log")
    (verdict,) = json.loads(out)["verdicts"]
    assert (code, verdict["kind"], verdict["ranks"]) == (20, "failure", [rank])
    assert words in verdict["summary"]


def timeout(rank: int, local: int, group: str, seq: int) -> str:
    """The lines of PyTorch 2.4 and 2.5, which number the work but not the group in the first line."""
    where = f"[rank{rank}]:[E1110 09:02:59.123456789 ProcessGroupNCCL.cpp"
    return (
        f"{where}:607] [Rank {local}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, "
        "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600043 milliseconds before timing out.\n"
        f"{where}:1709] [PG {group} Rank {local}] Timeout at NCCL work: {seq}, last enqueued NCCL work: {seq}, "
        f"last completed NCCL work: {seq - 1}.\n"
    )


@pytest.mark.parametrize(("silent", "stride", "first"), [(2, 1, 4), (1, 2, 1), (2, 2, 0)])
def test_the_silent_member_of_a_group_is_named(run, tmp_path: Path, silent: int, stride: int, first: int):
    """Three of four members wait in their group, the other ranks in the group of all ranks; one rank states nothing."""
    members = [first + stride * n for n in range(4)]
    culprit = members[silent]
    log = "".join(
        timeout(rank, members.index(rank), "ID 2 PG GUID 5(mesh_tp)", 900)
        if rank in members
        else timeout(rank, rank, "ID 0 PG GUID 0(default_pg)", 300)
        for rank in range(8)
        if rank != culprit
    )
    (tmp_path / "job.log").write_text(log)
    code, out, _ = run("explain", "--json", tmp_path / "job.log")
    (verdict,) = json.loads(out)["verdicts"]
    assert (code, verdict["kind"], verdict["ranks"]) == (20, "hang", [culprit])
    assert "mesh_tp (group 5)" in verdict["summary"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2025-11-01T10:00:00 DUE TO TIME LIMIT ***",
            "time limit",
        ),
        ("[rank4]: [Rank 4] ProcessGroupNCCL's watchdog got stuck for 480 seconds without progress", "480 s"),
        ("[rank4]: step 7", "neither a time-out nor the end of a process"),
    ],
)
def test_a_log_without_a_culprit_is_inconclusive_with_its_reason(run, tmp_path: Path, line: str, words: str):
    (tmp_path / "job.log").write_text(f"torchrun world_size=8\n{line}\n")
    code, out, _ = run("explain", "--json", tmp_path / "job.log")
    (verdict,) = json.loads(out)["verdicts"]
    assert (code, verdict["kind"]) == (21, "inconclusive")
    assert words in verdict["summary"] and "slow" not in verdict["summary"]


def test_a_node_that_slurm_lost_is_named(run, tmp_path: Path):
    (tmp_path / "job.out").write_text("srun: error: Node failure on node002\nsrun: Job step aborted\n")
    _, out, _ = run("explain", "--json", tmp_path / "job.out")
    assert json.loads(out)["verdicts"][0]["nodes"] == ["node002"]


def test_the_number_in_the_name_of_a_launchers_log_is_not_a_rank(run, tmp_path: Path):
    log = f"{TRACEBACK}ValueError: bad\nfailed (exitcode: 1) local_rank: 5 (pid: 12) of binary: python torchrun\n"
    (tmp_path / "resnet_r50.log").write_text(log)
    _, out, _ = run("explain", "--json", tmp_path / "resnet_r50.log")
    (verdict,) = json.loads(out)["verdicts"]
    assert verdict["ranks"] == [5] and "ValueError: bad" in verdict["summary"]


def compressed(text: bytes, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, codec) as stream:
        stream.write(text)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("form", ["zstd", "lz4", "utf-16-le", "utf-16-be", "utf-16"])
def test_a_log_in_another_form_gives_the_same_answer(run, tmp_path: Path, form: str):
    text, rank, _ = LOGS["Open MPI"]
    is_packed = form in ("zstd", "lz4")
    (tmp_path / "job.log").write_bytes(compressed(text.encode(), form) if is_packed else text.encode(form))
    _, out, _ = run("explain", "--json", tmp_path / "job.log")
    assert json.loads(out)["verdicts"][0]["ranks"] == [rank]


def test_an_archive_is_refused_with_its_remedy(run, tmp_path: Path):
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text("torchrun\n")
    with tarfile.open(tmp_path / "logs.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "a.log", "a.log")
    with zipfile.ZipFile(tmp_path / "logs.zip", "w") as archive:
        for name in ("a.log", "b.log"):
            archive.write(tmp_path / name, name)
    for name, words in (
        ("logs.tar.gz", "is a tar archive: unpack it"),
        ("logs.zip", "is a zip archive of 2 files: unpack"),
    ):
        code, _, err = run("explain", tmp_path / name)
        assert code != 0 and words in err and "Traceback" not in err


STACKS = {
    rank: [("/w/data.py", 12, "read")]
    if rank == 2
    else [("/w/torch/distributed/distributed_c10d.py", 25, "all_reduce")]
    for rank in range(4)
}


@pytest.mark.parametrize("heading", ["Current thread 0x00007f1", "Timeout (0:10:00)!\nThread 0x00007f1"])
def test_stacks_of_faulthandler_between_the_lines_of_a_log_name_the_odd_rank(
    run, tmp_path: Path, heading: str
):
    log = "".join(
        with_prefix(
            f"[rank{rank}]: ",
            "Thread 0x00007f9 (most recent call first):\n"
            '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
            f"{heading} (most recent call first):\n"
            + "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in frames)
            + '  File "/w/train.py", line 9 in <module>\n',
        )
        for rank, frames in STACKS.items()
    )
    (tmp_path / "job.log").write_text("step 1\n" * 5 + log + "[rank0]: step 2\n")
    _, out, _ = run("explain", "--json", tmp_path / "job.log")
    (verdict,) = json.loads(out)["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("hang", [2])
    assert "data.py:12 read" in verdict["summary"]


def test_dumps_of_containers_share_a_process_id(run, tmp_path: Path):
    for rank, frames in STACKS.items():
        text = "".join(f"    {name} ({file}:{line})\n" for file, line, name in frames)
        (tmp_path / f"train-worker-{rank}.txt").write_text(
            f'Process 1: python train.py\nPython v3.10.12 (/usr/bin/python)\n\nThread 1 (active): "MainThread"\n{text}'
            "    <module> (train.py:9)\n"
        )
    _, out, _ = run("explain", "--json", tmp_path)
    (verdict,) = json.loads(out)["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == ("hang", [2])


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_rank_that_never_begins_a_communicator_is_named(run, tmp_path: Path, is_complete: bool):
    """ncclCommInitRank of three of four ranks; complete on all ranks it shows no culprit."""
    states = ("Init START", "Init COMPLETE") if is_complete else ("Init START",)
    lines = [
        f"n0:{30 + r}:{30 + r} [{r}] NCCL INFO ncclCommInitRank comm 0x5{r} rank {r} nranks 4 commId 0xab - {s}"
        for r in range(4)
        for s in states
        if r != 2 or is_complete
    ]
    (tmp_path / "nccl.log").write_text("\n".join(lines) + "\n")
    _, out, _ = run("explain", "--json", tmp_path)
    (verdict,) = json.loads(out)["verdicts"]
    assert (verdict["kind"], verdict["ranks"]) == (("inconclusive", []) if is_complete else ("hang", [2]))
    assert is_complete or "round 0 (ncclCommInitRank)" in verdict["summary"]
