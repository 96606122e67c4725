"""The code of the faults of the small servers and of vLLM's plugin. Answers are expected to name these functions."""

import fcntl
import hashlib
import mmap
import os
import re
import socket
import threading
import time
from pathlib import Path

WEDGED = threading.Lock()


def burn(seconds: float) -> None:
    """Native computation, without the interpreter lock."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        hashlib.pbkdf2_hmac("sha256", b"weights", b"layer", 500)


def slow_merge(text: str, seconds: float) -> int:
    """Pairs of a tokenizer in pure Python."""
    total, end_s = 0, time.process_time() + seconds
    while time.process_time() < end_s:
        for i in range(2000):
            total += ord(text[i % len(text)])
    return total


def load_adapter(folder: Path) -> None:
    """Reads an adapter past the page cache, from a disk that the control group slows down."""
    file = os.open(folder / "adapter.bin", os.O_RDONLY | os.O_DIRECT)
    try:
        os.preadv(file, [mmap.mmap(-1, 1 << 20)], 0)
    finally:
        os.close(file)


def map_weights(folder: Path) -> int:
    """Reads weights through a mapping of their file: each first use of a page waits for the disk."""
    with (folder / "adapter.bin").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as weights:
            return sum(weights[i] for i in range(0, len(weights), mmap.PAGESIZE))


def look_up(folder: Path) -> bytes:
    """Asks a service, and waits for its answer."""
    with socket.socket(socket.AF_UNIX) as service:
        service.connect(str(folder / "service"))
        service.sendall(b"key")
        return service.recv(100)


def read_shared(folder: Path) -> int:
    """Takes the lock of a file that other programs also lock."""
    with (folder / "adapter.bin").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return len(file.read(100))


def match_badly(seconds: float) -> None:
    """A regular expression that tries all partitions of a text, in C, with the interpreter lock."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        re.match(r"(a+)+$", "a" * 22 + "b")


def flush_slowly(seconds: float) -> None:
    time.sleep(seconds)


def log_line() -> None:
    """More than a pipe holds: the reader of the log is slow."""
    os.write(2, b"x" * 30_000 + b"\n")


def take_wedged() -> None:
    WEDGED.acquire()


def deadlock() -> None:
    WEDGED.acquire(blocking=False)
    take_wedged()


def sum_squares(n: int) -> int:
    return sum(range(n)) + len(list(range(n * 3)))
