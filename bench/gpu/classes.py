"""Checks on real GPUs that every class of event is in the trace, with the right number, bytes and device.

    bench/gpu/run_there.sh classes --budget 240

One process a GPU calls the runtime directly, then one a GPU does what PyTorch programs do (classes_job.py); the agent
traces both with its default settings. OUT/classes.json has every check; exit code 1 when one fails.
"""

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import job
from running import Failed, Program, end, start, tracing

from stallscope.events.names import Direction, HostMemory, MemoryKind

JOB = Path(__file__).with_name("classes_job.py")
LOADED_S, EXACT_S, TORCH_S = 90, 60, 120
ATTACHED_S = 1.5
MIB = 1 << 20
LATER_NS = 1_600_000_000
"""After the end of a phase: rows are written once a second."""


class Check(NamedTuple):
    """A number of the trace and the expected number. at_least: a larger number is right as well."""

    what: str
    found: Any
    wanted: Any
    at_least: bool = False

    @property
    def is_right(self) -> bool:
        """Whether it is."""
        return bool(self.found >= self.wanted) if self.at_least else self.found == self.wanted


def main() -> None:
    """Run, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--budget", type=float, default=240, help="seconds for everything (not looked at here)"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu")))
    parser.add_argument("--ranks", type=int, default=0, help="0: all GPUs")
    parser.add_argument("--cudart", type=Path, help="instead of PyTorch's own; then without PyTorch")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    n_ranks = chosen.ranks or job.n_gpus()
    with tempfile.TemporaryDirectory(prefix="stallscope-classes-") as folder:
        checks, notes = checked(chosen, Path(folder), n_ranks)
    wrong = [check for check in checks if not check.is_right]
    for check in checks:
        mark = "right" if check.is_right else "WRONG"
        print(f"{mark}  {check.what}: {check.found}" + ("" if check.is_right else f", not {check.wanted}"))
    print(*notes, f"{len(checks) - len(wrong)} of {len(checks)} right", sep="\n", flush=True)
    output = [{**check._asdict(), "is_right": check.is_right} for check in checks]
    (chosen.out / "classes.json").write_text(
        json.dumps({"n_gpus": n_ranks, "checks": output, "notes": notes}, indent=1)
    )
    sys.exit(bool(wrong))


def checked(chosen: argparse.Namespace, folder: Path, n_ranks: int) -> tuple[list[Check], list[str]]:
    """All checks, and the output of the agent. Raises Failed."""
    cudart = chosen.cudart or runtime_of_torch()
    db, checks = folder / "classes.db", []
    with tracing(db, awaits="tracing into") as agent:
        exact = ran("exact", folder, n_ranks, words=("--cudart", str(cudart)), limit_s=EXACT_S)
        in_torch = [] if chosen.cudart else ran("torch", folder, n_ranks, words=(), limit_s=TORCH_S)
        time.sleep(2)
    with closing(sqlite3.connect(db)) as trace:
        for rank, did in enumerate(exact):
            checks += exact_checks(trace, rank, did)
        for rank, did in enumerate(in_torch):
            checks += torch_checks(trace, rank, did, n_ranks=n_ranks)
        lost = dict(trace.execute("SELECT kind, SUM(n_lost) FROM losses GROUP BY kind").fetchall())
    checks.append(Check("records lost", lost, {}))
    (chosen.out / "classes.db").write_bytes(db.read_bytes())
    return checks, [
        line for line in agent.said.read_text().splitlines() if "attached" in line or "estimates" in line
    ]


def ran(
    kind: str, folder: Path, n_ranks: int, *, words: tuple[str, ...], limit_s: float
) -> list[dict[str, Any]]:
    """The calls that each rank reports. Raises Failed."""
    (folder / "go").unlink(missing_ok=True)
    with processes(kind, folder, n_ranks, words=words) as programs:
        await_all([folder / f"{kind}-loaded{rank}" for rank in range(n_ranks)], programs, LOADED_S)
        time.sleep(ATTACHED_S)
        (folder / "go").touch()
        files = [folder / f"{kind}{rank}.json" for rank in range(n_ranks)]
        await_all(files, programs, limit_s)
        for program in programs:
            program.process.wait(30)
        return [json.loads(file.read_text()) for file in files]


@contextmanager
def processes(kind: str, folder: Path, n_ranks: int, *, words: tuple[str, ...]) -> Iterator[list[Program]]:
    """The ranks of one kind; none outlives the with block."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.free_port()),
        WORLD_SIZE=str(n_ranks),
        OMP_NUM_THREADS="1",
    )
    programs = []
    try:
        for rank in range(n_ranks):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            command = [
                sys.executable,
                str(JOB),
                kind,
                str(folder),
                "--rank",
                str(rank),
                "--devices",
                str(n_ranks),
            ]
            programs.append(start([*command, *words], folder / f"{kind}{rank}.log"))
        yield programs
    finally:
        for program in programs:
            end(program)


def await_all(files: list[Path], programs: list[Program], limit_s: float) -> None:
    """Until all files are there. Raises Failed."""
    end_s = time.monotonic() + limit_s
    while not all(file.exists() for file in files):
        for program in programs:
            if program.process.poll():
                raise Failed(f"a process ended with code {program.process.poll()}: {program.last_words()}")
        if time.monotonic() > end_s:
            raise Failed(
                f"not there after {limit_s:.0f} s: {[file.name for file in files if not file.exists()]}"
            )
        time.sleep(0.05)


def runtime_of_torch() -> Path:
    """The runtime library that PyTorch loads. Raises Failed."""
    code = "import torch; torch.cuda.is_available(); print(open('/proc/self/maps').read())"
    stdout = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    parts = {line.split()[-1] for line in stdout.splitlines() if "/libcudart" in line}
    if not parts:
        raise Failed("PyTorch has no libcudart of its own: give --cudart")
    return Path(sorted(parts)[0])


def calls_of(
    trace: sqlite3.Connection, pid: int, begin_ns: int = 0, end_ns: int = 1 << 62
) -> dict[str, dict[str, int]]:
    """Calls by function and, of copies, direction."""
    rows = trace.execute(
        "SELECT name, direction, host_memory, SUM(n), SUM(n_seen), SUM(count_bytes), SUM(n_failed), MAX(is_estimate) "
        "FROM operations JOIN symbols USING (symbol) WHERE pid = ? AND ts_ns > ? AND ts_ns <= ? GROUP BY 1, 2, 3",
        (pid, begin_ns, end_ns),
    )
    out: dict[str, dict[str, int]] = {}
    for name, direction, host, n, n_seen, n_bytes, n_failed, is_estimate in rows:
        key = f"{name} {Direction(direction).name}" if direction else name
        entry = out.setdefault(
            key, dict.fromkeys(("n", "n_seen", "count_bytes", "n_failed", "is_estimate"), 0)
        )
        for field, value in zip(entry, (n, n_seen, n_bytes, n_failed, is_estimate), strict=True):
            entry[field] += value
        entry[HostMemory(host).name] = entry.get(HostMemory(host).name, 0) + n
    return out


def exact_checks(trace: sqlite3.Connection, rank: int, did: dict[str, Any]) -> list[Check]:
    """Every called function and no other: number, bytes, failures; the memory held at the end."""
    calls, made = calls_of(trace, did["pid"]), did["made"]
    by_runtime = {name: response for name, response in calls.items() if name.startswith("cuda")}
    checks = [Check(f"rank {rank}: functions", sorted(by_runtime), sorted(made))]
    for name, wanted in made.items():
        response = calls.get(name, {})
        for field in ("n", "count_bytes", "n_failed"):
            checks.append(Check(f"rank {rank}: {name} {field}", response.get(field), wanted[field]))
    pinned = calls.get("cudaMemcpyAsync DEVICE_TO_HOST", {}).get("PINNED")
    checks.append(Check(f"rank {rank}: cudaMemcpyAsync to pinned memory", pinned, 100))
    held = held_of(trace, did["pid"], did["ended_ns"])
    for kind, (n_bytes, n, device) in did["held"].items():
        where = f"rank {rank}: held {kind} on device {device}"
        checks.append(Check(where, held.get((kind, device)), (n_bytes, n)))
    failed = trace.execute(
        "SELECT name, result, device FROM calls JOIN symbols USING (symbol) WHERE pid = ? AND result != 0",
        (did["pid"],),
    ).fetchall()
    checks.append(Check(f"rank {rank}: errors", failed, [("cudaMalloc", 2, rank)]))
    return checks


def held_of(trace: sqlite3.Connection, pid: int, at_ns: int) -> dict[tuple[str, int], tuple[int, int]]:
    """(bytes, allocations) by kind and device, as they were at a moment."""
    rows = trace.execute(
        "SELECT kind, COALESCE(device, -1), live_bytes, n_live FROM memory WHERE pid = ? AND ts_ns <= ? ORDER BY ts_ns",
        (pid, at_ns),
    )
    return {(MemoryKind(kind).name, device): (n_bytes, n) for kind, device, n_bytes, n in rows}


EXPECTED = {
    "pageable_to_device": ("cudaMemcpyAsync HOST_TO_DEVICE", 100, 100 * MIB),
    "pinned_to_device": ("cudaMemcpyAsync HOST_TO_DEVICE", 100, 200 * MIB),
    "device_to_pinned": ("cudaMemcpyAsync DEVICE_TO_HOST", 100, 400 * MIB),
    "device_to_device": ("cudaMemcpyAsync DEVICE_TO_DEVICE", 100, 800 * MIB),
    "launches": ("cudaLaunchKernel", 1000, None),
    "events": ("cudaEventRecord", 200, None),
    "waits": ("cudaStreamWaitEvent", 100, None),
    "synchronises": ("cudaDeviceSynchronize", 30, None),
    "graph": ("cudaGraphLaunch", 50, None),
    "allocations": ("cudaMalloc", 5, 5 * 64 * MIB),
}
"""By phase: function, calls, bytes. SAME lists the functions that PyTorch may use instead."""
SAME = {
    "cudaEventRecordWithFlags": "cudaEventRecord",
    "cudaLaunchKernelExC": "cudaLaunchKernel",
    "__cudaLaunchKernel": "cudaLaunchKernel",
}
WATCHED = ("cudaEventRecord", "cudaStreamWaitEvent", "cudaDeviceSynchronize", "cudaMalloc")
"""With NCCL, other threads of PyTorch also make these calls."""


def torch_checks(trace: sqlite3.Connection, rank: int, did: dict[str, Any], *, n_ranks: int) -> list[Check]:
    """Checks of the expected calls of each phase."""
    checks, pid = [], did["pid"]
    for phase, (name, n, n_bytes) in EXPECTED.items():
        begin_ns, end_ns = did["phases"][phase]
        calls = calls_of(trace, pid, begin_ns, end_ns + LATER_NS)
        for other, plain in SAME.items():
            if other in calls:
                calls.setdefault(plain, {"n": 0, "count_bytes": 0})["n"] += calls[other]["n"]
        response, where = calls.get(name, {}), f"rank {rank}: torch {phase}: {name}"
        checks.append(Check(f"{where} n", response.get("n", 0), n, at_least=name in WATCHED))
        if n_bytes is not None:
            checks.append(
                Check(f"{where} bytes", response.get("count_bytes"), n_bytes, at_least=name in WATCHED)
            )
        if "pinned" in phase:
            checks.append(Check(f"{where} pinned", response.get("PINNED", 0), n))
        if phase == "graph":
            whole = {"cudaStreamBeginCapture", "cudaStreamEndCapture"} <= calls.keys()
            is_made = any(key.startswith("cudaGraphInstantiate") for key in calls)
            checks.append(Check(f"{where} captured, instantiated", (whole, is_made), (True, True)))
    checks += torch_memory_checks(trace, rank, did)
    if n_ranks > 1:
        checks += collective_checks(trace, rank, did, n_ranks=n_ranks)
    return checks


def torch_memory_checks(trace: sqlite3.Connection, rank: int, did: dict[str, Any]) -> list[Check]:
    """Memory grows on the rank's own device by the requested size, and shrinks again; a refusal is an error event."""
    pid, phases = did["pid"], did["phases"]
    before, after, freed = (
        held_of(trace, pid, phases[name][at] + later_ns)
        for name, at, later_ns in (("allocations", 1, LATER_NS), ("frees", 0, 0), ("frees", 1, LATER_NS))
    )
    key = ("DEVICE", rank)
    grown = before.get(key, (0, 0))[0] - freed.get(key, (0, 0))[0]
    begin_ns, end_ns = phases["refused"]
    errors = trace.execute(
        "SELECT DISTINCT name, result, device FROM calls JOIN symbols USING (symbol) "
        "WHERE pid = ? AND result != 0 AND ts_ns BETWEEN ? AND ?",
        (pid, begin_ns, end_ns),
    ).fetchall()
    return [
        Check(f"rank {rank}: torch allocations: bytes on device {rank}", grown, 5 * 64 * MIB, at_least=True),
        Check(f"rank {rank}: torch allocations: stay until they are freed", before.get(key), after.get(key)),
        Check(f"rank {rank}: torch refused", ("cudaMalloc", 2, rank) in errors, True),
        Check(f"rank {rank}: devices", sorted({d for kind, d in after if kind == "DEVICE"}), [rank]),
    ]


def collective_checks(
    trace: sqlite3.Connection, rank: int, did: dict[str, Any], *, n_ranks: int
) -> list[Check]:
    """The all-reduces: bytes, rank, device, and one communicator for all."""
    begin_ns, end_ns = did["phases"]["all_reduce"]
    row = trace.execute(
        "SELECT COUNT(*), MIN(count_bytes), MAX(count_bytes), MIN(comm_rank), MIN(nranks), MIN(device), "
        "COUNT(DISTINCT comm_hash) FROM collectives WHERE pid = ? AND ts_ns BETWEEN ? AND ?",
        (did["pid"], begin_ns, end_ns),
    ).fetchone()
    (n_hashes,) = trace.execute(
        "SELECT COUNT(DISTINCT comm_hash) FROM collectives WHERE comm_hash != 0"
    ).fetchone()
    return [
        Check(f"rank {rank}: torch all_reduce", row, (20, 4_000_000, 4_000_000, rank, n_ranks, rank, 1)),
        Check(f"rank {rank}: communicators", n_hashes, 1),
    ]


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        sys.exit(f"classes: {error}")
