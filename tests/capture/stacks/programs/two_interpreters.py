"""Waits in a function of the main interpreter after it has made a second interpreter."""

import sys

try:
    import _interpreters as interpreters
except ImportError:  # before 3.13
    import _xxsubinterpreters as interpreters

another = interpreters.create()


def waits():
    print("there", flush=True)
    sys.stdin.readline()


waits()
