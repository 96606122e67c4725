"""Code locations of threads that hang: below probed calls, with and without permission to read memory."""

import errno
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from stallscope.capture.probes.program import Program
from stallscope.capture.stacks.memory import Memory
from stallscope.capture.stacks.native import stopped_thread
from stallscope.capture.stacks.sampler import Stacks

from ...patience import until

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

SYNC = "lib.cudaStreamSynchronize(20000000, 0)"
NANOSLEEP = 230


def waits(program: Program, pid: int) -> None:
    """Returns once the main thread is in that call."""
    until(
        lambda: (thread := stopped_thread(program.peek, pid)) is not None and thread.syscall_nr == NANOSLEEP
    )


def now(program: Program, pid: int) -> tuple[tuple[str, ...], list[str]]:
    """The stack of the main thread as text, and the notes for the user."""
    kept: list[tuple[str, ...]] = []
    message: list[str] = []

    def keep(_pid: int, words: tuple[str, ...]) -> int:
        kept.append(words)
        return len(kept)

    stacks = Stacks(1, keep, message.append, program.walk_python, program.peek)
    result = stacks.current_stacks(pid, [pid])
    return kept[result[pid] - 1] if result else (), message


def test_native_frames_lead_through_a_hooked_call_to_the_python_line(tracing, puppet):
    program = tracing()
    puppet.tell(SYNC)
    waits(program, puppet.pid)
    result, message = now(program, puppet.pid)
    functions = [entry.partition("+")[0] for entry in result if "libnccl" in entry]
    assert functions == ["spend", "cudaStreamSynchronize"]
    assert "_ctypes" in " ".join(result)
    assert "..." not in result
    assert result[-2:] == ("<string>:1 <module>", "<string>:9 <module>")
    assert message == []


def test_a_spinning_thread_has_a_stack_up_to_the_probed_function(tracing, puppet):
    program = tracing()
    puppet.tell("lib.cudaStreamSynchronize(0, 20000000)")
    until = time.monotonic() + 15
    result: tuple[str, ...] = ()
    while not any(entry.startswith("cudaStreamSynchronize") for entry in result):
        result, _ = now(program, puppet.pid)
        assert time.monotonic() < until
    if "..." in result:  # not where it had just lost its CPU: then it is walked as one that waits
        assert result[result.index("...") - 1].startswith("cudaStreamSynchronize")
    assert [entry.partition("+")[0] for entry in result if "libnccl" in entry][-1] == "cudaStreamSynchronize"
    assert result[-2:] == ("<string>:1 <module>", "<string>:9 <module>")


def test_the_kernel_reads_memory_when_user_space_may_not(tracing, puppet, monkeypatch: pytest.MonkeyPatch):
    program = tracing()
    puppet.tell(SYNC)
    waits(program, puppet.pid)
    usual, _ = now(program, puppet.pid)
    monkeypatch.setattr(Memory, "_by_system_call", forbidden)
    result, message = now(program, puppet.pid)
    assert result == usual
    assert message == []


def test_the_reason_for_missing_stacks_is_reported_when_no_read_works(
    tracing: Callable[..., Program], puppet, monkeypatch: pytest.MonkeyPatch
):
    program = tracing()
    monkeypatch.setattr(Memory, "_by_system_call", forbidden)
    monkeypatch.setattr(program, "peek", lambda *_: b"")
    result, message = now(program, puppet.pid)
    assert result == ()
    assert len(message) == 1
    assert f"no stacks of process {puppet.pid}" in message[0]


def forbidden(*_: object) -> tuple[int, bytes]:
    """As the system call answers under ptrace_scope 3, and without CAP_SYS_PTRACE."""
    return errno.EPERM, b""


_READS = """
import sys
from stallscope.capture.probes.program import Program
from stallscope.capture.stacks.memory import Memory, Unreadable
pid, address = int(sys.argv[1]), int(sys.argv[2])
with Program.load() as program:
    try:
        print(Memory(pid).read(address, 5000)[:4])
    except Unreadable:
        print("unreadable")
    print(Memory(pid, program.peek).read(address, 50000)[4000:4004])
    try:
        Memory(pid, program.peek).read(8192, 16)
    except Unreadable:
        print("not there")
"""


@pytest.mark.skipif(not shutil.which("setpriv"), reason="other: no setpriv")
def test_without_the_capability_to_trace_memory_is_still_read(bpf_object, puppet):
    puppet.does("room = ctypes.create_string_buffer(b'x' * 4000 + b'here' + b'y' * 46000)")
    puppet.tell("print(ctypes.addressof(room))")
    assert puppet.process.stdout is not None
    address = puppet.process.stdout.readline().strip()
    without = [f"--{each}=-sys_ptrace" for each in ("inh-caps", "bounding-set")]
    command = ["setpriv", *without, sys.executable, "-P", "-c", _READS, str(puppet.pid), address]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["unreadable", "b'here'", "not there", ""]
