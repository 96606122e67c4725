"""The ledger's on_cpu against the thread's own CPU clock, in 1,000 busy intervals with a CPU hog.

The two sources are independent: events alone cannot reveal a missed event. Needs root, gcc, and the built
BPF programs. Arguments: number of intervals, length in ms.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_hook_cost import built, hooks
from report import FOLDER, report

from stallscope.capture.probes.program import Program
from stallscope.events.names import Category

BUSY_SOURCE = FOLDER.parent / "tests/capture/targets/busy.c"


def main() -> None:
    """Measure and report."""
    n, length_ms = (int(word) for word in (sys.argv[1:] + ["1000", "10"][len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as folder:
        _, library = built(Path(folder))
        busy = Path(folder) / "busy"
        link = [f"-L{folder}", "-lnccl", f"-Wl,-rpath,{folder}"]
        subprocess.run(["gcc", "-O1", "-o", busy, BUSY_SOURCE, *link], check=True)
        report("on_cpu", compared(busy, library, n, length_ms))


def compared(busy: Path, library: Path, n: int, length_ms: int) -> dict[str, float]:
    """Intervals that agree within 1 % or 1 ms, and how far off the others are."""
    with Program.load() as program, (busy.parent / "printed").open("w+") as printed:
        program.attach(str(library), hooks(library))
        process = subprocess.Popen([busy, str(n), str(length_ms), "0", "1"], stdout=printed)
        arrivals = []
        while process.poll() is None:
            time.sleep(0.05)
            arrivals.append(program.arrivals.drain())
        arrivals.append(program.arrivals.drain())
        printed.seek(0)
        cpu_ns = np.array([int(line.split()[1]) for line in printed])
        ledger = np.concatenate(arrivals)["ledger_ns"]
        on_cpu_ns = (ledger[1::2] - ledger[0::2])[:, Category.ON_CPU - 1]
        error_ns = np.abs(on_cpu_ns - cpu_ns)
        losses = program.losses()
    return {
        "n_intervals": len(cpu_ns),
        "n_right": int((error_ns <= np.maximum(1e6, cpu_ns * 0.01)).sum()),
        "worst_error_us": round(float(error_ns.max()) / 1e3, 1),
        "p99_error_us": round(float(np.percentile(error_ns, 99)) / 1e3, 1),
        "mean_cpu_ms": round(float(cpu_ns.mean()) / 1e6, 2),
        "n_missed_switches_put_right": losses["missed_on"],
        "n_times_cpu_was_stolen": losses["stolen"],
    }


if __name__ == "__main__":
    main()
