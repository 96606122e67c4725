"""Growth of a long-running agent: memory, descriptors, objects in the kernel, bytes per row.

Eight ranks make 2,000 collectives a second for an hour (--seconds N: less). Some processes a minute start, make a
communicator, allocate, call and end, and the agent has to release their state. Growth is a robust slope over all
samples except the first third, in which caches fill. Needs root, gcc, and the built BPF programs.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn

import numpy as np
from bench_agent import N_RANKS, TRACE, await_attached, process_cpu_s, rank_command, running, status_kb
from report import report

from stallscope.demo import build
from stallscope.demo.gpu import FLOAT32, Gpu
from stallscope.store import node

SECONDS = 3600
N_SAMPLES = 360
VISIT_EVERY_S = 5.0
VISITOR = "visitor"
_KINDS = {"map_type": "n_maps", "link_type": "n_links", "prog_type": "n_programs"}


class Sample(NamedTuple):
    """The state of an agent at_s seconds after its start."""

    at_s: float
    rss_mb: float
    n_fds: int
    n_threads: int
    n_maps: int
    n_links: int
    n_programs: int
    bytes_per_row: float
    n_rows: int
    n_lost: int


GROWING = ("rss_mb", "n_fds", "n_threads", "n_maps", "n_links", "n_programs", "bytes_per_row")


def main() -> None:
    """Measure and report; as a visitor: be one."""
    if sys.argv[1:] == [VISITOR]:
        visitor()
    parser = argparse.ArgumentParser(description="Does the agent grow?")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    seconds = parser.parse_args().seconds
    with TemporaryDirectory() as folder:
        report("soak", summary(*soaked(Path(folder), seconds)))


class Cost(NamedTuple):
    """The result of the soak test."""

    elapsed_s: float
    cpu_s: float
    n_visits: int


def soaked(
    folder: Path,
    seconds: float,
    *,
    n_ranks: int = N_RANKS,
    every_s: float | None = None,
    visit_every_s: float = VISIT_EVERY_S,
) -> tuple[list[Sample], Cost]:
    """Samples of an agent over this many seconds, one per every_s."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(running(rank_command(folder, number, nranks=n_ranks), folder))
            for number in range(n_ranks)
        ]
        for process in ranks:
            assert process.stdout is not None
            process.stdout.readline()
        db = folder / "trace.db"
        command = [
            sys.executable,
            "-c",
            TRACE,
            "trace",
            "--quiet",
            "--db",
            str(db),
            "--pid",
            str(os.getpid()),
        ]
        agent = stack.enter_context(running(command, folder))
        await_attached(folder / "said", agent)
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        begin_s, cpu_s = time.monotonic(), process_cpu_s(agent.pid)
        samples, n_visits = sampled(agent, db, seconds, every_s=every_s, visit_every_s=visit_every_s)
        cpu_s = process_cpu_s(agent.pid) - cpu_s
        elapsed_s = time.monotonic() - begin_s
    return samples, Cost(elapsed_s, cpu_s, n_visits)


def summary(samples: Sequence[Sample], cost: Cost) -> dict[str, Any]:
    """The reported numbers."""
    return {
        "lasted_s": round(cost.elapsed_s),
        "n_samples": len(samples),
        "n_visits": cost.n_visits,
        "collectives_per_s": round(samples[-1].n_rows / cost.elapsed_s),
        "agent_cpu_percent": round(100 * cost.cpu_s / cost.elapsed_s, 2),
        "growth_per_hour": growth_per_hour(samples),
        "settled": settled(samples)[0]._asdict(),
        "last": samples[-1]._asdict(),
        "n_lost_records": samples[-1].n_lost,
        "load_average": round(os.getloadavg()[0], 2),
    }


def sampled(
    agent: subprocess.Popen[bytes],
    db: Path,
    seconds: float,
    *,
    every_s: float | None,
    visit_every_s: float,
) -> tuple[list[Sample], int]:
    """Samples of the agent, and how many processes have come and gone."""
    every_s = every_s or max(seconds / N_SAMPLES, 1.0)
    begin_s = time.monotonic()
    samples: list[Sample] = []
    visits: list[subprocess.Popen[bytes]] = []
    next_s, next_visit_s, n_visits = begin_s + every_s, begin_s, 0
    try:
        while time.monotonic() - begin_s < seconds:
            time.sleep(max(min(next_s, next_visit_s) - time.monotonic(), 0))
            now_s = time.monotonic()
            visits = [process for process in visits if process.poll() is None]
            if now_s >= next_visit_s:
                next_visit_s, n_visits = now_s + visit_every_s, n_visits + 1
                visits.append(subprocess.Popen([sys.executable, __file__, VISITOR]))
            if now_s >= next_s:
                next_s += every_s
                if agent.poll() is not None:
                    sys.exit("the agent has ended")
                samples.append(sample(agent.pid, db, now_s - begin_s))
    finally:
        for process in visits:
            process.kill()
            process.wait()
    return samples, n_visits


def sample(pid: int, db: Path, at_s: float) -> Sample:
    """The agent as it is now."""
    held = held_in_kernel(pid)
    with node.reading(db) as connection:
        n_rows = connection.execute("SELECT COALESCE(MAX(id), 0) FROM collectives").fetchone()[0]
        n_lost = connection.execute("SELECT COALESCE(SUM(n_lost), 0) FROM losses").fetchone()[0]
    return Sample(
        at_s=round(at_s, 1),
        rss_mb=round(status_kb(pid, "VmRSS") / 1024, 2),
        n_fds=sum(held.values()),
        n_threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
        bytes_per_row=round(db.stat().st_size / max(n_rows, 1), 1),
        n_rows=n_rows,
        n_lost=n_lost,
        **{name: held[name] for name in _KINDS.values()},
    )


def held_in_kernel(pid: int) -> Counter[str]:
    """Descriptors of a process by kind; files, sockets and similar descriptors are "other"."""
    held: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/fdinfo").iterdir():
        try:
            text = path.read_text()
        except OSError:  # closed in between
            continue
        held[next((name for key, name in _KINDS.items() if f"{key}:" in text), "other")] += 1
    return held


def settled(samples: Sequence[Sample]) -> Sequence[Sample]:
    """All but the first third."""
    return samples[len(samples) // 3 :]


def growth_per_hour(samples: Sequence[Sample]) -> dict[str, float]:
    """Growth of each number, per hour."""
    later = settled(samples)
    at_s = np.array([each.at_s for each in later])
    return {
        name: round(slope(at_s, np.array([getattr(each, name) for each in later], float)) * 3600, 3)
        for name in GROWING
    }


def slope(x: "np.typing.NDArray[Any]", y: "np.typing.NDArray[Any]") -> float:
    """The median of the slopes between all pairs (Theil and Sen): a few jumps do not move it."""
    first, second = np.triu_indices(len(x), 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first]))) if len(first) else 0.0


def visitor() -> NoReturn:
    """A short job of one rank."""
    gpu = Gpu(build.build())
    gpu.call("cudaSetDevice", 0)
    stream, buffer = gpu.stream(), gpu.new("cudaMalloc", 1 << 20)
    for _ in range(3):
        comm = gpu.join(gpu.unique_id(), 0, nranks=1)
        for _ in range(20):
            gpu.all_reduce(buffer, 1024, datatype=FLOAT32, comm=comm, stream=stream)
        gpu.launch(10_000_000, stream)
        gpu.synchronize(stream)
        gpu.call("ncclCommDestroy", comm)
    gpu.call("cudaFree", buffer)
    sys.exit()


if __name__ == "__main__":
    main()
