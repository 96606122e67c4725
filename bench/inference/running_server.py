"""An inference server, its clients, and a trace of it, for the proofs in this folder."""

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
STALLSCOPE = (sys.executable, "-c", "from stallscope.cli import main; main()")
KINDS = ("uvicorn", "threads", "split", "llama.cpp")
TRITON, VLLM = "triton", "vllm"
N_STARTS = 4
START_S = {VLLM: 400.0}
AGENT_START_S = OTHER_START_S = 45.0
PATHS = {TRITON: "/v2/models/engine/generate_stream", VLLM: "/v1/completions"}
READY_PATHS = {TRITON: "/v2/models/engine/ready", VLLM: "/health"}
OWN_SERVER = ("kv_space", "overload")
"""Faults that are options of vLLM's command line; the other faults can be switched in a running server."""


STANDSTILLS = ("deadlock", "held_file")
"""Faults after which a server answers no request."""


@dataclass
class Server:
    """A running server. Its core is the process that makes the tokens.

    refused: requests that it has answered with an error. not_injected: why the fault failed, if it did. fault_s: the
    length of its fault. model: the folder of vLLM's.
    """

    kind: str
    fault: str
    python: str
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    port: int = field(init=False)
    model: Path | None = None
    refused: int = 0
    not_injected: str = ""
    fault_s: float = 0.4
    n_starts: int = 0

    def __post_init__(self) -> None:
        with (self.folder / "adapter.bin").open("wb") as file:
            file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())  # pages that wait for the disk stay in memory
        self.start()

    def start(self) -> None:
        self.port = free_port()
        self.n_starts += 1
        log = subprocess.PIPE if self.fault == "log_pipe" else (self.folder / "log").open("wb")
        environment = {"FAULT_S": str(self.fault_s)}
        words = [self.python, HERE / "engine_server.py", self.kind, self.fault, str(self.port), self.folder]
        if self.kind == VLLM:
            assert self.model, "vllm needs the folder of a model"
            self.choose(self.fault, self.fault_s)
            words = vllm_command(self.python, self.model, self.port, self.fault)
            environment = vllm_environment(self.folder)
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=os.environ | environment,
            process_group=0,
            preexec_fn=normal_priority,
        )

    def choose(self, fault: str, fault_s: float) -> None:
        """Switch vLLM's fault. Its plugin reads the file at each request."""
        self.fault, self.fault_s, self.refused = fault, fault_s, 0
        (self.folder / "fault.new").write_text(f"{fault} {fault_s}")
        (self.folder / "fault.new").rename(self.folder / "fault")

    @property
    def core_pid(self) -> int:
        if self.kind == VLLM:
            return next(
                pid for pid in self.pids() if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
            )
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[-1]) if self.kind == "split" else self.process.pid

    @property
    def worker_pid(self) -> int:
        """A process that works for the core: of Triton, one of several; 0 without such a process."""
        if self.kind == VLLM:
            return max(descendants(self.core_pid), key=cpu_ticks, default=0)
        stubs = [
            pid for pid in self.pids() if b"python_backend_stub" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        return stubs[0] if stubs else 0

    def engine_pids(self) -> list[int]:
        """The core, and its workers."""
        return [self.core_pid, *descendants(self.core_pid)] if self.kind == VLLM else [self.core_pid]

    def pids(self) -> list[int]:
        """The processes of the server."""
        return [self.process.pid, *descendants(self.process.pid)]

    def wait(self) -> None:
        end_s = time.monotonic() + START_S.get(self.kind, OTHER_START_S)
        while time.monotonic() < end_s and self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.kind in READY_PATHS and self.is_model_ready():
                    return
                if self.kind not in READY_PATHS:
                    socket.create_connection(("127.0.0.1", self.port)).close()
                    time.sleep(0.5)
                    return
            time.sleep(0.05)
        if self.n_starts == N_STARTS:
            raise SystemExit(f"{self.kind} does not listen")
        # PyTriton gives up if its processes do not find each other in time, which happens on a loaded machine.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.start()
        self.wait()

    def is_model_ready(self) -> bool:
        """Whether Triton or vLLM has loaded the model."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", READY_PATHS[self.kind])
            return connection.getresponse().status == 200


def cpu_ticks(pid: int) -> int:
    """The CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def descendants(pid: int) -> list[int]:
    """The children of a process, and their children."""
    pids = [
        int(word)
        for file in Path(f"/proc/{pid}/task").glob("*/children")
        for word in file.read_text().split()
    ]
    return [*pids, *(each for child in pids for each in descendants(child))]


def vllm_command(python: str, model: Path, port: int, fault: str) -> list[object]:
    """The command line of vLLM on a CPU. The prompts of the faults have up to 4,000 tokens."""
    words: list[object] = [Path(python).parent / "vllm", "serve", model, "--served-model-name", "tiny"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    words += ["--no-enable-prefix-caching", "--max-num-batched-tokens", "4096"]
    words += ["--max-num-seqs", "4" if fault == "overload" else "64", "--max-model-len"]
    # 15 blocks of 32 tokens: two requests of about 200 tokens.
    return words + (
        ["400", "--block-size", "32", "--num-gpu-blocks-override", "15"] if fault == "kv_space" else ["4096"]
    )


def vllm_environment(folder: Path) -> dict[str, str]:
    """The environment of vLLM, with the plugin of the faults. folder: gets the plugin's entry point."""
    plugin = folder / "plugin" / "inference_faults-1.0.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: inference-faults\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nfaults = vllm_faults:install\n")
    return {
        "PYTHONPATH": f"{plugin.parent}:{HERE}",
        "FAULT_FILE": str(folder / "fault"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A port on which no program listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def real_time(*pids: int) -> None:
    """Run the threads of processes before all programs of normal priority.

    Where the kernel refuses real-time priority, as in a cgroup without a share of it, they become less nice.
    """
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            try:
                os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))
            except PermissionError:
                os.setpriority(os.PRIO_PROCESS, int(thread.name), -15)


def normal(*pids: int) -> None:
    """Run the threads of processes with normal priority."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)


def normal_priority() -> None:
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, 0, 0)


def request_body(
    server: Server, prompt: str, *, n: int, size: int = 1, streams: bool = True
) -> dict[str, object]:
    """The body of a request in the form of each engine."""
    body: dict[str, object]
    if server.kind == VLLM:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": n, "ignore_eos": True, "stream": streams}
        return body | ({"vllm_xargs": {"rare": 1}} if "rare" in prompt else {})
    body = {"prompt": prompt, "n_predict": n, "size": size}
    return body if server.kind == TRITON else body | {"stream": streams, "cache_prompt": False}


def request(
    server: Server, prompt: str, *, n: int = 20, size: int = 1, timeout_s: float = 60, streams: bool = True
) -> int:
    """Send a request and read its response. Returns the status; 0 without a response."""
    body = request_body(server, prompt, n=n, size=size, streams=streams)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        path = PATHS.get(server.kind, "/completion")
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    return 0


def load(
    server: Server,
    stop: threading.Event,
    *,
    n_clients: int,
    special: str = "",
    n_tokens: int = 20,
    prompt: str = "ab cd ef gh",
    seed: int = 0,
) -> list[threading.Thread]:
    """Clients that each send one request after the other. special: the prompt of every twelfth request."""

    def client(number: int) -> None:
        chance = random.Random(1000 * seed + number)
        while not stop.is_set():
            text = special if special and chance.random() < 1 / 12 else prompt
            timeout_s = 5 if server.fault in STANDSTILLS else 60
            server.refused += request(server, text, n=n_tokens, timeout_s=timeout_s) not in (0, 200)
            stop.wait(0.05 * chance.random())

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(n_clients)]
    for thread in threads:
        thread.start()
    return threads


@contextlib.contextmanager
def tracing(db: Path, *servers: Server) -> Iterator[None]:
    """Trace servers. The agent has the caller's priority: servers of real-time priority would leave it no CPU."""
    chosen = [word for server in servers for word in ("--pid", str(server.process.pid))]
    words = [*STALLSCOPE, "trace", "--db", db, "--quiet", *chosen]
    agent = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert agent.stderr is not None
    while "tracing into" not in (line := agent.stderr.readline()):
        if not line:
            raise SystemExit("the agent ended")
    threading.Thread(target=agent.stderr.read, daemon=True).start()
    wait_until_recorded(db, {server.process.pid for server in servers})
    try:
        yield
    finally:
        agent.send_signal(signal.SIGINT)
        agent.wait(60)


def wait_until_recorded(db: Path, pids: set[int]) -> None:
    """Wait until the agent records the requests to these processes."""
    end_s = time.monotonic() + AGENT_START_S
    with contextlib.closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as trace:
        while not pids <= {pid for (pid,) in trace.execute("SELECT pid FROM servers")}:
            if time.monotonic() > end_s:
                raise SystemExit("the agent does not recognise the servers")
            time.sleep(0.2)


def explained(db: Path) -> dict[str, object]:
    words = [*STALLSCOPE, "explain", "--db", db, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        return {"error": done.stderr[-400:]}
    whole = json.loads(done.stdout)
    return {
        "verdicts": [
            {
                "kind": each["kind"],
                "cause": each["causes"][0]["cause"] if each["causes"] else "",
                "pids": each.get("pids"),
                "line": each["evidence"].get("line"),
                "summary": each["summary"],
            }
            for each in whole["verdicts"]
        ],
        "answer": whole.get("answer"),
    }
