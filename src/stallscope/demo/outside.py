"""Faults that come from outside the rank: other programs on its CPU, signals, a slow server."""

import itertools
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from stallscope.demo.faults import ANSWER_S
from stallscope.demo.plan import Plan, end_with_parent

STARTS_AFTER_S = 2.0
STOPPED_S = 0.3
RUNNING_S = (0.8, 1.6, 1.1, 1.4)  # in turn: stops at equal intervals would look like every n steps
N_HOGS = 3
TURNS_MS = (4.0, 14.0, 7.0, 17.0, 5.0, 11.0)  # turns of varying length, as of a program that serves requests
OWN_MS = 5.0
TURNS_FILE = "gpu_turns"
MAX_DEVICES = 64  # as in emulated/device.h
HOG_PRIORITY = 8  # programs of equal priority would hardly affect a rank that sleeps most of the time

Interval = tuple[int, int]


def place(plan: Plan, pids: list[int]) -> None:
    """Reserves a CPU for the victim if other programs are to crowd it; no effect for other faults.

    Threads inherit it, so this has to be done before they start. The emulated device does not.
    """
    if plan.fault != "cpu-hog":
        return
    *others, last = sorted(os.sched_getaffinity(0))
    for rank, pid in enumerate(pids):
        os.sched_setaffinity(pid, {last} if rank == plan.victim else set(others) or {last})


@contextmanager
def disturbing(
    plan: Plan, pids: list[int], has_begun: threading.Event, *, turns: Path
) -> Iterator[list[Interval]]:
    """Disturbs the victim from a thread, some time after has_begun is set.

    turns: the file with the current owners of the emulated GPUs. Fills the list that it returns with intervals (begin,
    end; monotonic ns).
    """
    intervals: list[Interval] = []
    disturbs: dict[str, Callable[[int, threading.Event, list[Interval]], None]] = {
        "stop": _stop_and_continue,
        "cpu-hog": _crowd,
        "gpu-steal": lambda _, is_over, intervals: _use_gpu(turns, plan.victim, is_over, intervals=intervals),
    }
    if plan.fault not in disturbs:
        yield intervals
        return
    is_over = threading.Event()

    def disturb() -> None:
        has_begun.wait()
        if not is_over.wait(STARTS_AFTER_S):
            disturbs[plan.fault](pids[plan.victim], is_over, intervals)

    thread = threading.Thread(target=disturb, name=plan.fault)
    thread.start()
    try:
        yield intervals
    finally:
        is_over.set()
        has_begun.set()
        thread.join()


def _stop_and_continue(pid: int, is_over: threading.Event, intervals: list[Interval]) -> None:
    with suppress(ProcessLookupError):
        for running_s in itertools.cycle(RUNNING_S):
            begin_ns = time.monotonic_ns()
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            intervals.append((begin_ns, time.monotonic_ns()))
            if is_over.wait(running_s):
                return


def _helper(*words: str, stdin: int | None = None) -> "subprocess.Popen[bytes]":
    """This file as a program: see main."""
    command = [sys.executable, "-m", "stallscope.demo.outside", *words]
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(command, stdin=stdin, env=os.environ | {"PYTHONPATH": path})


def _end(helper: "subprocess.Popen[bytes]") -> None:
    helper.kill()
    helper.wait()


def _crowd(pid: int, is_over: threading.Event, intervals: list[Interval]) -> None:
    cpus = ",".join(map(str, os.sched_getaffinity(pid)))
    with ExitStack() as stack:
        begin_ns = time.monotonic_ns()
        for _ in range(N_HOGS):
            stack.callback(_end, _helper("hog", cpus))
        is_over.wait()
    intervals.append((begin_ns, time.monotonic_ns()))


def _use_gpu(turns: Path, device: int, is_over: threading.Event, *, intervals: list[Interval]) -> None:
    """Takes an emulated GPU by turns, like another process on that GPU."""
    with turns.open("r+b") as file, mmap.mmap(file.fileno(), 0) as until:
        begin_ns = time.monotonic_ns()
        for turn_ms in itertools.cycle(TURNS_MS):
            end_ns = time.monotonic_ns() + int(turn_ms * 1e6)
            until[device * 8 : device * 8 + 8] = end_ns.to_bytes(8, sys.byteorder)
            if is_over.wait((turn_ms + OWN_MS) / 1e3):
                break
    intervals.append((begin_ns, time.monotonic_ns()))


@contextmanager
def answers(plan: Plan) -> Iterator[int]:
    """The port of a server process that answers late; 0 for faults without a server."""
    if plan.fault != "net":
        yield 0
        return
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.callback(_end, _helper("answer", stdin=listener.fileno()))
        yield listener.getsockname()[1]


def hog(cpus: set[int]) -> None:
    """Computes on these CPUs until it is killed."""
    os.sched_setaffinity(0, cpus)
    with suppress(PermissionError):
        os.nice(-HOG_PRIORITY)
    while True:
        pass


def answer(listener: socket.socket) -> None:
    """Serves one client: a late answer for each byte."""
    connection, _ = listener.accept()
    while connection.recv(1):
        time.sleep(ANSWER_S)
        connection.sendall(b"!")


def main(what: str, *words: str) -> None:
    """`hog CPU,CPU` or `answer`, which listens on the socket that is its stdin; never outlives its parent."""
    end_with_parent()
    if what == "hog":
        hog({int(word) for word in words[0].split(",")})
    else:
        answer(socket.socket(fileno=os.dup(0)))


if __name__ == "__main__":
    main(*sys.argv[1:])
