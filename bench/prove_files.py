"""Large files of other tools: a launcher's log of 5 GB, and torch.profiler traces of 8 ranks with 100 MB each.

Limits: the log is explained in less than 300 MB of memory; the traces in less than 1 GB and within 1.5 times the CPU
time that json.loads needs for the same files, the start of the command included. `make prove-files` runs this once;
results go to results/files_size.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.importers.generators.job import Job
from tests.importers.generators.profiles import rank_traces
from tests.importers.launcher_job import Log, hang, interleaved, torchrun

LOG_BYTES = int(os.environ.get("LOG_BYTES", 5 << 30))
TRACE_BYTES = int(os.environ.get("TRACE_BYTES", 100 << 20))
N_RANKS = 8
MAX_LOG_BYTES, MAX_TRACE_BYTES, MAX_RATIO = 300 << 20, 1 << 30, 1.5


def main() -> None:
    """Measure, report, and fail beyond a limit."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        log = explained(written_log(Path(name) / "slurm-77.out"))
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as name:
        files = written_traces(Path(name))
        parse_s = bare_parse_s(files)
        traces = explained(Path(name)) | {"parse_cpu_s": round(parse_s, 2)}
    traces["times_of_parsing"] = round(traces["cpu_s"] / parse_s, 3)
    is_within = log["peak_bytes"] < MAX_LOG_BYTES and traces["peak_bytes"] < MAX_TRACE_BYTES
    is_within &= traces["times_of_parsing"] < MAX_RATIO and log["ranks"] == [3] and traces["ranks"] == [5]
    report("files_size", {"log": log, "traces": traces, "is_within_limits": is_within})
    sys.exit(not is_within)


def written_log(file: Path) -> Path:
    """A log of training steps that ends in a hang of rank 3."""
    block = "".join(
        f"[rank{i % 8}]: iteration {i} | loss 1.2345 | grad norm 0.5 | tokens/s 12345 | mem 61 GiB\n"
        for i in range(20_000)
    )
    log = Log()
    hang(log, 3)
    with file.open("w") as stream:
        while stream.tell() < LOG_BYTES:
            stream.write(block)
        stream.write(interleaved(log, torchrun, 1))
    return file


def written_traces(folder: Path) -> list[Path]:
    """Traces of a job whose rank 5 is late, with CPU operators until each file has its size."""
    for rank, trace in enumerate(
        rank_traces(Job(n_ranks=N_RANKS, culprits=(5,), late_ms=30.0, n_steps=40), seed=1)
    ):
        events = trace["traceEvents"]
        end_us = max(event["ts"] for event in events if "ts" in event)
        filler = {"ph": "X", "cat": "cpu_op", "name": "aten::add_", "pid": 4000 + rank, "tid": 9, "dur": 2.5}
        filler["args"] = {
            "External id": 1,
            "Record function id": 0,
            "Sequence number": 7,
            "Fwd thread id": 0,
            "Ev Idx": 3,
        }
        n = (TRACE_BYTES - len(json.dumps(trace))) // len(json.dumps(filler | {"ts": end_us}, indent=None))
        trace["traceEvents"] = events + [filler | {"ts": round(end_us * i / n, 3)} for i in range(n)]
        (folder / f"host{rank // 4}_{4000 + rank}.1790.pt.trace.json").write_text(json.dumps(trace))
    return sorted(folder.iterdir())


_PARSE = """
import json, sys, time
text = open(sys.argv[1]).read()
begin_s = time.process_time()
json.loads(text)
print(time.process_time() - begin_s)
"""


def bare_parse_s(files: list[Path]) -> float:
    """CPU seconds that json.loads needs for all files, in a process of its own for each file."""
    words = [sys.executable, "-c", _PARSE]
    return sum(
        float(subprocess.run([*words, file], capture_output=True, check=True).stdout) for file in files
    )


_MEASURE = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
answer = json.loads(process.stdout.read())
usage = os.wait4(process.pid, 0)[2]
print(json.dumps([usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, answer["verdicts"]]))
"""


def explained(path: Path) -> dict[str, object]:
    """Time, memory and the accused ranks of `stallscope explain`.

    A small process starts the command, because the peak of a process includes the peak of its parent at the start.
    """
    words = [str(Path(sys.executable).with_name("stallscope")), "explain", "--json", str(path)]
    begin_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _MEASURE, *words], capture_output=True, check=True)
    cpu_s, peak_bytes, verdicts = json.loads(done.stdout)
    return {
        "seconds": round(time.perf_counter() - begin_s, 2),
        "cpu_s": round(cpu_s, 2),
        "peak_bytes": peak_bytes,
        "file_bytes": sum(p.stat().st_size for p in ([path] if path.is_file() else path.iterdir())),
        "ranks": sorted({rank for verdict in verdicts for rank in verdict["ranks"]}),
    }


if __name__ == "__main__":
    main()
