"""The CPU time of NCCL's profiler plugin for a collective: 8 processes of an emulated NCCL, 2,000 collectives a second.

python bench/plugin_events.py [--seconds 10]. The emulated NCCL of the tests makes NCCL's calls for collectives of 4
channels. Windows in which an agent reads the records alternate with windows in which the plugin is off; the CPU time is
of all threads of the processes, from the kernel, so it includes the emulated NCCL's own work for the events.
"""

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import report

from stallscope.capture.gpu.nccl_ring import KERNELS, Event, NcclRing, ring_of

ROOT = Path(__file__).resolve().parents[1]
N_RANKS, PER_SECOND, CHANNELS, WINDOW_S = 8, 2000, 4, 1.0


def started(folder: Path) -> "list[subprocess.Popen[str]]":
    """The processes, ready."""
    subprocess.run(["make", "-s", "-C", ROOT / "nccl_plugin", f"OUT={folder}/plugin.so"], check=True)
    source = ROOT / "tests/nccl_plugin/emulated_nccl.c"
    subprocess.run(["gcc", "-O2", "-o", folder / "nccl", source, "-ldl", "-lpthread"], check=True)
    words = [folder / "nccl", folder / "plugin.so", "5"]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) for _ in range(N_RANKS)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    return processes


def window(
    processes: "list[subprocess.Popen[str]]", rings: list[NcclRing], *, is_on: bool
) -> tuple[float, float]:
    """CPU time in us and wall time in us for each collective of a rank."""
    for ring in rings:
        ring.switch(KERNELS if is_on else Event(0), seconds=60 if is_on else 0)
    time.sleep(0.1)
    n, begin_s = int(PER_SECOND * WINDOW_S), time.monotonic()
    before_s = [cpu_s(process.pid) for process in processes]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"run {n} {CHANNELS} {10**6 // PER_SECOND}\n")
        process.stdin.flush()
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    wall_s = time.monotonic() - begin_s
    used_s = sum(cpu_s(process.pid) for process in processes) - sum(before_s)
    records = sum(len(ring.drain()) for ring in rings)
    assert records == (n * N_RANKS if is_on else 0)
    return 1e6 * used_s / n / N_RANKS, 1e6 * wall_s / n


def cpu_s(pid: int) -> float:
    """From the scheduler, in ns: the clock ticks of /proc/PID/stat are too coarse."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes = started(Path(folder))
        rings = [ring for process in processes if (ring := ring_of(process.pid)) is not None]
        off, on = [], []
        end_s = time.monotonic() + chosen.seconds
        while time.monotonic() < end_s or len(on) < 3:
            off.append(window(processes, rings, is_on=False))
            on.append(window(processes, rings, is_on=True))
        for process in processes:
            process.kill()
            process.wait()
    change = np.array(on)[:, 0] - np.array(off)[:, 0]
    half = (1.96 + 2.7 / max(len(change) - 1, 1)) * change.std(ddof=1) / len(change) ** 0.5
    events = 1 + CHANNELS
    result = {
        "unit": "us of CPU time for each collective of a rank (1 operation and 4 channels)",
        "off_us": round(float(np.median([cpu for cpu, _ in off])), 3),
        "on_us": round(float(np.median([cpu for cpu, _ in on])), 3),
        "change_us": round(float(change.mean()), 3),
        "half_95_us": round(float(half), 3),
        "change_us_per_event": round(float(change.mean()) / events, 3),
        "round_us": round(float(np.median([wall for _, wall in on])), 1),
        "n_windows": len(change),
        "n_ranks": N_RANKS,
        "asked_per_second": PER_SECOND,
        "load": os.getloadavg()[0],
    }
    report.report("plugin_events", result)


if __name__ == "__main__":
    main()
