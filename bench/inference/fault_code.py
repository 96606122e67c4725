"""The code of the faults of the small servers and of vLLM's plugin. Answers are expected to name these functions."""

import hashlib
import mmap
import os
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
