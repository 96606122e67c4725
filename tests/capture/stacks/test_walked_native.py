"""Native frames of events: each call of a program that announces its code locations."""

import subprocess
import time
from collections import Counter

import numpy as np
import pytest

from stallscope.capture.probes.program import Program
from stallscope.capture.rows.records import of_kind
from stallscope.capture.stacks.sampler import Stacks
from stallscope.events.kernel import Kind
from stallscope.events.layout import UNKNOWN

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

N_CALLS = 6000
INNER, OUTER = ("first", "second", "wide"), ("left", "right")


def chain(i: int) -> list[str]:
    """The functions that the i-th call is made from."""
    return ["at_last", INNER[i % 3], OUTER[i // 3 % 2], *["deeper"] * (1 + i // 6 % 4), "main"]


class Told:
    """The stacks of the calls of a process, captured in the same way as by the agent."""

    def __init__(self, program: Program):
        self.kept: list[tuple[str, ...]] = [()]
        self.said: list[str] = []
        self.numbers: list[int] = []
        self._program = program
        self._stacks = Stacks(
            1, self._keep, self.said.append, program.walk_python, program.peek, program.know_native
        )

    def follow(self, pid: int) -> None:
        self._stacks.follow([pid])

    def take(self, pid: int) -> None:
        events, natives, output = (
            self._program.events.drain(),
            self._program.natives.drain(),
            self._program.stacks.drain(),
        )
        self._program.arrivals.drain()
        self._stacks.take(natives, output)
        calls = of_kind(events, Kind.CALL)
        hashes = calls["stack"][calls["pid"] == pid].astype(np.int64)
        hashes[hashes == 0] = UNKNOWN
        self.numbers += self._stacks.numbers(hashes).tolist()

    def _keep(self, _pid: int, words: tuple[str, ...]) -> int:
        self.kept.append(words)
        return len(self.kept) - 1


def test_every_stack_is_that_of_its_call_or_none(tracing, built):
    program = tracing(slow_call_ns=0)
    output = Told(program)
    with subprocess.Popen([built("paths"), str(N_CALLS)], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"there\n"
        output.follow(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        while process.poll() is None:
            output.take(process.pid)
            time.sleep(0.01)
    output.take(process.pid)
    assert len(output.numbers) == N_CALLS
    n_each: Counter[str] = Counter()
    for i, number in enumerate(output.numbers):
        partitions = (
            [entry.partition("+")[0] for entry in output.kept[number] if "(paths)" in entry]
            if number > 0
            else []
        )
        n_each[
            "none" if not partitions else "right" if partitions[: len(chain(i))] == chain(i) else "wrong"
        ] += 1
    assert n_each["wrong"] == 0
    assert n_each["right"] > N_CALLS // 2
    assert len(set(output.numbers) - {UNKNOWN}) == 24  # kinds of chains
    assert output.said == []


def test_native_frames_precede_python_frames(tracing, puppet):
    program = tracing(slow_call_ns=0)
    output = Told(program)
    output.follow(puppet.pid)
    puppet.does("def call(): lib.cudaStreamSynchronize(0, 0)")
    until = time.monotonic() + 20
    while not any("libffi" in " ".join(words) for words in output.kept):
        puppet.does("call()")
        output.take(puppet.pid)
        assert time.monotonic() < until
    words = next(words for words in output.kept if "libffi" in " ".join(words))
    assert "..." not in words
    assert words[-3] == "<string>:1 call"
    assert "libffi" in words[0]


def test_no_native_frames_are_recorded_for_a_process_that_is_not_followed(tracing, puppet):
    program = tracing(slow_call_ns=0)
    puppet.does("lib.cudaStreamSynchronize(0, 0)")
    assert not len(program.natives.drain())
    assert not of_kind(program.events.drain(), Kind.CALL)["stack"].any()
