"""Python frames read from outside equal py-spy's frames, in every version, for every kind of program."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stallscope.capture.stacks.codes import Codes
from stallscope.capture.stacks.frames import (
    InvalidFrames,
    frames,
    interpreter_lock_holder,
    thread_states,
    threads_of,
)
from stallscope.capture.stacks.interpreter import interpreter_in
from stallscope.capture.stacks.memory import Memory, Unreadable, read_restriction

from ...patience import until
from .interpreters import EACH_VERSION, INTERPRETERS, at_rest, running

Stack = list[tuple[str, str, int | None]]


def by_py_spy(pid: int) -> dict[int, Stack]:
    py_spy = Path(sys.executable).with_name("py-spy")
    if not py_spy.exists() and not shutil.which("py-spy"):
        pytest.skip("py-spy: not installed")
    command = [str(py_spy if py_spy.exists() else "py-spy"), "dump", "--json", "--pid", str(pid)]
    data = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return {
        thread["os_thread_id"]: [(f["filename"], plain(f["name"]), f["line"]) for f in thread["frames"]]
        for thread in data
    }


def by_us(pid: int) -> dict[int, Stack]:
    python, memory = interpreter_in(pid), Memory(pid)
    assert python is not None
    codes = Codes(memory, python)
    result = {}
    for tid, state in thread_states(memory, python, threads_of(pid)).items():
        named = [codes.name_frame(frame) for frame in frames(memory, python, state)]
        result[tid] = [(entry.file, plain(entry.function), entry.line) for entry in named]
    return result


def plain(function: str) -> str:
    """The name without its enclosing scopes: versions and readers differ in these."""
    return function.rpartition(".")[2]


@pytest.mark.parametrize("minor", EACH_VERSION)
def test_frames_are_those_of_py_spy(minor):
    with at_rest(INTERPRETERS[minor], "everywhere.py") as process:
        us = by_us(process.pid)
        assert len(us) == 8
        assert max(map(len, us.values())) > 100
        assert us == by_py_spy(process.pid)


@pytest.mark.parametrize("minor", EACH_VERSION)
def test_the_main_interpreter_is_read_when_there_are_subinterpreters(minor):
    with at_rest(INTERPRETERS[minor], "two_interpreters.py") as process:
        us = by_us(process.pid)
    assert [function for _, function, _ in us[process.pid]] == ["waits", "<module>"]


@pytest.mark.parametrize("minor", EACH_VERSION)
def test_the_holder_of_the_interpreter_lock_is_read_while_it_sleeps(minor):
    with running(INTERPRETERS[minor], "sleeping_holder.py") as process:
        python, memory = interpreter_in(process.pid), Memory(process.pid)
        state_of = thread_states(memory, python, threads_of(process.pid))
        (holder,) = (state for tid, state in state_of.items() if tid != process.pid)
        until(lambda: interpreter_lock_holder(memory, python) == holder)
    with at_rest(INTERPRETERS[minor], "everywhere.py") as process:
        assert interpreter_lock_holder(Memory(process.pid), interpreter_in(process.pid)) == 0


def test_qualified_names_are_reported_if_the_version_has_them():
    with at_rest(INTERPRETERS[11], "everywhere.py") as process:
        python, memory = interpreter_in(process.pid), Memory(process.pid)
        codes = Codes(memory, python)
        functions = [
            codes.name_frame(frame).function
            for state in thread_states(memory, python, threads_of(process.pid)).values()
            for frame in frames(memory, python, state)
        ]
    assert "Loader.__call__.<locals>.<lambda>" in functions
    assert "größe_名前" in functions


def test_a_thread_that_moves_is_refused_or_right():
    allowed = {"even", "odd", "spin", "<module>"}
    n_right = 0
    with running(sys.executable, "moving.py") as process:
        python, memory = interpreter_in(process.pid), Memory(process.pid)
        codes = Codes(memory, python)
        (state,) = thread_states(memory, python, threads_of(process.pid)).values()
        end_s = time.monotonic() + 2
        while time.monotonic() < end_s and n_right < 200:
            try:
                names = [codes.name_frame(frame).function for frame in frames(memory, python, state)]
            except (InvalidFrames, Unreadable):
                continue
            assert set(names) <= allowed
            assert names[-1] == "<module>"
            n_right += 1


def test_a_process_without_python_has_no_interpreter():
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            assert interpreter_in(process.pid) is None
        finally:
            process.kill()


def test_reading_unmapped_memory_raises_unreadable(tmp_path):
    with pytest.raises(Unreadable):
        Memory(2**22 + 1).read(4096, 8)
    with pytest.raises(Unreadable):
        Memory(1).read(0, 8)


@pytest.mark.parametrize(("scope", "says"), [("0", False), ("1", False), ("3", True)])
def test_a_yama_scope_that_forbids_reading_is_reported(tmp_path, scope, says):
    (tmp_path / "ptrace_scope").write_text(f"{scope}\n")
    assert ("ptrace_scope" in read_restriction(tmp_path / "ptrace_scope")) == says


def test_without_yama_memory_reads_are_permitted(tmp_path):
    assert read_restriction(tmp_path / "absent") == ""
