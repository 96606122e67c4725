"""Calls a traced function from a known place: the i-th call from a chain of functions that follows from i.

Other threads run all the while. Usage: calling.py LIBRARY CALLS
"""

import ctypes
import sys
import threading

try:
    import _interpreters as interpreters
except ImportError:  # before 3.13
    import _xxsubinterpreters as interpreters

call = ctypes.CDLL(sys.argv[1]).cudaStreamSynchronize
n_calls = int(sys.argv[2])


def left(n):
    if n:
        return right(n - 1)
    return call(0, 0)


def right(n):
    if n:
        return left(n - 1)
    return call(0, 0)


def values(n):
    yield left(n)


def generated(n):
    return [*values(n)]


def by_a_c_function(n):
    return sorted([n], key=left)


class Model:
    def forward(self, n):
        return (lambda: right(n))()


CHAINS = (left, right, generated, by_a_c_function, Model().forward)


def busy():
    while True:
        sum(entry * entry for entry in range(1000))


another = interpreters.create()  # it is the first that one finds then; the threads belong to the other
for _ in range(2):
    threading.Thread(target=busy, daemon=True).start()
sys.setswitchinterval(0.0005)
print("there", flush=True)
sys.stdin.readline()
for i in range(n_calls):
    CHAINS[i % 5](i % 31)
print("done", flush=True)
sys.stdin.readline()
