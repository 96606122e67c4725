"""Cost of a token of an inference server: tokens per second with and without recording, in alternating windows.

    python bench/bench_token_cost.py ENVIRONMENT [WINDOWS]

ENVIRONMENT: the Python with xllamacpp and gguf. llama.cpp answers four clients without a pause. The programs are
attached in every second window. Server and clients run before other programs of the machine. Needs root.
"""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from prove_serving import PATHS, wait_for
from report import FOLDER, report

sys.path.insert(0, str(Path(__file__).parent / "inference"))
from running_server import free_port, normal_priority, real_time

from stallscope.capture.probes.optional_programs import SERVING
from stallscope.capture.probes.program import Options, Program

N_CLIENTS, WINDOW_S, SETTLE_S = 4, 1.0, 0.1
BODY = json.dumps({"prompt": "ab cd ef", "n_predict": 200, "stream": True, "cache_prompt": False})


def main() -> None:
    """Measure and report."""
    python, n_windows = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60
    port = free_port()
    words = [python, FOLDER / "targets/streaming_server.py", "llama.cpp", str(port)]
    server = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=normal_priority
    )
    try:
        wait_for(port)
        with Program.load(Options()) as program:
            program.record_requests([server.pid])
            real_time(server.pid, os.getpid())
            counts = np.zeros(N_CLIENTS, np.int64)
            for i in range(N_CLIENTS):
                threading.Thread(target=client, args=(port, counts, i), daemon=True).start()
            time.sleep(2)
            on, off = windows(program, counts, n_windows)
            cost_ns = ns_per_token(program, counts)
    finally:
        server.kill()
        server.wait()
    ratio = np.array(on) / np.array(off) - 1
    report(
        "token_cost",
        {
            "n_windows": n_windows,
            "window_s": WINDOW_S,
            "tokens_per_s_recorded": round(float(np.median(on)) / WINDOW_S),
            "tokens_per_s_unrecorded": round(float(np.median(off)) / WINDOW_S),
            "change_of_rate": round(float(np.median(ratio)), 4),
            "change_error": round(float(1.25 * ratio.std() / len(ratio) ** 0.5), 4),
            "ns_per_token": cost_ns,
        },
    )


def client(port: int, counts: np.ndarray, i: int) -> None:
    """One request after the other until the server ends; counts the tokens."""
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            one_request(port, counts, i)


def one_request(port: int, counts: np.ndarray, i: int) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", PATHS["llama.cpp"], BODY, {"Content-Type": "application/json"})
        response = connection.getresponse()
        while line := response.readline():
            counts[i] += line.startswith(b"data: ")


def windows(program: Program, counts: np.ndarray, n: int) -> tuple[list[int], list[int]]:
    """Tokens in windows with and without the programs."""
    on: list[int] = []
    off: list[int] = []
    for i in range(n):
        is_on = i % 2 == 0
        program.switch_requests(is_on=is_on)
        time.sleep(SETTLE_S)
        before, begin_ns = counts.sum(), time.monotonic_ns()
        time.sleep(WINDOW_S)
        seconds = (time.monotonic_ns() - begin_ns) / 1e9
        (on if is_on else off).append(int((counts.sum() - before) / seconds * WINDOW_S))
        program.requests.drain()
        program.tokens.drain()
    return on, off


def ns_per_token(program: Program, counts: np.ndarray) -> int:
    """The time of the programs for a token, also of their runs in the clients; in a window of its own."""
    program.switch_requests(is_on=True)
    program.measure()
    time.sleep(SETTLE_S)
    n_before, before = int(counts.sum()), program.costs()
    time.sleep(5 * WINDOW_S)
    n_tokens, after = int(counts.sum()) - n_before, program.costs()
    return sum(after[name].run_ns - before[name].run_ns for name in SERVING) // max(n_tokens, 1)


if __name__ == "__main__":
    main()
