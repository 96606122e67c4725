"""Runs of prove_faults.py on many CPUs: several at once, each on CPUs of its own, until a time limit.

    python bench/inference/lanes.py --seed N [--repeat N] [--budget S] [--python PYTHON] [--out FOLDER]
                                    [--lanes N] [--cpus N] [--kind KIND]... [--fault FAULT]...

PYTHON: with the packages of the small servers; without it, they come from .carry/inference.tar.xz (see carry.sh).
FOLDER gets results.tar.gz with runs.jsonl, which fault_results.py reads, the traces and the output of each lane. A
table of the runs is printed last. Runs that do not fit in the time are not begun.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from prove_faults import FAULTS, truth
from running_server import KINDS

HERE = Path(__file__).resolve().parent
RUN_S = 40.0
"""A run begins only if this time is left, and is stopped after twice this time."""


def lane(
    cpus: set[int], work: "queue.Queue[tuple[str, str, int]]", end_s: float, words: argparse.Namespace
) -> None:
    """One run after the other on these CPUs."""
    name = f"lane-{min(cpus)}"
    environment = os.environ | {"KEEP_TRACES": str(words.out / "traces")}
    while end_s - time.monotonic() > RUN_S:
        try:
            kind, fault, seed = work.get_nowait()
        except queue.Empty:
            return
        command = [sys.executable, HERE / "prove_faults.py", words.python, "--kind", kind, "--fault", fault]
        command += ["--repeat", "1", "--seed", str(seed), "--journal", words.out / f"{name}.jsonl"]
        with (words.out / f"{name}.log").open("ab") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0)
            os.sched_setaffinity(run.pid, cpus)
            try:
                code = run.wait(min(2 * RUN_S, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, 9)
                code = run.wait()
        print(f"{time.strftime('%T')} {name} {kind} {fault} {seed}: {code}", flush=True)


def unpack() -> None:
    """Put the carried packages into a folder that the servers import from."""
    folder = tempfile.mkdtemp(dir="/var/tmp")
    with tarfile.open(HERE.parents[1] / ".carry" / "inference.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"


def table(runs: list[dict]) -> str:
    lines = []
    for each in sorted(runs, key=lambda run: (run["fault"], run["kind"])):
        summaries = (verdict["summary"] for verdict in each.get("verdicts") or [])
        summary = next(summaries, each.get("error", ""))
        right = "right" if each["is_right"] else "WRONG"
        lines.append(f"{each['fault']:12} {each['kind']:9} {right} {each.get('answer')} {summary}"[:230])
    n_right = sum(bool(each["is_right"]) for each in runs)
    return "\n".join([*lines, f"{n_right} of {len(runs)} right"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python")
    parser.add_argument("--budget", type=float, default=530.0, help="seconds")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "build/inference_lanes")))
    parser.add_argument("--lanes", type=int, default=5)
    parser.add_argument("--cpus", type=int, default=3)
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    words = parser.parse_args()
    end_s = time.monotonic() + words.budget
    if not words.python:
        words.python = sys.executable
        unpack()
    (words.out / "traces").mkdir(parents=True, exist_ok=True)
    work: queue.Queue[tuple[str, str, int]] = queue.Queue()
    for seed in range(words.seed, words.seed + words.repeat):
        for fault in words.fault or FAULTS:
            for kind in words.kind or KINDS:
                if truth(kind, fault):
                    work.put((kind, fault, seed))
    cpus = sorted(os.sched_getaffinity(0))
    groups = [set(cpus[i * words.cpus : (i + 1) * words.cpus]) for i in range(words.lanes)]
    threads = [threading.Thread(target=lane, args=(group, work, end_s, words)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = [line for file in words.out.glob("lane-*.jsonl") for line in file.read_text().splitlines()]
    (words.out / "runs.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with tarfile.open(words.out / "results.tar.gz", "w:gz", compresslevel=3) as archive:
        for file in sorted(
            [*words.out.glob("*.jsonl"), *words.out.glob("*.log"), *words.out.glob("traces/*.db")]
        ):
            archive.add(file, file.relative_to(words.out))
            file.unlink()
    print(table([json.loads(line) for line in lines]))
    print(f"{work.qsize()} not begun")


if __name__ == "__main__":
    main()
