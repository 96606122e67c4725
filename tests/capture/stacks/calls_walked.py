"""Walks every call of programs/calling.py in the kernel, and reports for each whether its frames are right."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stallscope.capture.probes.program import Program
from stallscope.capture.rows.records import of_kind
from stallscope.capture.stacks.codes import Codes
from stallscope.capture.stacks.interpreter import interpreter_in
from stallscope.capture.stacks.memory import Memory
from stallscope.capture.stacks.walker_abi import python_row, words
from stallscope.events.kernel import Kind

from .interpreters import PROGRAMS, running

_SOURCE = (PROGRAMS / "calling.py").read_text().splitlines()
_CHAINS = ("left", "right", "generated", "by_a_c_function", "forward")


def line(text: str, after: str = "") -> int:
    """The number of the first line with this text after the line with the other text."""
    start = next(i for i, entry in enumerate(_SOURCE) if after in entry) if after else 0
    return next(i for i, entry in enumerate(_SOURCE, 1) if i > start and text in entry)


def chain(i: int, *, minor: int) -> list[str]:
    """The frames of the i-th call, innermost first, as "line function"."""
    depth, kind = i % 31, _CHAINS[i % 5]
    first = "right" if kind in ("right", "forward") else "left"
    names = [first if at % 2 == 0 else "right" if first == "left" else "left" for at in range(depth + 1)]
    result = [f"{line('return call(', f'def {names[-1]}(')} {names[-1]}"]
    result += [f"{line('(n - 1)', f'def {name}(')} {name}" for name in reversed(names[:-1])]
    if kind == "generated":
        result += [f"{line('yield left')} values", f"{line('[*values')} generated"]
    if kind == "by_a_c_function":
        result += [f"{line('key=left')} by_a_c_function"]
    if kind == "forward":
        result += [f"{line('lambda: right')} <lambda>", f"{line('lambda: right')} forward"]
    return [*result, f"{line('CHAINS[i % 5]')} <module>"]


def plain(frame: str) -> str:
    """ "line function" of a frame in words, without folders and outer names."""
    index, _, function = frame.rpartition(" ")
    return f"{index.rpartition(':')[2]} {function.rpartition('.')[2]}"


def walked(program: Program, python: str, library: Path, n_calls: int) -> Counter[str]:
    """The number of calls with right frames, with wrong frames, and without frames."""
    with running(python, "calling.py", str(library), str(n_calls)) as process:
        interpreter, memory = interpreter_in(process.pid), Memory(process.pid)
        assert interpreter is not None
        assert process.stdin is not None
        codes = Codes(memory, interpreter)
        program.walk_python(process.pid, python_row(interpreter)[0])
        process.stdin.write(b"\n")
        process.stdin.flush()
        known: dict[int, list[str]] = {}
        n_each: Counter[str] = Counter()
        i = 0
        for hashes, output in _batches(program, process.pid, n_calls):
            for row in output:
                known[int(row["hash"])] = [plain(word) for word in words(row, codes, interpreter.layout)]
            for word in hashes:
                stack = known.get(word)
                right = stack == chain(i, minor=interpreter.layout.minor)
                n_each["none" if stack is None else "right" if right else "wrong"] += 1
                i += 1
        return n_each


def _batches(program: Program, pid: int, n_calls: int) -> Iterator[tuple[list[int], np.ndarray]]:
    """Hashes of the calls in order, and the stacks with these hashes; waits for all calls."""
    n, until = 0, time.monotonic() + 120
    while n < n_calls and time.monotonic() < until:
        events = of_kind(program.events.drain(), Kind.CALL)
        output = program.stacks.drain()
        hashes = events["stack"][events["pid"] == pid].tolist()
        n += len(hashes)
        yield hashes, output[output["pid"] == pid]
        program.arrivals.drain()
        time.sleep(0.005)
