"""Faults in small inference servers, each judged by `stallscope explain` on a live trace.

    python bench/inference/prove_faults.py ENVIRONMENT [--triton PYTHON] [--vllm PYTHON MODEL] [--kind KIND]...
                                           [--fault FAULT]... [--repeat N] [--seed N] [--journal FILE] [--minutes N]
                                           [--report]

ENVIRONMENT: the Python with the packages of the servers. Needs root. A run is right if the first verdict names an
expected cause, the process that has the fault and, where the fault is in Python, its function. At least 95 % of the
runs must be right. With --journal, each run is appended to a file, and runs that are in the file are not repeated: so
an interrupted proof continues. With --minutes, no run begins after that time. The result is written after the last
run, or with --report.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from limits import cpu_quota, slow_disk
from outside_faults import (
    answer_slowly,
    drain_slowly,
    hogs,
    hold_lock,
    pause,
    read_slowly,
    repeated,
)
from report import commit, report
from running_server import (
    KINDS,
    OWN_SERVER,
    PATHS,
    STANDSTILLS,
    TRITON,
    VLLM,
    Server,
    explained,
    load,
    normal,
    real_time,
    request_body,
    tracing,
)

LOAD_S = 14.0
N_LONG = {"llama.cpp": (2200, 3400), VLLM: (2800, 3600)}
"""Words of a long prompt."""


@dataclass(frozen=True)
class Variation:
    """Parameters of a run that do not change the right answer. fault_s: the length of a delay.

    prompt: of most requests. n_long: words of a long prompt. n_tokens: of a response.
    """

    seed: int
    fault_s: float
    prompt: str
    n_long: int
    n_tokens: int
    n_clients: int

    @staticmethod
    def of(seed: int, kind: str) -> "Variation":
        """llama.cpp and vLLM work longer on a prompt than the other servers, and their prompts have a limit."""
        chance = random.Random(seed)
        words = ["".join(chance.choices("abcdefghij", k=2)) for _ in range(chance.randint(3, 12))]
        return Variation(
            seed,
            fault_s=round(chance.uniform(0.3, 0.7), 2),
            prompt=" ".join(words),
            n_long=chance.randint(*N_LONG.get(kind, (6000, 12000))),
            n_tokens=chance.randint(12, 30),
            n_clients=chance.randint(3, 5),
        )


@dataclass(frozen=True)
class Truth:
    """causes: any of them is right. function: of the line.

    role: the process at fault: api, core, engine (the core or a worker), any, or none.
    """

    causes: tuple[str, ...]
    role: str = "api"
    function: str = ""
    kind: str = "latency"


IN_CORE = {"split": "core", VLLM: "core"}


def truth(kind: str, fault: str) -> Truth | None:
    """The right answer; None where an engine cannot have the fault."""
    core = IN_CORE.get(kind, "api")
    is_python = kind != "llama.cpp"
    by_fault = {
        "sigstop": Truth(("process_stopped",), core),
        "quota": Truth(("cpu_quota",), "engine" if kind == VLLM else core),
        "hog": Truth(("cpu_preemption",), "any"),
        "long_prompts": Truth(("long_prompt",), "any"),
        "kv_space": Truth(("capacity", "kv_cache"), "any"),
        "overload": Truth(("capacity",), "any"),
        "slow_client": Truth(("slow_client",), "none"),
    }
    in_python = {
        "tokenizer": Truth(("host_compute",), "api", "slow_merge"),
        "writer_sleep": Truth(("host_sleep",), "api", "flush_slowly"),
        "log_pipe": Truth(("full_pipe",), "api", "log_line"),
        "adapter": Truth(("block_io",), core, "load_adapter"),
        "spin": Truth(("gil",), core, "sum_squares"),
        "deadlock": Truth(("lock_contention", "blocked"), core, "take_wedged", "dead_server"),
    }
    of_small = {
        "regex": Truth(("host_compute", "gil"), "api", "match_badly"),
        "weights": Truth(("block_io", "page_fault"), core, "map_weights"),
        "remote": Truth(("network_wait",), core, "look_up"),
        "file_lock": Truth(("file_lock",), core, "read_shared"),
        "held_file": Truth(("file_lock",), core, "read_shared", "dead_server"),
    }
    if kind == VLLM:
        of_small = {}
    if kind in (VLLM, TRITON):
        by_fault["stopped_worker"] = Truth(("process_stopped",), "worker")
    return (by_fault | (in_python | of_small if is_python else {})).get(fault)


FAULTS = (
    *("sigstop", "quota", "hog", "long_prompts", "kv_space", "overload", "slow_client"),
    *("tokenizer", "writer_sleep", "log_pipe", "adapter", "spin", "deadlock"),
    *("regex", "weights", "remote", "file_lock", "held_file", "stopped_worker"),
)


LIMITED = ("quota", "adapter", "weights")
"""Faults by control groups. The kernel does not limit, or refuses, programs of real-time priority there."""


@dataclass
class Environments:
    """The Python of each kind, and vLLM's model and running server."""

    python: str
    triton: str | None
    vllm: tuple[str, Path] | None
    running: Server | None = None

    def kinds(self) -> list[str]:
        return [*KINDS, *([TRITON] if self.triton else []), *([VLLM] if self.vllm else [])]

    @contextlib.contextmanager
    def server(self, kind: str, fault: str, variation: Variation, folder: Path) -> Iterator[Server]:
        """A server with a fault. A running vLLM is kept, because it takes a minute to start."""
        python, model = {
            TRITON: (self.triton or "", None),
            VLLM: self.vllm or ("", None),
        }.get(kind, (self.python, None))
        if kind == VLLM and fault not in (*OWN_SERVER, "log_pipe"):
            if not self.running or self.running.process.poll() is not None:
                home = Path(tempfile.mkdtemp(dir="/var/tmp"))
                self.running = Server(kind, fault, python, home, model=model)
            self.running.choose(fault, variation.fault_s)
            yield self.running
            if fault == "deadlock":
                self.close()
            return
        self.close()
        server = Server(kind, fault, python, folder, model=model, fault_s=variation.fault_s)
        try:
            yield server
        finally:
            end(server)

    def close(self) -> None:
        """Stop the server that was kept."""
        if self.running:
            end(self.running)
            shutil.rmtree(self.running.folder)
            self.running = None


def end(server: Server) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def run(environments: Environments, kind: str, fault: str, variation: Variation) -> dict[str, object]:
    """One run: the answer of `explain`, and whether it is right."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, contextlib.ExitStack() as stack:
        folder, stop = Path(name), threading.Event()
        server = stack.enter_context(environments.server(kind, fault, variation, folder))
        drain = threading.Thread(target=drain_slowly, args=(server, stop), daemon=True)
        if fault == "log_pipe":
            drain.start()
        server.wait()
        if fault in LIMITED:
            normal(*server.pids())
        else:
            real_time(*server.pids())
        if kind == VLLM:
            warm_up(server)
        with tracing(folder / "trace.db", server):
            disturb(server, variation, stop, stack)
            time.sleep(LOAD_S)
            pids = {"api": server.process.pid, "core": server.core_pid, "worker": server.worker_pid}
            engine_pids = server.engine_pids()
            if fault not in STANDSTILLS:
                stop.set()
                time.sleep(1.0)
        stop.set()
        if server.refused:
            raise SystemExit(
                f"{kind} refused {server.refused} requests, so it did not show the fault {fault}"
            )
        if server.not_injected:
            raise SystemExit(f"{kind} did not get the fault {fault}: {server.not_injected}")
        answer = explained(folder / "trace.db") | {"named_after_s": named_after_s(folder / "trace.db")}
        if keep := os.environ.get("KEEP_TRACES"):
            shutil.move(folder / "trace.db", Path(keep) / f"{kind}-{fault}-{variation.seed}.db")
    expected = truth(kind, fault)
    assert expected is not None
    return {
        "kind": kind,
        "fault": fault,
        "seed": variation.seed,
        "is_right": is_right(answer, expected, pids, engine_pids),
        "pids": pids,
        "engine_pids": engine_pids,
        "commit": commit(),
        **answer,
    }


def warm_up(server: Server) -> None:
    """vLLM compiles code for the first request with a new option, for up to half a minute."""
    body = request_body(server, "ab cd", n=4) | {"logprobs": 20}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", PATHS[VLLM], json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read()


def disturb(server: Server, variation: Variation, stop: threading.Event, stack: contextlib.ExitStack) -> None:
    """Start the clients, and the fault where it comes from outside."""
    fault, core = server.fault, server.core_pid
    special = "ab " * variation.n_long if fault == "long_prompts" else f"rare {variation.prompt}"
    if fault in ("sigstop", "stopped_worker", "quota", "hog", "kv_space", "overload", "slow_client"):
        special = ""
    is_fast = server.kind == "llama.cpp" and fault in ("kv_space", "overload")  # 3,000 tokens a second
    n_tokens = 15 * variation.n_tokens if is_fast else variation.n_tokens
    if server.kind == VLLM and fault == "kv_space":
        n_tokens = 180
    load(
        server,
        stop,
        n_clients={"kv_space": 8, "overload": 24}.get(fault, variation.n_clients),
        special=special,
        n_tokens=n_tokens,
        prompt=variation.prompt,
        seed=variation.seed,
    )

    def injected(function: Callable[..., None], *words: object) -> None:
        try:
            function(*words)
        except (OSError, subprocess.SubprocessError) as error:
            server.not_injected = repr(error)

    def start(function: Callable[..., None], *words: object) -> None:
        threading.Thread(target=injected, args=(function, *words), daemon=True).start()

    if fault in ("sigstop", "stopped_worker"):
        pid = server.worker_pid if fault == "stopped_worker" else core
        start(repeated, stop, lambda: pause(pid, variation.fault_s))
    elif fault == "hog":
        start(hogs, server.pids(), stop, variation.fault_s + 0.1)
    elif fault == "slow_client":
        for _ in range(4):
            start(read_slowly, server, stop)
    elif fault == "quota":
        quota_us = {"split": 50_000, VLLM: 200_000}.get(server.kind, 150_000)
        stack.enter_context(cpu_quota(server.engine_pids(), quota_us))
    elif fault == "remote":
        start(answer_slowly, server.folder / "service", stop, variation.fault_s)
    elif fault in ("file_lock", "held_file"):
        held_s = 1000.0 if fault == "held_file" else 2 * variation.fault_s
        start(hold_lock, server.folder / "adapter.bin", stop, held_s)
    elif fault in ("adapter", "weights"):
        stack.enter_context(slow_disk(server.pids(), server.folder, 2 << 20))


def named_after_s(db: Path) -> float | None:
    """The time from the last progress of a dead server until its incident; None without such an incident."""
    with contextlib.closing(sqlite3.connect(db)) as trace:
        rows = trace.execute("SELECT made_wall_ns, verdict FROM verdicts ORDER BY id").fetchall()
    for made_ns, text in rows:
        verdict = json.loads(text)
        if verdict["kind"] == "dead_server" and verdict["change"] == "opened":
            return round((made_ns - _wall_ns(verdict["since"])) / 1e9, 2)
    return None


def _wall_ns(text: str) -> int:
    """The time of an ISO 8601 text."""
    return int(datetime.fromisoformat(text).timestamp() * 1e9)


def is_right(
    answer: dict[str, object], expected: Truth, pids: dict[str, int], engine_pids: Collection[int] = ()
) -> bool:
    verdicts = answer.get("verdicts") or [{}]
    first = next((each for each in verdicts if each.get("kind") == expected.kind), verdicts[0])
    has_cause = first.get("kind") == expected.kind and first.get("cause") in expected.causes
    named, role = first.get("pids") or [], expected.role
    right = {"none": [[]], "engine": [[pid] for pid in engine_pids]}.get(role, [[pids.get(role)]])
    has_process = role == "any" or named in right
    return bool(has_cause and has_process and expected.function in (first.get("line") or ""))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("python")
    parser.add_argument("--triton", help="the Python with nvidia-pytriton: also Triton")
    parser.add_argument("--vllm", nargs=2, help="the Python with vLLM, and the folder of a model: also vLLM")
    parser.add_argument("--kind", action="append", choices=(*KINDS, TRITON, VLLM))
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="of the parameters of the first runs")
    parser.add_argument("--journal", type=Path, help="a file of finished runs")
    parser.add_argument("--minutes", type=float, help="no run begins after this time")
    parser.add_argument("--report", action="store_true", help="also write the result of an unfinished proof")
    words = parser.parse_args()
    real_time(os.getpid())  # clients and servers: delays by other programs of the machine are not the fault
    vllm = (words.vllm[0], Path(words.vllm[1])) if words.vllm else None
    environments = Environments(words.python, words.triton, vllm)
    results = finished(words.journal)
    wanted = [
        (kind, fault, seed)
        for seed in range(words.seed, words.seed + words.repeat)
        for kind in words.kind or environments.kinds()
        for fault in words.fault or FAULTS
        if truth(kind, fault)
    ]
    end_s = time.monotonic() + 60 * (words.minutes or 1e6)
    with contextlib.closing(environments):
        for kind, fault, seed in wanted:
            if (kind, fault, seed) not in results and time.monotonic() < end_s:
                result = run(environments, kind, fault, Variation.of(seed, kind))
                results[kind, fault, seed] = result
                if words.journal:
                    with words.journal.open("a") as journal:
                        journal.write(json.dumps(result) + "\n")
                print(json.dumps(result), file=sys.stderr, flush=True)
    runs = [results[key] for key in wanted if key in results]
    n_right = sum(bool(each["is_right"]) for each in runs)
    print(f"{n_right} of {len(runs)} right, {len(wanted) - len(runs)} not run", file=sys.stderr)
    if not (words.kind or words.fault) and (words.report or len(runs) == len(wanted)):
        numbers = {"n_runs": len(runs), "n_right": n_right, "n_not_run": len(wanted) - len(runs)}
        report("inference_faults", numbers | {"runs": runs})
    if n_right < 0.95 * len(runs):
        raise SystemExit(1)


def finished(journal: Path | None) -> dict[tuple[str, str, int], dict[str, object]]:
    """The runs of a journal, by kind, fault and seed."""
    if not journal or not journal.exists():
        return {}
    runs = [json.loads(line) for line in journal.read_text().splitlines()]
    return {(each["kind"], each["fault"], each["seed"]): each for each in runs}


if __name__ == "__main__":
    main()
