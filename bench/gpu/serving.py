"""Faults in a small inference engine on one GPU, in eager mode and with CUDA graphs, judged by `explain`.

    bench/gpu/run_there.sh serving --budget 200

For each mode a server starts once. A healthy run and each fault have a trace of their own. The table is printed last;
OUT has serving.json and the traces. A run is right if the first verdict names cause, process and, in Python, function.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from outside_faults import pause, repeated
from prove_faults import Truth, is_right
from report import commit
from running_server import Server, explained, load, tracing

HERE = Path(__file__).parent
MODES = ("eager", "graph")
LOAD_S, START_S, RUN_S = 7.0, 90.0, 20.0
STOP_S = 0.4
LONG_PROMPT = "ab " * 40_000
N_HOGS = 24

TRUTHS = {
    "healthy": None,
    "sigstop": Truth(("process_stopped",)),
    "hog": Truth(("cpu_preemption",)),
    "long_prompts": Truth(("long_prompt",)),
    "tokenizer": Truth(("host_compute", "gil"), function="slow_merge"),
    "writer": Truth(("host_sleep",), function="flush_slowly"),
}
PROMPTS = {"long_prompts": LONG_PROMPT, "tokenizer": "ab tokenizer cd", "writer": "ab writer cd"}


@dataclass
class GpuServer(Server):
    """The engine in one mode. kind: the mode."""

    def __post_init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = [self.python, HERE / "serving_engine.py", self.kind, str(self.port)]
        log = (self.folder / f"{self.kind}.log").open("wb")
        self.process = subprocess.Popen(words, stdout=log, stderr=log, process_group=0)

    def wait_ready(self) -> None:
        log, end_s = self.folder / f"{self.kind}.log", time.monotonic() + START_S
        while "ready" not in (text := log.read_text(errors="replace")):
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"the engine does not start: {text[-600:]}")
            time.sleep(0.1)


def share_cpu(pid: int, stop: threading.Event) -> None:
    """Pin a process to one CPU, on which many other programs run for half a second from time to time."""
    before, cpu = os.sched_getaffinity(pid), max(os.sched_getaffinity(pid))
    pin(pid, {cpu})
    burn = (
        "import os, time\n"
        f"os.sched_setaffinity(0, [{cpu}])\n"
        "end = time.monotonic() + 0.6\n"
        "while time.monotonic() < end: pass\n"
    )
    while not stop.wait(1.5):
        for program in [subprocess.Popen([sys.executable, "-S", "-c", burn]) for _ in range(N_HOGS)]:
            program.wait()
    pin(pid, before)


def pin(pid: int, cpus: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


def run(server: GpuServer, fault: str, db: Path) -> None:
    """Trace the server under load with one fault."""
    stop, pid = threading.Event(), server.process.pid
    with tracing(db, server):
        clients = load(server, stop, n_clients=4, special=PROMPTS.get(fault, ""))
        disturbances = {
            "sigstop": lambda: repeated(stop, lambda: pause(pid, STOP_S)),
            "hog": lambda: share_cpu(pid, stop),
        }
        disturbance = threading.Thread(target=disturbances.get(fault, stop.wait))
        disturbance.start()
        time.sleep(LOAD_S)
        stop.set()
        for thread in (*clients, disturbance):
            thread.join(5)
        time.sleep(1.0)


def judged(mode: str, fault: str, db: Path, pid: int) -> dict[str, object]:
    answer = explained(db)
    truth = TRUTHS[fault]
    kinds = [each["kind"] for each in answer.get("verdicts") or []]
    is_healthy = "verdicts" in answer and not {"latency", "dead_server"} & set(
        kinds
    )  # it may be launch-bound
    right = is_right(answer, truth, {"api": pid}, [pid]) if truth else is_healthy
    return {"mode": mode, "fault": fault, "is_right": right, **answer}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=200.0)
    parser.add_argument("--fault", action="append", choices=TRUTHS)
    words = parser.parse_args()
    end_s, out = time.monotonic() + words.budget, Path(os.environ.get("OUT", "build/gpu"))
    out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, object]] = []
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as name,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        answers = []
        for mode in MODES:
            server = GpuServer(mode, "", sys.executable, Path(name))
            try:
                server.wait_ready()
                for fault in words.fault or TRUTHS:
                    if end_s - time.monotonic() < RUN_S:
                        results.append({"mode": mode, "fault": fault, "is_right": None})
                        continue
                    db = out / f"{mode}-{fault}.db"
                    run(server, fault, db)
                    answers.append(pool.submit(judged, mode, fault, db, server.process.pid))
            finally:
                server.process.kill()
        results = [*(each.result() for each in answers), *results]
    with tarfile.open(out / "traces.tar.gz", "w:gz", compresslevel=3) as archive:
        for db in sorted(out.glob("*.db")):
            archive.add(db, db.name)
            db.unlink()
    (out / "serving.json").write_text(json.dumps({"commit": commit(), "runs": results}, indent=1))
    for each in results:
        summary = ([verdict["summary"] for verdict in each.get("verdicts") or []] or [each.get("error", "")])[
            0
        ]
        print(
            f"{each['mode']:6} {each['fault']:13} {each['is_right']!s:6} {each.get('answer')} {summary}"[:220]
        )
    n_right = sum(bool(each["is_right"]) for each in results)
    print(f"{n_right} of {len(results)} right")


if __name__ == "__main__":
    main()
