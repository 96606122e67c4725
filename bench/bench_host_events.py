"""Cost per run of the programs that observe the machine: without a traced process, and in a traced process.

Measured by the kernel's own statistics, which add about 80 ns to each run. The load: short processes, signals,
synchronous writes, and memory reclaim. A second number is the agent's work for one second of these events.
Needs root, gcc, and the built BPF programs.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_hook_cost import built, drained, hooks
from report import report

from stallscope.capture.host import HostEvents
from stallscope.capture.probes.program import Program

LOADER = """
import ctypes, os, signal, subprocess, sys
if len(sys.argv) > 2:
    ctypes.CDLL(sys.argv[2]).cudaSetDevice(0)
for _ in range(200):
    if not (child := os.fork()):
        os._exit(0)
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)
with open(sys.argv[1], "wb") as file:
    for _ in range(200):
        file.write(bytes(1 << 16))
        file.flush()
        os.fsync(file.fileno())
"""
N_LOOKS = 20


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        _, library = built(Path(folder))
        costs = {
            "nobody_traced": ns_per_run(Path(folder), library, is_traced=False),
            "traced": ns_per_run(Path(folder), library, is_traced=True),
        }
        report("host_events", {"ns_per_run": costs, "agent_ms_per_second": agent_ms(library)})


def ns_per_run(folder: Path, library: Path, *, is_traced: bool) -> dict[str, dict[str, float]]:
    """Mean ns and number of the runs of each of the programs."""
    with Program.load() as program:
        program.attach(str(library), hooks(library))
        program.measure()
        words = [str(library)] if is_traced else []
        with drained(program):
            subprocess.run([sys.executable, "-c", LOADER, folder / "load", *words], check=True)
        return {
            name: {"ns": round(cost.run_ns / cost.n_runs, 1), "n": cost.n_runs}
            for name, cost in program.costs().items()
            if cost.n_runs and name.startswith(("host_", "block_", "tcp_", "on_switch", "on_exec", "on_exit"))
        }


def agent_ms(library: Path) -> dict[str, float]:
    """The cost of reading the sums, quotas and sockets once a second, for this many traced processes."""
    result = {}
    for n in (1, 8, 64):
        with Program.load() as program:
            program.attach(str(library), hooks(library))
            waits = "import sys; print(flush=True); sys.stdin.read()"
            children = [
                subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                for _ in range(n)
            ]
            for child in children:
                assert child.stdout is not None
                child.stdout.readline()
            host = HostEvents(0, program.entries)
            pids = [child.pid for child in children]
            begin = time.thread_time()
            for _ in range(N_LOOKS):
                host.rows(program.events.drain(), pids, time.monotonic_ns())
            result[f"{n}_processes"] = round((time.thread_time() - begin) * 1e3 / N_LOOKS, 3)
            for child in children:
                child.kill()
                child.communicate()
    return result


if __name__ == "__main__":
    main()
