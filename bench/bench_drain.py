"""How fast arrivals come out of the ring, and whether any is lost while a process makes calls as fast as it can.

Needs root, gcc, and the built BPF programs.
"""

import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_hook_cost import built, hooks
from report import report

from stallscope.capture.probes.program import Options, Program
from stallscope.capture.rows import records

RING_BYTES = 64 << 20
EVERY_S = 0.025


def main() -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory() as folder:
        loop, library = built(Path(folder))
        report("drain", {"full_ring": full_ring(loop, library), "live": live(loop, library)})


def calling(loop: Path, n_lines: int) -> "subprocess.Popen[str]":
    """A process that makes 200,000 collectives for each line."""
    process = subprocess.Popen([loop, "ncclAllReduce"], stdin=-1, stdout=subprocess.DEVNULL, text=True)
    assert process.stdin is not None
    process.stdin.write("\n" * n_lines)
    process.stdin.close()
    return process


def full_ring(loop: Path, library: Path) -> dict[str, float]:
    """Records a second and core: copied out of a full ring, and made rows of the table too."""
    copied, made = [], []
    with Program.load(Options(ring_bytes=RING_BYTES)) as program:
        program.attach(str(library), hooks(library))
        for _ in range(5):
            calling(loop, 1).wait()
            begin = time.thread_time()
            arrivals = program.arrivals.drain()
            middle = time.thread_time()
            records.collectives(arrivals, node=0)
            copied.append(len(arrivals) / (middle - begin))
            made.append(len(arrivals) / (time.thread_time() - begin))
    return {"drained_per_s": round(max(copied)), "drained_and_made_rows_per_s": round(max(made))}


def live(loop: Path, library: Path) -> dict[str, float]:
    """One process at full speed, drained every 25 ms from a ring of the default size."""
    with Program.load() as program:
        program.attach(str(library), hooks(library))
        process = calling(loop, 8)
        begin, used = time.monotonic(), time.thread_time()
        seqs = []
        while process.poll() is None:
            time.sleep(EVERY_S)
            seqs.append(program.arrivals.drain()["seq"])
        seqs.append(program.arrivals.drain()["seq"])
        wall_s, cpu_s = time.monotonic() - begin, time.thread_time() - used
        rows = np.concatenate(seqs)
        return {
            "records_per_s": round(len(rows) / wall_s),
            "cpu_share_of_a_core": round(cpu_s / wall_s, 4),
            "n_records": len(rows),
            "n_lost": program.losses()["lost_arrival"],
            "n_out_of_order": int((np.diff(rows) != 1).sum()),
        }


if __name__ == "__main__":
    main()
