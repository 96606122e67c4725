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
TRITON = "triton"
START_S, N_STARTS = 45.0, 4
PATHS = {TRITON: "/v2/models/engine/generate_stream"}


@dataclass
class Server:
    """A running server. Its core is the process that makes the tokens.

    refused: requests that it has answered with an error. fault_s: the length of its fault.
    """

    kind: str
    fault: str
    python: str
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    port: int = field(init=False)
    refused: int = 0

    fault_s: float = 0.4
    n_starts: int = 0

    def __post_init__(self) -> None:
        (self.folder / "adapter.bin").write_bytes(os.urandom(1 << 20))
        self.start()

    def start(self) -> None:
        self.port = free_port()
        self.n_starts += 1
        log = subprocess.PIPE if self.fault == "log_pipe" else (self.folder / "log").open("wb")
        words = [self.python, HERE / "engine_server.py", self.kind, self.fault, str(self.port), self.folder]
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=os.environ | {"FAULT_S": str(self.fault_s)},
            process_group=0,
            preexec_fn=normal_priority,
        )

    @property
    def core_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[-1]) if self.kind == "split" else self.process.pid

    def pids(self) -> list[int]:
        """The processes of the server."""
        pids = [self.process.pid]
        for pid in pids:  # grows
            pids += [
                int(word)
                for file in Path(f"/proc/{pid}/task").glob("*/children")
                for word in file.read_text().split()
            ]
        return pids

    def wait(self) -> None:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.kind == TRITON and self.is_model_ready():
                    return
                if self.kind != TRITON:
                    socket.create_connection(("127.0.0.1", self.port)).close()
                    time.sleep(0.5)
                    return
            time.sleep(0.05)
        if self.n_starts == N_STARTS:
            raise SystemExit(f"{self.kind} does not listen")
        # PyTriton gives up if its processes do not find each other in time, which happens on a loaded machine.
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.start()
        self.wait()

    def is_model_ready(self) -> bool:
        """Whether Triton has loaded the model."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", "/v2/models/engine/ready")
            return connection.getresponse().status == 200


def free_port() -> int:
    """A port on which no program listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def real_time(*pids: int) -> None:
    """Run the threads of processes before all programs of normal priority."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


def normal_priority() -> None:
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def request(
    server: Server, prompt: str, *, n: int = 20, size: int = 1, timeout_s: float = 60, streams: bool = True
) -> int:
    """Send a request and read its response. Returns the status; 0 without a response."""
    body: dict[str, object] = {"prompt": prompt, "n_predict": n, "size": size}
    if server.kind != TRITON:
        body |= {"stream": streams, "cache_prompt": False}
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
            timeout_s = 5 if server.fault == "deadlock" else 60
            server.refused += request(server, text, n=n_tokens, timeout_s=timeout_s) not in (0, 200)
            stop.wait(0.05 * chance.random())

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(n_clients)]
    for thread in threads:
        thread.start()
    return threads


@contextlib.contextmanager
def tracing(db: Path, *servers: Server) -> Iterator[None]:
    chosen = [word for server in servers for word in ("--pid", str(server.process.pid))]
    words = [*STALLSCOPE, "trace", "--db", db, "--quiet", *chosen]
    agent = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, preexec_fn=normal_priority)
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
    end_s = time.monotonic() + START_S
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
