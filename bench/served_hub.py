"""A hub as its users run it, for benchmarks: the real command, tokens, questions over HTTP, and its processor time."""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stallscope.serve.tokens import FILE_NAME, Tokens, bearer

PROGRAM = (str(Path(sys.executable).with_name("stallscope")),)
MAX_SEAL_S = 900.0
BUSY = (429, 503, 504)
MAX_ROWS = 10_000
"""The hub's largest limit; without a limit an answer has 100 rows."""

PORTS = re.compile(r"gRPC at port (\d+), over HTTP at (\d+); \w+ API at (\d+)")


@dataclass(frozen=True)
class ServedHub:
    """A running hub. token_file: an ingest token; reader: a token that may read everything."""

    process: "subprocess.Popen[str]"
    grpc: int
    api: int
    token_file: Path
    reader: str

    def ask(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The answer of a tool."""
        answer: dict[str, Any] = json.loads(self._good("POST", f"/api/v1/tools/{tool}", arguments))
        return answer

    def all_rows(self, statement: str) -> list[list[Any]]:
        """The rows of a statement, once its answer covers all stored rows. Raises RuntimeError after some minutes."""
        end_s = time.monotonic() + MAX_SEAL_S
        while True:
            status, text = self._request("POST", "/api/v1/sql", {"sql": statement, "limit": MAX_ROWS})
            answer = json.loads(text)
            if status == 200 and not answer["truncated"]:
                rows: list[list[Any]] = answer["rows"]
                return rows
            is_temporary = status in BUSY or (status == 200 and answer.get("note"))
            if not is_temporary or time.monotonic() > end_s:
                raise RuntimeError(f"no complete answer: {status} {answer.get('note') or text[:500]}")
            time.sleep(2.0)

    def numbers(self) -> dict[str, float]:
        """The metrics without labels, by name."""
        text = self._good("GET", "/metrics", None)
        pairs = (line.split() for line in text.splitlines() if line.startswith("stallscope_hub_"))
        return {name.removeprefix("stallscope_hub_"): float(value) for name, value in pairs}

    def cpu_s(self) -> dict[str, float]:
        """Processor time so far: of the hub, and of the processes of its diagnosis."""
        diagnosis = [pid for pid in children(self.process.pid) if "stream_process" in command_of(pid)]
        return {"hub": cpu_s(self.process.pid), "diagnosis": sum(map(cpu_s, diagnosis))}

    def memory_mb(self) -> int:
        """Memory of the hub and of its children; a page that several of them share counts once."""
        pids = [self.process.pid, *children(self.process.pid)]
        return round(sum(_proportional_bytes(pid) for pid in pids) / 1e6)

    def _good(self, method: str, path: str, body: object) -> str:
        """The text of a successful answer. Raises RuntimeError."""
        status, text = self._request(method, path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {text[:500]}")
        return text

    def _request(self, method: str, path: str, body: object) -> tuple[int, str]:
        headers = {"Authorization": bearer(self.reader), "Content-Type": "application/json"}
        with closing(http.client.HTTPConnection("127.0.0.1", self.api, timeout=60)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@contextmanager
def served_hub(folder: Path, *options: str, **environment: str) -> Iterator[ServedHub]:
    """A hub in the folder until the end of the block."""
    tokens = Tokens(folder / "hub" / FILE_NAME)
    (folder / "ingest").write_text(tokens.create(["ingest"], "default"))
    reader = tokens.create(["read", "sql", "admin"], "default")
    ports = ("--otlp-grpc", "127.0.0.1:0", "--otlp-http", "127.0.0.1:0", "--api", "127.0.0.1:0")
    command = [*PROGRAM, "hub", "--db", str(folder / "hub"), "--insecure-no-tls", *ports, *options]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    ) as process:
        assert process.stderr is not None
        result = next(match for line in process.stderr if (match := PORTS.search(line)))
        log = threading.Thread(target=_kept, args=(process.stderr, folder / "log"), daemon=True)
        log.start()
        try:
            yield ServedHub(process, int(result[1]), int(result[3]), folder / "ingest", reader)
        finally:
            process.terminate()
            log.join()  # it reads until the hub has ended


def _kept(lines: Iterable[str], path: Path) -> None:
    with path.open("w", buffering=1) as log:
        log.writelines(lines)


def stress(hub: ServedHub, *options: str) -> "subprocess.Popen[str]":
    """A running load; its output is JSON."""
    command = [*PROGRAM, "stress", "--endpoint", f"127.0.0.1:{hub.grpc}", "--hub-insecure", "--json"]
    command += ["--token-file", str(hub.token_file), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def cpu_s(pid: int) -> float:
    """Processor time of a process, in itself and in the kernel: proc(5), stat, fields 14 and 15."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in _text(task / "children").split()
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended
        return ""


def command_of(pid: int) -> str:
    """The words of a process's command."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _proportional_bytes(pid: int) -> int:
    """The proportional set size of a process (proc(5), smaps_rollup)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
