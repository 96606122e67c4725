"""Healthy inference servers get no verdict: 10,000 requests under moderate load, and 10 idle minutes.

    python bench/inference/prove_healthy.py ENVIRONMENT [--requests N] [--idle-s S]

ENVIRONMENT: the Python with the packages of the servers. Needs root. Four servers start slowly (they load a model and
warm up in the first request). Then each answers its share of the requests, with short and long prompts, short and long
responses. Then all of them wait, and only their health is checked. The servers have priority over other programs of
the machine, because a busy machine delays requests. A verdict of `explain` and an incident during the trace count.
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
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import report
from running_server import KINDS, Server, explained, real_time, request, tracing

N_CLIENTS = 6
HEALTH_EVERY_S = 10.0


def main() -> None:
    """Measure and report. Exits with 1 on a verdict, or if requests were not recorded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("python")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--idle-s", type=float, default=600.0)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        servers = [started(kind, words.python, folder / kind, stack) for kind in KINDS]
        with tracing(folder / "trace.db", *servers):
            for server in servers:
                server.wait()
                real_time(*server.pids())
            real_time(os.getpid())  # clients that read late would delay the servers
            began_s = time.monotonic()
            for i, server in enumerate(servers):
                send(server, words.requests // len(servers), seed=i)
            load_s = time.monotonic() - began_s
            if n_refused := sum(server.refused for server in servers):
                raise SystemExit(f"the servers refused {n_refused} requests")
            idle(servers, words.idle_s)
        if keep := os.environ.get("KEEP_TRACES"):
            shutil.copy(folder / "trace.db", Path(keep) / "healthy.db")
        numbers = outcome(folder / "trace.db")
    report(
        "inference_healthy",
        {"kinds": KINDS, "n_clients": N_CLIENTS, "load_s": round(load_s), "idle_s": words.idle_s, **numbers},
    )
    if numbers["verdicts"] or numbers["incidents"] or numbers["n_requests"] < words.requests:
        raise SystemExit("a healthy server got a verdict, or requests are missing")


def started(kind: str, python: str, folder: Path, stack: contextlib.ExitStack) -> Server:
    folder.mkdir()
    server = Server(kind, "slow_start", python, folder)
    stack.callback(server.process.wait)
    stack.callback(lambda: os.killpg(server.process.pid, signal.SIGKILL))
    return server


def send(server: Server, n: int, *, seed: int) -> None:
    """n requests from N_CLIENTS clients, each with pauses. Most prompts are short, some are up to 3,000 letters.

    A quarter of the responses is not streamed. llama.cpp works 5 ms on 100 letters, so its prompts are shorter.
    """
    longest = 2.2 if server.kind == "llama.cpp" else 3.0

    def client(number: int) -> None:
        chance = random.Random(1000 * seed + number)
        for _ in range(n // N_CLIENTS + (number < n % N_CLIENTS)):
            n_words = int(10 ** chance.uniform(0.5, longest))
            streams = chance.random() < 0.75
            status = request(server, "ab " * n_words, n=chance.randint(2, 24), streams=streams)
            server.refused += status != 200
            time.sleep(chance.uniform(0.0, 0.15))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(N_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def idle(servers: list[Server], seconds: float) -> None:
    """Only the health of the servers is checked."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for server in servers:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("GET", "/health")
                connection.getresponse().read()
        time.sleep(min(HEALTH_EVERY_S, max(end_s - time.monotonic(), 0.0)))


def outcome(db: Path) -> dict[str, object]:
    """The verdicts at the end, the incidents during the trace, and the recorded requests and tokens."""
    answer = explained(db)
    if "error" in answer:
        raise SystemExit(str(answer["error"]))
    with contextlib.closing(sqlite3.connect(db)) as trace:
        rows = trace.execute("SELECT n_tokens FROM requests WHERE method = 'POST'").fetchall()
        incidents = [json.loads(text) for (text,) in trace.execute("SELECT verdict FROM verdicts")]
    return {
        "n_requests": len(rows),
        "n_tokens": sum(n for (n,) in rows),
        "verdicts": answer["verdicts"],
        "incidents": [each["summary"] for each in incidents if each["change"] == "opened"],
    }


if __name__ == "__main__":
    main()
