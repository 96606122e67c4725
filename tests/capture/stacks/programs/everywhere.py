"""Threads that sleep in many kinds of locations; prints a line when all of them sleep, then waits for its end."""

import asyncio
import sys
import threading
import time

FOREVER_S = 1000


def deep(n):
    if n > 0:
        return deep(n - 1)
    time.sleep(
        FOREVER_S,
    )
    return None


def outer(n):
    yield from inner(n)


def inner(n):
    for _ in range(n):
        yield [entry + 1 for entry in innermost()]


def innermost():
    yield 1
    time.sleep(FOREVER_S)


class Loader:
    def run(self):
        for batch in outer(3):
            print(batch)

    def __call__(self):
        return (lambda: self.run())()


async def first():
    await second()


async def second():
    time.sleep(FOREVER_S)


def in_a_c_function():
    sorted([3, 2, 1], key=lambda _: time.sleep(FOREVER_S))


def größe_名前():  # noqa: N802
    time.sleep(FOREVER_S)


def many_lines():
    x = [
        1,
        2,
    ]
    try:
        raise ValueError
    except ValueError:
        with threading.Lock():
            x.append(time.sleep(FOREVER_S))


KINDS = (
    lambda: deep(3),
    lambda: deep(100),
    Loader(),
    lambda: asyncio.run(first()),
    in_a_c_function,
    größe_名前,
    many_lines,
)
for kind in KINDS:
    threading.Thread(target=kind, daemon=True).start()
print("there", flush=True)
sys.stdin.readline()
