"""Times of requests to real servers: the client's own times against the recorded times, and the cost of a token.

    python bench/prove_serving.py ENVIRONMENT [asyncio|threads|llama.cpp ...]

ENVIRONMENT: the Python with the packages of the servers. The client runs with real-time priority, so that its times do
not include waits for the CPU. After subtracting the median offset, at least 99 % of the times to the first token and of
the times between tokens must agree within 2 ms.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from report import FOLDER, report

from stallscope.capture.probes.optional_programs import SERVING
from stallscope.capture.probes.program import Options, Program
from stallscope.events.layout import Array

N_REQUESTS = 100
WITHIN_NS = 2_000_000
PATHS = {"llama.cpp": "/completion"}
KINDS = ("asyncio", "threads", "llama.cpp")
BODY = json.dumps({"prompt": "ab cd ef", "n_predict": 24, "stream": True, "cache_prompt": False})


def main() -> None:
    """Measure and report. Exits with 1 below 99 %."""
    python, kinds = sys.argv[1], sys.argv[2:] or KINDS
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    results = {kind: measured(python, kind) for kind in kinds}
    report("serving", {"engines": results, "n_requests": N_REQUESTS, "within_ms": WITHIN_NS / 1e6})
    if any(min(each["first_within"], each["between_within"]) < 0.99 for each in results.values()):
        raise SystemExit("less than 99 % of the times agree within 2 ms")


def measured(python: str, kind: str) -> dict[str, object]:
    """Agreement of the times, and cost of a token, on one server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [python, FOLDER / "targets/streaming_server.py", kind, str(port)], preexec_fn=normal_priority
    )
    try:
        wait_for(port)
        with Program.load(Options()) as program:
            program.record_requests([server.pid])
            program.measure()
            times = [one_request(port, PATHS.get(kind, "/v1/completions")) for _ in range(N_REQUESTS)]
            time.sleep(0.1)
            requests, tokens = program.requests.drain(), program.tokens.drain()
            costs = {name: cost for name, cost in program.costs().items() if name in SERVING}
    finally:
        server.kill()
        server.wait()
    n_tokens = sum(map(len, times))
    return compared(times, requests, tokens) | {
        "ns_per_token": round(sum(cost.run_ns for cost in costs.values()) / n_tokens),
        "ns_per_run": {name: round(cost.run_ns / max(cost.n_runs, 1)) for name, cost in costs.items()},
    }


def normal_priority() -> None:
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def wait_for(port: int) -> None:
    end_s = time.monotonic() + 120
    while time.monotonic() < end_s:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            time.sleep(1)  # a model may still be loading
            return
    raise SystemExit(f"no server listens on port {port}")


def one_request(port: int, path: str) -> list[int]:
    """The time until each token, in ns since the request was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    begin_ns = time.monotonic_ns()
    connection.request("POST", path, BODY, {"Content-Type": "application/json"})
    response = connection.getresponse()
    times = []
    while line := response.readline():
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            times.append(time.monotonic_ns() - begin_ns)
    connection.close()
    return times


def compared(times: list[list[int]], requests: Array, tokens: Array) -> dict[str, object]:
    """Share of the client's times that the recorded times match."""
    requests = requests[requests["n_tokens"] > 0]
    assert len(requests) == len(times), f"{len(requests)} of {len(times)} requests were recorded"
    n_tokens = [len(each) for each in times]
    same = [n == m for n, m in zip(n_tokens, requests["n_tokens"].tolist(), strict=True)]
    first_ns = requests["first_ns"] - requests["ts_ns"] - np.array([each[0] for each in times])
    between_ns = []
    for row, each, is_same in zip(requests, times, same, strict=True):
        own = tokens[(tokens["ts_ns"] > row["first_ns"]) & (tokens["ts_ns"] <= row["last_ns"])]
        if is_same:
            between_ns.append(own["gap_ns"] - np.diff(each))
    gaps_ns = np.concatenate(between_ns)
    return {
        "n_tokens": sum(n_tokens),
        "requests_with_all_tokens": sum(same),
        "first_offset_ms": round(float(np.median(first_ns)) / 1e6, 3),
        "first_within": within(first_ns),
        "between_within": within(gaps_ns),
        "between_error_ms_p99": round(float(np.percentile(np.abs(gaps_ns), 99)) / 1e6, 3),
    }


def within(errors_ns: Array) -> float:
    return round(float((np.abs(errors_ns - np.median(errors_ns)) <= WITHIN_NS).mean()), 4)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
