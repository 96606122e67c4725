"""Single-process jobs on one GPU, traced by one agent, against each job's own measurement, py-spy and torch.profiler.

    bench/gpu/run_there.sh single --budget 420 --profile      # on a machine with a GPU
    .venv/bin/python bench/gpu/single_process.py --jobs bench/single/emulated_jobs.py --out build/single

The jobs run one after the other; the next job imports its libraries while a job runs. With --profile, py-spy samples
each traced job from outside, and torch.profiler measures a second, short run of each job. In OUT: measured.json (the
jobs' own measurements so far), single.db.gz (the trace, also stored every ten jobs), single.json (all answers) and
single.txt (the table, which is printed last). `--judge FOLDER...` examines the traces of earlier runs with the present
version; it needs the first two.
"""

import argparse
import gzip
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from report import RESULTS, commit
from running import STALLSCOPE, TRACES, Program, wait_until_said
from single_judging import compared, judged, stack_share, table

HERE = Path(__file__).parent
JOB_S = 45.0
EXPLAIN_S = 20.0
PROFILE_S = 14.0
LOADING = 3
"""Jobs that import their libraries while another job is profiled: an import takes longer than a profile."""

STORE_EVERY = 10
SPY_HZ = 50
PROFILED_FIRST = (
    *(
        "healthy_products",
        "json",
        "tiny_kernels",
        "item",
        "healthy_graph",
        "pageable_in",
        "tiny_model",
        "loader_main",
    ),
    *("healthy_transformer", "nonzero", "checkpoint", "new_memory", "fsync", "empty_cache", "healthy_large"),
)
PROFILED_LAST = ("quota", "stopped", "recompile")
"""Their set-up takes seconds."""

NOT_PROFILED = ("shared_gpu",)
"""torch.profiler records the kernels of its own process only."""


@dataclass
class Runner:
    """Starts jobs at their gate, runs them, and collects their measurements."""

    script: Path
    folder: Path
    out: Path
    seconds: float
    spy: str | None = None
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)

    def start(self, name: str, seconds: float, *more: str) -> "subprocess.Popen[str]":
        """A job at its gate."""
        return subprocess.Popen(
            [sys.executable, str(self.script), name, str(seconds), str(self.folder), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{name}.err").open("w"),
            text=True,
        )

    def run(self, name: str, job: "subprocess.Popen[str]", limit_s: float = JOB_S) -> dict[str, Any]:
        """Let a job run, and read its measurements."""
        assert job.stdin and job.stdout
        watchdog = subprocess.Popen(
            ["sh", "-c", f"sleep {limit_s}; kill -9 -{job.pid}"], start_new_session=True
        )
        spy = None
        try:
            job.stdout.readline()
            job.stdin.write("go\n")
            job.stdin.flush()
            if job.stdout.readline().strip() == "measuring" and self.spy:
                spy = self._spy(name, job.pid)
            line = job.stdout.readline()
            job.wait(timeout=10)
        finally:
            watchdog.kill()
            job.kill()
        if not line.strip():
            text = (self.folder / f"{name}.err").read_text(errors="replace").strip().splitlines()
            return {"name": name, "failed": text[-1][:200] if text else "it printed nothing"}
        measurement: dict[str, Any] = json.loads(line)
        if spy:
            with suppress(subprocess.TimeoutExpired):
                spy.wait(timeout=5)
            measurement["py_spy_share"] = stack_share(self.folder / f"{name}.spy")
        return measurement

    def _spy(self, name: str, pid: int) -> "subprocess.Popen[bytes]":
        """py-spy on the job for most of its window, without stopping it."""
        out, seconds = str(self.folder / f"{name}.spy"), str(max(round(self.seconds) - 1, 1))
        words = ["record", "--pid", str(pid), "--rate", str(SPY_HZ), "--duration", seconds]
        return subprocess.Popen(
            [str(self.spy), *words, "--nonblocking", "--idle", "--format", "raw", "--output", out],
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / f"{name}.spy.err").open("w"),
            env=os.environ | {"LD_LIBRARY_PATH": ""},
        )

    def run_all(self, order: list[str], end_s: float) -> None:
        """Each job once, as long as there is time."""
        following = self.start(order[0], self.seconds)
        for i, name in enumerate(order):
            job = following
            if end_s - time.monotonic() < EXPLAIN_S + self.seconds + 6:
                self.measured[name] = {"name": name, "skipped": "no time left"}
                continue
            if i + 1 < len(order):
                following = self.start(order[i + 1], self.seconds)
            begin_s = time.monotonic()
            try:
                self.measured[name] = self.run(name, job)
            except Exception as error:  # noqa: BLE001 - the failure of a job must not cost the others
                self.measured[name] = {"name": name, "failed": f"{type(error).__name__}: {error}"[:200]}
            print(f"{name} {time.monotonic() - begin_s:.1f} s {self.measured[name]}"[:160], flush=True)
            self.store()
            if i % STORE_EVERY == STORE_EVERY - 1:
                store_trace(self.folder / "single.db", self.out)
        following.kill()

    def store(self) -> None:
        """Write the measurements so far."""
        part = self.out / "measured.part"
        part.write_text(json.dumps(list(self.measured.values()), indent=1) + "\n")
        part.replace(self.out / "measured.json")

    def profile_all(self, order: list[str], end_s: float) -> None:
        """A short run of each job under torch.profiler, as long as there is time."""
        loading = [self.start(name, 0.7, "profile") for name in order[:LOADING]]
        for i, name in enumerate(order):
            job = loading.pop(0)
            if end_s - time.monotonic() < PROFILE_S:
                break
            if i + LOADING < len(order):
                loading.append(self.start(order[i + LOADING], 0.7, "profile"))
            with suppress(Exception):
                profiled = self.run(name, job, PROFILE_S)
                self.measured[name]["profiler_gpu_busy"] = profiled.get("profiler_gpu_busy")
                print(f"{name} profiler {profiled.get('profiler_gpu_busy')}", flush=True)
                self.store()
        for job in loading:
            job.kill()


def ordered(names: list[str]) -> list[str]:
    """Healthy jobs among the others, so that a short budget leaves some of both."""
    healthy = [name for name in names if name.startswith("healthy")]
    order = []
    for i, name in enumerate(name for name in names if not name.startswith("healthy")):
        order.append(name)
        if i % 4 == 3 and healthy:
            order.append(healthy.pop(0))
    return order + healthy


def profiling_order(names: list[str]) -> list[str]:
    """The jobs that torch.profiler measures; a short budget leaves the most informative jobs."""
    first = [name for name in PROFILED_FIRST if name in names]
    last = [name for name in PROFILED_LAST if name in names]
    return [*first, *(name for name in names if name not in (*first, *last, *NOT_PROFILED)), *last]


def store_trace(db: Path, out: Path) -> None:
    """A compressed copy of the trace so far, which the agent may still be writing."""
    copy, part = db.with_suffix(".copy"), out / "single.db.part"
    with closing(sqlite3.connect(db)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    with copy.open("rb") as file, gzip.open(part, "wb", compresslevel=3) as packed:
        shutil.copyfileobj(file, packed)
    copy.unlink()
    part.replace(out / "single.db.gz")


def explained(db: Path) -> dict[str, Any]:
    """The report on a trace."""
    words = [*STALLSCOPE, "explain", str(db), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        sys.exit(f"explain failed: {done.stderr[-800:]}")
    return report


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """single.json and single.txt; prints the table."""
    (out / "single.json").write_text(json.dumps({"jobs": rows}, indent=1))
    text = table(rows)
    (out / "single.txt").write_text(text + "\n")
    print(text, flush=True)


def judge(sources: list[Path], out: Path, *, keep: bool) -> None:
    """Examine the traces of earlier runs. keep: store the comparison as the benchmark's result.

    A job of a later run replaces the job of an earlier run, whose py-spy and torch.profiler measurements stay.
    """
    rows: dict[str, dict[str, Any]] = {}
    commit_of: dict[str, str] = {}
    for source in sources:
        run = json.loads((source / "run.json").read_text())
        answers = _answers_of(source)
        for row in json.loads((source / "measured.json").read_text()):
            if "pid" in row or row["name"] not in rows:
                rows[row["name"]] = judged(rows.get(row["name"], {}) | row, answers)
                commit_of[row["name"]] = run["commit"]
    write(out, list(rows.values()))
    if keep:
        n_jobs = Counter(commit_of.values())
        result = {
            "benchmark": "single_process",
            **compared(list(rows.values())),
            "explained_at": commit(),
            **run,
            "n_jobs_by_commit": dict(n_jobs),
        }
        (RESULTS / "single_process.json").write_text(json.dumps(result, indent=2) + "\n")


def _answers_of(source: Path) -> dict[str, Any]:
    """The report on the trace of a run."""
    with tempfile.TemporaryDirectory() as folder:
        db = Path(folder) / "single.db"
        with gzip.open(source / "single.db.gz") as packed, db.open("wb") as target:
            shutil.copyfileobj(packed, target)
        return explained(db)


def described() -> dict[str, Any]:
    """The commit of the agent, the day, and the machine of a run."""
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = (
        subprocess.run(words, capture_output=True, text=True).stdout.split("\n")
        if shutil.which(words[0])
        else []
    )
    machine = report.machine() | {"gpus": [gpu for gpu in gpus if gpu]}
    return {"commit": commit(), "date": time.strftime("%F"), "machine": machine}


def main() -> None:
    """Run all, explain, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget", type=float, default=520, help="seconds for everything")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each job")
    parser.add_argument("--jobs", type=Path, default=HERE / "single_jobs.py", help="the script of the jobs")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/gpu")))
    parser.add_argument("--only", nargs="*", default=[], help="names of jobs")
    parser.add_argument("--profile", action="store_true", help="also measure with py-spy and torch.profiler")
    parser.add_argument(
        "--judge",
        type=Path,
        nargs="+",
        help="folders of earlier runs, the earliest first: examine their traces",
    )
    parser.add_argument(
        "--keep", action="store_true", help="with --judge: write bench/results/single_process.json"
    )
    chosen = parser.parse_args()
    end_s = time.monotonic() + chosen.budget
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.judge:
        judge(chosen.judge, chosen.out, keep=chosen.keep)
        return
    words = [sys.executable, str(chosen.jobs), "--names"]
    names = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    order = ordered([name for name in names if not chosen.only or name in chosen.only])
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="single-", ignore_cleanup_errors=True) as work:
        db = Path(work) / "single.db"
        spy = shutil.which("py-spy") if chosen.profile else None
        runner = Runner(chosen.jobs, Path(work), chosen.out, chosen.seconds, spy)
        agent = subprocess.Popen(
            [*STALLSCOPE, "trace", "--db", str(db)], stderr=(chosen.out / "agent.txt").open("w")
        )
        (chosen.out / "run.json").write_text(json.dumps(described()) + "\n")
        wait_until_said(Program(agent, chosen.out / "agent.txt"), TRACES)
        try:
            runner.run_all(order, end_s)
        finally:
            agent.send_signal(signal.SIGINT)
            agent.wait(timeout=60)
            store_trace(db, chosen.out)
        answers = explained(db)
        rows = [judged(runner.measured[name], answers) for name in order]
        write(chosen.out, rows)
        if chosen.profile:
            runner.profile_all(profiling_order(order), end_s)
            write(chosen.out, [judged(runner.measured[name], answers) for name in order])


if __name__ == "__main__":
    main()
