"""`stallscope look` on a running process: an emulated CUPTI is loaded into it, records its kernels, and leaves it."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stallscope.capture.gpu import kernel_window
from stallscope.capture.gpu.kernel_window import KERNEL
from stallscope.diagnose.views import OTHER_KERNELS, gpu_windows
from stallscope.errors import CannotTrace, NotFound
from stallscope.exporters.kernel_tracks import kernel_tracks

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.live,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="look needs x86-64"),
]
GEMM, NCCL = "_Z4gemmPf", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The emulated libraries and the job; the library of look is where the package expects it."""
    out = tmp_path_factory.mktemp("look")
    subprocess.run(["make", "-s", "-C", repository, "plugin"], check=True)
    shared = ["gcc", "-O2", "-shared", "-fPIC"]
    subprocess.run(
        [*shared, "-Wl,-soname,libcuda.so.1", "-o", out / "libcuda.so.1", HERE / "emulated_cuda.c"],
        check=True,
    )
    (out / "extras").mkdir()
    for name in ("libcupti.so.12", "extras/libcupti.so.12"):
        subprocess.run([*shared, "-o", out / name, HERE / "emulated_cupti.c", "-lpthread"], check=True)
    subprocess.run(
        [
            "gcc",
            "-O2",
            "-o",
            out / "job",
            HERE / "cuda_process.c",
            out / "libcuda.so.1",
            "-ldl",
            f"-Wl,-rpath,{out}",
        ],
        check=True,
    )
    return out


class Job:
    """A running job."""

    def __init__(self, folder: Path, *words: str, **environment: str):
        self.process = subprocess.Popen(
            [folder / "job", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"LD_PRELOAD": str(folder / "libcupti.so.12")} | environment,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().split() == ["ready", str(self.process.pid)]
        self.pid = self.process.pid

    def ends(self) -> tuple[int, int, int]:
        """The number of its launches, signals and interrupted calls."""
        out, _ = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        word, *counts = out.split()
        assert word == "end"
        return tuple(map(int, counts))  # type: ignore[return-value]


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def started(*words: str, **environment: str) -> Job:
        jobs.append(Job(folder, *words, **environment))
        return jobs[-1]

    yield started
    for job in jobs:
        with job.process:
            job.process.kill()


def threads(pid: int) -> set[str]:
    return {(task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()}


def descriptors(pid: int) -> list[str]:
    return sorted(str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())


def test_the_kernels_of_a_window_are_recorded_and_the_process_is_left_as_it_was(start):
    job = start()
    before = descriptors(job.pid)
    window = kernel_window(job.pid, seconds=0.5)
    assert {window.names[number] for number in window.kernels["name"]} == {GEMM, NCCL}
    assert len(window.kernels) > 20 and window.n_lost == 0 and window.is_detached
    assert set(window.kernels["end_ns"] - window.kernels["start_ns"]) == {500_000, 250_000}
    assert (window.end_ns - window.begin_ns) >= 0.5e9
    assert threads(job.pid) == {"job"} and descriptors(job.pid) == before
    n_launches, _, n_interrupted = job.ends()
    assert n_launches > len(window.kernels) and n_interrupted == 0


def test_a_second_window_uses_the_library_that_is_loaded(start):
    job = start()
    for _ in range(3):
        assert len(kernel_window(job.pid, seconds=0.2).kernels) > 5
    maps = Path(f"/proc/{job.pid}/maps").read_text()
    assert len({line.split()[4] for line in maps.splitlines() if "memfd:stallscope-look-" in line}) == 1
    assert "memfd:stallscope-look (" not in maps
    job.ends()


def test_signals_that_arrive_meanwhile_are_delivered(start):
    """Signals of real time are queued, so that each arrives once."""
    job, n_sent, is_over = start("signals"), [0], threading.Event()

    def send() -> None:
        while not is_over.wait(0.001):
            os.kill(job.pid, signal.SIGRTMIN)
            n_sent[0] += 1

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(4):
            assert len(kernel_window(job.pid, seconds=0.1).kernels) > 0
    finally:
        is_over.set()
        sender.join()
    assert job.ends()[1] == n_sent[0] > 0


def test_an_active_profiler_is_not_disturbed(start, folder: Path):
    job = start("profiled", str(folder / "libcupti.so.12"))
    with pytest.raises(CannotTrace, match="another profiler has subscribed to CUPTI"):
        kernel_window(job.pid, seconds=0.2)
    assert threads(job.pid) == {"job"}
    job.ends()


def test_a_traced_process_is_refused(start):
    job = start()
    tracer = subprocess.Popen(
        [
            "python3",
            "-c",
            "import ctypes, os, sys\n"
            f"ctypes.CDLL(None).ptrace(0x4206, {job.pid}, None, None)\n"
            "print('attached', flush=True)\n"
            "sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with tracer:
        assert tracer.stdout is not None and tracer.stdout.readline() == "attached\n"
        with pytest.raises(CannotTrace, match=f"traced by process {tracer.pid}"):
            kernel_window(job.pid, seconds=0.2)
        assert tracer.stdin is not None
        tracer.stdin.close()
    job.ends()


def test_a_process_that_never_waits_is_left_alone(start):
    job = start("computes")
    with pytest.raises(CannotTrace, match="no thread of process"):
        kernel_window(job.pid, seconds=0.2)
    job.ends()


def test_an_idle_process_keeps_cupti_without_a_subscriber(start):
    job = start("idle")
    window = kernel_window(job.pid, seconds=0.1)
    assert len(window.kernels) == 0 and not window.is_detached
    assert threads(job.pid) == {"job"}
    job.ends()


def test_a_newer_cupti_is_refused(start):
    job = start(EMULATED_VERSION="140000")
    with pytest.raises(CannotTrace, match="unknown version of CUPTI"):
        kernel_window(job.pid, seconds=0.2)
    job.ends()


@pytest.mark.pure
def test_a_process_without_cuda_is_reported():
    with pytest.raises(NotFound, match="has not loaded CUDA"):
        kernel_window(os.getpid(), seconds=0.2)


def test_the_command_prints_the_kernels_and_how_busy_the_gpu_was(start, run):
    job = start()
    code, out, err = run("look", "--pid", job.pid, "--seconds", "0.4", "--json")
    assert code == 0, err
    report = json.loads(out)
    (gpu,) = report["gpus"]
    assert report["is_detached"] and [row["name"] for row in gpu["kernels"]] == [GEMM, NCCL]
    assert gpu["kernels"][0]["mean_us"] == pytest.approx(500) and gpu["kernels"][1]["is_nccl"]
    assert gpu["busy"] > gpu["busy_in_nccl"] > 0
    code, out, err = run("look", "--pid", job.pid, "--seconds", "0.2")
    assert code == 0 and "GPU 0 of the process: busy" in out and GEMM in out, err


def test_the_command_writes_a_timeline_under_the_rank(start, run, tmp_path: Path):
    job = start(RANK="3", WORLD_SIZE="8")
    path = tmp_path / "kernels.pftrace"
    code, _, err = run("look", "--pid", job.pid, "--seconds", "0.3", "--timeline", path)
    assert code == 0 and f"{path}: " in err, err
    content = path.read_bytes()
    for name in (f"rank 3: job {job.pid}", "GPU 0, stream ", "GPU 0: kernels of NCCL", GEMM, NCCL):
        assert name.encode() in content
    code, _, err = run("look", "--pid", job.pid, "--seconds", "0.1", "--timeline", tmp_path / "no" / "folder")
    assert code != 0 and "choose another --timeline" in err


def test_the_window_states_its_wall_time_and_rank(start):
    before_ns = time.time_ns()
    window = kernel_window(start(RANK="1", WORLD_SIZE="2").pid, seconds=0.2)
    assert before_ns < window.begin_wall_ns < time.time_ns() - 200_000_000
    assert (window.rank, window.process) == (1, "job")


@pytest.mark.pure
def test_a_timeline_has_a_track_for_each_stream_and_for_nccl_on_each_gpu():
    rows = np.zeros(5, KERNEL)
    rows["start_ns"], rows["end_ns"] = [0, 10, 20, 30, 40], [8, 18, 38, 50, 44]
    rows["name"], rows["stream"], rows["device"] = [0, 1, 0, 0, 9], [7, 9, 7, 7, 8], [0, 0, 0, 0, 1]
    tracks = kernel_tracks(
        rows, (GEMM, NCCL), node="n1", process="rank 1: python", begin_ns=5, wall_ns=10**18
    )
    assert (tracks.clock_ns, tracks.wall_ns) == (5, 10**18)
    assert [(track.name, [part.name for part in track.slices]) for track in tracks.tracks[2:]] == [
        ("GPU 0, stream 7", [GEMM, GEMM]),
        ("GPU 0, stream 7 (2)", [GEMM]),  # the third overlaps the second
        ("GPU 0: kernels of NCCL", [NCCL]),
        ("GPU 1, stream 8", [OTHER_KERNELS]),
    ]
    assert all(track.parent == 2 for track in tracks.tracks[2:])


@pytest.mark.pure
def test_busy_shares_count_overlapping_kernels_once():
    rows = np.zeros(4, KERNEL)
    rows["start_ns"], rows["end_ns"] = [0, 100, 150, 800], [100, 300, 250, 1200]
    rows["name"], rows["stream"] = [0, 1, 0, 1], [1, 2, 1, 2]
    (gpu,) = gpu_windows(rows, (GEMM, NCCL), begin_ns=0, end_ns=1000)
    assert gpu.busy == pytest.approx(0.5)  # 0 to 300 and 800 to 1000
    assert gpu.busy_in_nccl == pytest.approx(0.3)  # 100 to 150, 250 to 300, 800 to 1000
    assert gpu.longest_idle_ms == pytest.approx(500 / 1e6) and gpu.n_streams == 2
    assert [(row.name, row.n) for row in gpu.kernels] == [(NCCL, 2), (GEMM, 2)]
