"""Robustness of the hub: the real command, killed twenty times under load, and attacked while valid senders continue.

Killed: four senders with retries, kill -9 at random moments, restart on the same folder; at the end every acknowledged
row exists exactly once. Attacked: 10,000 connections, half-sent requests, garbage, zip bombs; the hub still accepts all
rows of a valid sender.

python bench/bench_hub_hard.py [--kills N] [--connections N] [--seconds S]
"""

import argparse
import gzip
import json
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from report import report

LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"
PROGRAM = str(Path(sys.executable).with_name("stallscope"))
ROWS = 50


@dataclass(frozen=True)
class Hub:
    """A running hub."""

    process: "subprocess.Popen[str]"
    grpc: int
    http: int


@contextmanager
def hub(folder: Path, *, grpc_port: int = 0) -> Iterator[Hub]:
    """The hub's command on a folder."""
    command = [PROGRAM, "hub", "--db", str(folder), "--insecure-no-tls"]
    for option in ("--otlp-http", "--api"):
        command += [option, "127.0.0.1:0"]
    command += ["--otlp-grpc", f"127.0.0.1:{grpc_port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        for line in process.stderr:
            if match := re.search(r"gRPC at port (\d+), over HTTP at (\d+)", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield Hub(process, int(match[1]), int(match[2]))
                break
        else:
            raise RuntimeError("the hub did not start")
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def token(folder: Path) -> str:
    """A token that may send."""
    command = [
        PROGRAM,
        "hub",
        "token",
        "create",
        "--db",
        str(folder),
        "--scope",
        "ingest",
        "--tenant",
        "bench",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]


def request(name: str) -> bytes:
    """ROWS records of one name."""
    message = ExportLogsServiceRequest()
    records = message.resource_logs.add().scope_logs.add().log_records
    for i in range(ROWS):
        records.add(time_unix_nano=time.time_ns() + i, event_name=name)
    return message.SerializeToString()


class Sender(threading.Thread):
    """Sends until stop is set; keeps the acknowledged rows and the duration of each request."""

    def __init__(self, port: int, secret: str, name: str):
        super().__init__()
        self.port, self.metadata, self.label = port, [("authorization", f"Bearer {secret}")], name
        self.acknowledged: list[str] = []
        self.times_s: list[float] = []
        self.n_retries = 0
        self.stop = threading.Event()

    def run(self) -> None:
        number = 0
        with grpc.insecure_channel(
            f"127.0.0.1:{self.port}",
            options=[("grpc.max_reconnect_backoff_ms", 300), ("grpc.use_local_subchannel_pool", 1)],
        ) as channel:
            call = channel.unary_unary(LOGS)
            while not self.stop.is_set():
                name = f"{self.label}-{number}"
                body = request(name)
                while not self.stop.is_set():
                    begin_s = time.monotonic()
                    try:
                        call(body, metadata=self.metadata, timeout=30)
                    except grpc.RpcError as error:
                        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                            self.n_retries += 1
                            time.sleep(0.05)
                            continue
                        raise
                    self.acknowledged.append(name)
                    self.times_s.append(time.monotonic() - begin_s)
                    break
                number += 1


def stored(folder: Path) -> Counter[str]:
    """Rows by name, as they are in the store."""
    from stallscope.store.hub.store import HubStore

    store = HubStore.open(folder)
    try:
        rows = store.tail("bench", "events", since_us=0)
        return Counter(rows["name"].to_pylist())
    finally:
        store.close()


def killed(n_kills: int) -> dict[str, Any]:
    """kill -9 at random moments under load. Raises AssertionError for a row that is lost or there twice."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "hub"
        secret = token(folder)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        senders = [Sender(port, secret, f"s{number}") for number in range(4)]
        recoveries_s = []
        for life in range(n_kills):
            begin_s = time.monotonic()
            with hub(folder, grpc_port=port) as running:
                recoveries_s.append(time.monotonic() - begin_s)
                if not life:
                    for sender in senders:
                        sender.start()
                time.sleep(random.uniform(0.2, 3.0))
                running.process.kill()
                running.process.wait()
        with hub(folder, grpc_port=port):
            time.sleep(1.0)
            for sender in senders:
                sender.stop.set()
            for sender in senders:
                sender.join()
        result = stored(folder)
        acknowledged = [entry for sender in senders for entry in sender.acknowledged]
        lost = [entry for entry in acknowledged if result[entry] < ROWS]
        twice = [entry for entry, n in result.items() if n > ROWS]
        partly = [entry for entry, n in result.items() if n < ROWS]
        assert not lost and not twice and not partly, (lost[:3], twice[:3], partly[:3])
        return {
            "kills": n_kills,
            "acknowledged_rows": len(acknowledged) * ROWS,
            "lost_rows": 0,
            "rows_twice": 0,
            "retries": sum(sender.n_retries for sender in senders),
            "start_s_max": round(max(recoveries_s), 2),
        }


def attacked(n_connections: int, seconds: float) -> dict[str, Any]:
    """Idle and slow connections, garbage and bombs, while one good sender goes on."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    bomb = gzip.compress(bytes(1 << 30), 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "hub"
        secret = token(folder)
        with hub(folder) as running:
            sender = Sender(running.grpc, secret, "good")
            sender.start()
            held = [
                _connected(port) for port in (running.grpc, running.http) for _ in range(n_connections // 2)
            ]
            n_held = sum(entry is not None for entry in held)
            counts: Counter[str] = Counter()
            slow = [entry for entry in held[n_connections // 2 :] if entry][:200]
            for entry in slow:
                with suppress(OSError):
                    entry.sendall(b"POST /v1/logs HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n")
            end_s = (
                time.monotonic() + seconds
            )  # opening and filling ten thousand connections takes its own time
            while not counts or time.monotonic() < end_s:
                for entry in slow:
                    with suppress(OSError):
                        entry.sendall(b"X-A: b\r\n")
                for port in (running.grpc, running.http):
                    counts["garbage connections"] += _garbage(port)
                counts["bombs answered " + _post(running.http, secret, bomb)] += 1
                time.sleep(0.5)
            rss_mb = int(Path(f"/proc/{running.process.pid}/statm").read_text().split()[1]) * 4096 / 1e6
            sender.stop.set()
            sender.join()
            is_alive = running.process.poll() is None
            for entry in held:
                if entry:
                    entry.close()
        result = stored(folder)
        lost = [entry for entry in sender.acknowledged if result[entry] != ROWS]
        assert is_alive and not lost
        return {
            "connections_held": n_held,
            "slow_requests": len(slow),
            "seconds": seconds,
            **counts,
            "good_rows_acknowledged": len(sender.acknowledged) * ROWS,
            "good_rows_lost": 0,
            "good_answer_ms_median": round(float(np.median(sender.times_s)) * 1000, 1),
            "good_answer_ms_max": round(max(sender.times_s) * 1000),
            "hub_rss_mb": round(rss_mb),
        }


def _connected(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=5)
    except OSError:
        return None


def _garbage(port: int) -> bool:
    """Whether a port took random bytes."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(random.randbytes(4096))
            connection.settimeout(0.2)
            with suppress(OSError):
                connection.recv(100)
            return True
    except OSError:
        return False


def _post(port: int, secret: str, body: bytes) -> str:
    """The status that a gzipped body is answered with."""
    head = (
        f"POST /v1/logs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\nContent-Encoding: gzip\r\n"
        f"Content-Type: application/x-protobuf\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(head.encode() + body)
            return connection.recv(64).split()[1].decode()
    except (OSError, IndexError):
        return "not at all"


def main() -> None:
    """Kill, then attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    random.seed(json.dumps(vars(asked)))
    report(
        "hub_hard", {"killed": killed(asked.kills), "attacked": attacked(asked.connections, asked.seconds)}
    )


if __name__ == "__main__":
    main()
