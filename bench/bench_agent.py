"""Cost of the agent for a job of 8 ranks with 2,000 collectives a second: CPU, BPF programs, memory.

The ranks run on the emulated libraries: ten times a second each rank enqueues 25 collectives and work for the GPU, and
waits for it. CPU is the CPU time of the agent's process. The run time of the BPF programs is the kernel's own count and
includes the counting (about 20 ns a run). The trap into the kernel, which each probe costs a rank, is not included: see
bench_hook_cost.py. Needs root, gcc, and the built BPF programs.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from report import report

from stallscope.demo import build
from stallscope.demo.gpu import FLOAT32, Gpu
from stallscope.demo.job import meet
from stallscope.store import node

N_RANKS = 8
COLLECTIVES_PER_S = 2000
STEPS_PER_S = 10
WARM_UP_S = 12
MEASURED_S = 20
STATISTICS = Path("/proc/sys/kernel/bpf_stats_enabled")
TRACE = "from stallscope.cli import main; main()"


def main() -> None:
    """Measure and report; with arguments: be a rank."""
    if len(sys.argv) > 1:
        rank(Path(sys.argv[1]), int(sys.argv[2]), nranks=int(sys.argv[3]))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        ranks = [
            stack.enter_context(running(rank_command(folder, number), folder)) for number in range(N_RANKS)
        ]
        for process in ranks:
            process.stdout.readline()
        agent = stack.enter_context(running(agent_command(folder, ranks), folder))
        await_attached(folder / "said", agent)
        for process in ranks:
            process.stdin.write(b"\n")
            process.stdin.flush()
        with counted_runs():
            report("agent", measured(agent.pid, folder / "trace.db"))


def rank_command(folder: Path, number: int, *, nranks: int = N_RANKS) -> list[str]:
    """Starts a rank, which loads its libraries and waits for a line."""
    return [sys.executable, __file__, str(folder), str(number), str(nranks)]


def agent_command(folder: Path, ranks: list[subprocess.Popen[bytes]]) -> list[str]:
    """Starts the agent as a user would."""
    flags = [word for process in ranks for word in ("--pid", str(process.pid))]
    return [sys.executable, "-c", TRACE, "trace", "--db", str(folder / "trace.db"), *flags]


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed in the end."""
    with (folder / "said").open("ab") as file:
        environment = os.environ | {"EMULATED_NCCL_NAME": folder.name}
        process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=file, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def await_attached(path: Path, agent: subprocess.Popen[bytes]) -> None:
    """Wait until both libraries are hooked."""
    while path.read_text().count("attached to") < len(build.LIBRARIES):
        if agent.poll() is not None:
            sys.exit(path.read_text())
        time.sleep(0.05)


@contextmanager
def counted_runs() -> Iterator[None]:
    """The kernel counts runs and time of all BPF programs."""
    before = STATISTICS.read_text()
    STATISTICS.write_text("1")
    try:
        yield
    finally:
        STATISTICS.write_text(before)


def measured(pid: int, db: Path) -> dict[str, Any]:
    """CPU and memory of the agent over MEASURED_S, and the rows that it captured in that time."""
    time.sleep(WARM_UP_S)
    begin_s, cpu_s, run_s, runs = time.monotonic(), process_cpu_s(pid), *program_runs(pid)
    time.sleep(MEASURED_S)
    end_s, more_cpu_s, more_run_s, more_runs = time.monotonic(), process_cpu_s(pid), *program_runs(pid)
    elapsed_s = end_s - begin_s
    trace = node.read(db, since_ns=10**10)
    collectives = trace.collectives
    covered_s = float(collectives["ts_ns"][-1] - collectives["ts_ns"][0]) / 1e9
    return {
        "n_ranks": len(set(collectives["pid"].tolist())),
        "collectives_per_s": round(len(collectives) / covered_s),
        "n_lost_records": sum(trace.lost.values()),
        "agent_cpu_percent": round(100 * (more_cpu_s - cpu_s) / elapsed_s, 2),
        "programs_cpu_percent": round(100 * (more_run_s - run_s) / elapsed_s, 2),
        "programs_runs_per_s": round((more_runs - runs) / elapsed_s),
        "sum_cpu_percent": round(100 * (more_cpu_s - cpu_s + more_run_s - run_s) / elapsed_s, 2),
        "peak_rss_mb": round(status_kb(pid, "VmHWM") / 1024, 1),
        "rss_mb": round(status_kb(pid, "VmRSS") / 1024, 1),
        "trace_bytes_per_collective": round(db.stat().st_size / node_count(db), 1),
        "measured_s": round(elapsed_s, 1),
        "load_average": round(os.getloadavg()[0], 2),
    }


def process_cpu_s(pid: int) -> float:
    """User and system time that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def program_runs(pid: int) -> tuple[float, int]:
    """Seconds and runs of all BPF programs that the process has open."""
    seconds, runs = 0.0, 0
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        facts = dict(line.split(":\t", 1) for line in path.read_text().splitlines() if ":\t" in line)
        if "run_cnt" in facts:
            seconds, runs = seconds + int(facts["run_time_ns"]) / 1e9, runs + int(facts["run_cnt"])
    return seconds, runs


def status_kb(pid: int, name: str) -> int:
    """A line of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def node_count(db: Path) -> int:
    """Collectives in the trace."""
    with node.reading(db) as connection:
        return int(connection.execute("SELECT COUNT(*) FROM collectives").fetchone()[0])


def rank(folder: Path, number: int, *, nranks: int) -> NoReturn:
    """Small all-reduces at an even rate, without end."""
    gpu = Gpu(build.build())
    print(flush=True)
    sys.stdin.readline()
    gpu.call("cudaSetDevice", number)
    stream = gpu.stream()
    buffer = gpu.new("cudaMalloc", 4096)
    comm = meet(gpu, folder, number, nranks=nranks)
    n_collectives = COLLECTIVES_PER_S // nranks // STEPS_PER_S
    due_s = time.monotonic()
    while True:
        for _ in range(n_collectives):
            gpu.all_reduce(buffer, 1024, datatype=FLOAT32, comm=comm, stream=stream)
        due_s += 1 / STEPS_PER_S
        gpu.launch(max(int((due_s - time.monotonic()) * 1e9), 0), stream)
        gpu.synchronize(stream)


if __name__ == "__main__":
    main()
