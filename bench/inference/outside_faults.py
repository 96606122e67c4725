"""Faults that come from outside a server: signals, control groups, other programs, disks, clients, services."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from running_server import PATHS, VLLM, Server, normal, request_body

N_HOGS = 3


def repeated(stop: threading.Event, action: Callable[[], None], *, every_s: float = 1.5) -> None:
    while not stop.wait(every_s):
        action()


def pause(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def hogs(pids: list[int], stop: threading.Event, seconds: float) -> None:
    """Pin the server to one of our CPUs, on which a burst of other programs runs from time to time.

    Where the kernel refuses real-time priority, the programs displace a server of normal priority only.
    """
    cpus = os.sched_getaffinity(0)
    cpu = max(cpus)
    pin(pids, {cpu})
    if os.sched_getscheduler(pids[0]) != os.SCHED_RR:
        normal(*pids)
    burn = f"import time\nend=time.monotonic()+{seconds}\nwhile time.monotonic()<end: pass"
    while not stop.wait(1.5):
        words = ["taskset", "-c", str(cpu), sys.executable, "-S", "-c", burn]
        for hog in [subprocess.Popen(words, preexec_fn=before_all) for _ in range(N_HOGS)]:
            hog.wait()
    pin(pids, cpus)


def before_all() -> None:
    """Run this process before the servers."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    except PermissionError:
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def pin(pids: list[int], cpus: set[int]) -> None:
    for thread in (each for pid in pids for each in Path(f"/proc/{pid}/task").glob("*")):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


def drain_slowly(server: Server, stop: threading.Event) -> None:
    """The reader of the server's log takes nothing for half a second, again and again."""
    while not stop.is_set():
        stop.wait(0.6)
        data = os.read(server.process.stderr.fileno(), 1 << 16)
        end_s = time.monotonic() + 0.6
        os.set_blocking(server.process.stderr.fileno(), False)
        while time.monotonic() < end_s:
            with contextlib.suppress(BlockingIOError):
                data = os.read(server.process.stderr.fileno(), 1 << 16)
            time.sleep(0.01)
        os.set_blocking(server.process.stderr.fileno(), True)
    threading.Thread(
        target=lambda: [0 for _ in iter(lambda: os.read(server.process.stderr.fileno(), 1 << 16), b"")],
        daemon=True,
    ).start()
    del data


def read_slowly(server: Server, stop: threading.Event) -> None:
    """A client that takes a part of a large response, then nothing for a while, again and again.

    Its segments have the size of an Ethernet: with the segments of the loopback device, the kernel takes 1 MB from the
    server before the server waits.
    """
    body = request_body(server, "ab cd", n=60, size=100_000)
    n_at_once, pause_s = 1 << 18, 0.5
    if server.kind == "llama.cpp":
        body |= {"n_predict": 1000, "n_probs": 100}
    if server.kind == VLLM:
        body |= {"max_tokens": 3000, "logprobs": 20}
        n_at_once, pause_s = 1 << 16, 2.0
    text, path = json.dumps(body).encode(), PATHS.get(server.kind, "/completion").encode()
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    while not stop.is_set():
        with socket.socket() as connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
            connection.settimeout(5)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(head % (path, len(text)) + text)
            n_bytes, tail = 0, b""
            while not stop.is_set() and not tail.endswith(b"0\r\n\r\n"):
                tail = connection.recv(1 << 16)
                n_bytes += len(tail)
                if n_bytes > n_at_once:
                    n_bytes = 0
                    stop.wait(pause_s)


def answer_slowly(path: Path, stop: threading.Event, seconds: float) -> None:
    """A service on a Unix socket that takes this time for each answer."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(64)
        listening.settimeout(0.2)
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                connection = listening.accept()[0]
                threading.Thread(target=answer_one, args=(connection, seconds), daemon=True).start()


def answer_one(connection: socket.socket, seconds: float) -> None:
    with connection, contextlib.suppress(OSError):
        connection.recv(100)
        time.sleep(seconds)
        connection.sendall(b"value")


def hold_lock(path: Path, stop: threading.Event, seconds: float) -> None:
    """Another program that holds a lock on a file for this time, again and again."""
    while not stop.wait(0.2):
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            stop.wait(seconds)
