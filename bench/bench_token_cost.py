"""Cost of a token of an inference server, with and without recording in alternating windows.

    python bench/bench_token_cost.py ENVIRONMENT [WINDOWS]

ENVIRONMENT: the Python with xllamacpp and gguf. llama.cpp answers four clients without a pause. The programs are
attached in two of four windows (on, off, off, on), so that a steady drift cancels out. Two quantities are compared: the
tokens per second, and the CPU time of server and clients per token, which other programs of the machine change less.
The third quantity is the time of the programs, which the kernel counts, as a share of the CPU time per token: the loss
of a server that is limited by the CPU. Server and clients run before other programs of the machine. Needs root.
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

N_CLIENTS, WINDOW_S, SETTLE_S = 4, 0.5, 0.05
BODY = json.dumps({"prompt": "ab cd ef", "n_predict": 200, "stream": True, "cache_prompt": False})


def main() -> None:
    """Measure and report."""
    python, n_windows = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 400
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
            on, off = windows(program, counts, n_windows, (server.pid, os.getpid()))
            cost_ns = ns_per_token(program, counts)
    finally:
        server.kill()
        server.wait()
    rate, cpu = (change(on[:, i], off[:, i]) for i in range(2))
    report(
        "token_cost",
        {
            "n_windows": n_windows,
            "window_s": WINDOW_S,
            "tokens_per_s_recorded": round(float(np.median(on[:, 0]))),
            "tokens_per_s_unrecorded": round(float(np.median(off[:, 0]))),
            "change_of_rate": rate[0],
            "change_error": rate[1],
            "cpu_ns_per_token_recorded": round(float(np.median(on[:, 1]))),
            "cpu_ns_per_token_unrecorded": round(float(np.median(off[:, 1]))),
            "change_of_cpu_time": cpu[0],
            "change_of_cpu_time_error": cpu[1],
            "ns_per_token": cost_ns,
            "share_of_cpu_time": round(cost_ns / float(np.median(off[:, 1])), 5),
        },
    )


def change(on: np.ndarray, off: np.ndarray) -> tuple[float, float]:
    """The relative change by recording, and its standard error: median of the groups of four windows."""
    ratio = on.reshape(-1, 2).mean(axis=1) / off.reshape(-1, 2).mean(axis=1) - 1
    deviation = 1.4826 * np.median(np.abs(ratio - np.median(ratio)))
    return round(float(np.median(ratio)), 5), round(float(1.25 * deviation / len(ratio) ** 0.5), 5)


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


def windows(
    program: Program, counts: np.ndarray, n: int, pids: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens per second, and CPU time per token in ns: (n / 2, 2) with the programs, and without them."""
    on: list[tuple[float, float]] = []
    off: list[tuple[float, float]] = []
    for i in range(n - n % 4):
        is_on = i % 4 in (0, 3)
        program.switch_requests(is_on=is_on)
        time.sleep(SETTLE_S)
        before, begin_ns, begin_cpu_ns = int(counts.sum()), time.monotonic_ns(), cpu_ns(pids)
        time.sleep(WINDOW_S)
        tokens, used_ns = int(counts.sum()) - before, cpu_ns(pids) - begin_cpu_ns
        seconds = (time.monotonic_ns() - begin_ns) / 1e9
        (on if is_on else off).append((tokens / seconds, used_ns / tokens))
        program.requests.drain()
        program.tokens.drain()
    return np.array(on), np.array(off)


def cpu_ns(pids: tuple[int, ...]) -> int:
    """The CPU time of the threads of processes."""
    files = (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files)


def ns_per_token(program: Program, counts: np.ndarray) -> int:
    """The time of the programs for a token, also of their runs in the clients; in a window of its own."""
    program.switch_requests(is_on=True)
    program.measure()
    time.sleep(SETTLE_S)
    n_before, before = int(counts.sum()), program.costs()
    time.sleep(10 * WINDOW_S)
    n_tokens, after = int(counts.sum()) - n_before, program.costs()
    return sum(after[name].run_ns - before[name].run_ns for name in SERVING) // max(n_tokens, 1)


if __name__ == "__main__":
    main()
