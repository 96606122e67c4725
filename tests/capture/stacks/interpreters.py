"""The Python interpreters of this machine, by minor version, and programs running in them."""

import glob
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stallscope.capture.stacks.layouts import VERSIONS

PROGRAMS = Path(__file__).parent / "programs"
_BUILD = Path(__file__).parents[3] / "build"
_PLACES = (
    "~/.pyenv/versions/3.{}.*/bin",
    "~/.local/share/uv/python/cpython-3.{}.*/bin",
    "/opt/python3.{}/bin",
    f"{_BUILD}/python3.{{}}/usr/bin",
)


def _interpreter(minor: int) -> str | None:
    """The path of a Python 3.`minor`; None where there is none."""
    name = f"python3.{minor}"
    indexes = [str(Path(index.format(minor)).expanduser()) for index in _PLACES]
    result = [path for index in indexes for path in sorted(glob.glob(f"{index}/{name}"))]  # noqa: PTH207
    if path := shutil.which(name):
        result.append(path)
    for path in result:
        done = subprocess.run(
            [path, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True
        )
        if done.stdout.strip() == str(minor):  # a shim of a version manager answers for others, or fails
            return path
    return None


INTERPRETERS = {minor: path for minor in VERSIONS if (path := _interpreter(minor))}
"""The interpreters of this machine, including the interpreter that runs the tests."""

EACH_VERSION = [
    pytest.param(
        minor, marks=pytest.mark.skipif(minor not in INTERPRETERS, reason=f"other: no Python 3.{minor}")
    )
    for minor in VERSIONS
]
"""For tests that take a minor version."""


@contextmanager
def running(path: str, program: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A test program in that interpreter, after it has reported that it runs; it ends with the block."""
    command = [path, str(PROGRAMS / program), *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == b"there\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


@contextmanager
def at_rest(path: str, program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A running program all of whose threads wait, so that each reader of their stacks gets the same frames."""
    with running(path, program) as process:
        until, before = time.monotonic() + 60, None
        while (now := _states(process.pid)) != before or any(state != "S" for state, _ in now.values()):
            assert time.monotonic() < until, f"threads do not come to rest: {now}"
            before = now
            time.sleep(0.2)
        yield process


def _states(pid: int) -> dict[str, tuple[str, str]]:
    """State and number of context switches, by thread."""
    result = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text(errors="replace").splitlines()  # names are cut at 15 bytes
        state = next(line for line in lines if line.startswith("State:"))
        result[task.name] = (state.split()[1], str([line for line in lines if "ctxt_switches" in line]))
    return result
