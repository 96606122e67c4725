"""The requested probes, and the messages where attaching fails. The attach itself is a list."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stallscope.capture.probes.attaching import Attacher, probe_offsets
from stallscope.capture.probes.discovery import Discovery
from stallscope.capture.probes.elf import Entry, Symbol
from stallscope.capture.probes.libbpf import KernelRefused
from stallscope.capture.probes.operations import Hook

pytestmark = pytest.mark.compiler


def assembled(path: Path, code: dict[str, str]) -> Path:
    """A library whose functions start with given instructions."""
    lines = (f'asm(".globl {n}; .type {n}, @function; {n}: {text}; ret");' for n, text in code.items())
    command = ["gcc", "-shared", "-o", str(path), "-xc", "-"]
    subprocess.run(command, input="\n".join(lines), text=True, check=True)
    return path


@contextmanager
def loaded(path: Path) -> Iterator[int]:
    """A process that has the library loaded: its number."""
    code = f"import ctypes; ctypes.CDLL({str(path)!r}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as child:
        child.stdout.readline()
        yield child.pid
        child.kill()


class Attached(list):
    """Replaces the kernel: keeps the requested probes, with the first byte at each offset."""

    n_closed = 0

    def __call__(self, path: str, hooks: list[Hook]) -> "Attached":
        data = Path(path).read_bytes()
        self.append({hook.symbol: data[hook.offset] for hook in hooks})
        return self

    def close(self) -> None:
        self.n_closed += 1


x86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 instructions")


@x86_64
def test_the_functions_that_exist_are_attached_to_past_their_endbr(tmp_path):
    code = {"ncclAllReduce": "endbr64; push %rbx; pop %rbx", "cudaMalloc": "push %rbp; pop %rbp"}
    with loaded(assembled(tmp_path / "libnccl.so.2", code)) as pid:
        attached = Attached()
        notes = Attacher(Discovery(pids=frozenset({pid})), attached).attach_new(0)
    assert attached == [{"ncclAllReduce": 0x53, "cudaMalloc": 0x55}]
    assert notes == [f"attached to 2 functions of {tmp_path}/libnccl.so.2"]


@x86_64
def test_few_probes_are_attached_when_detaching_is_slow(tmp_path):
    code = dict.fromkeys(("cudaMalloc", "cudaMallocArray", "cudaStreamCreate"), "push %rbp; pop %rbp")
    with loaded(assembled(tmp_path / "libcudart.so.12", code)) as pid:
        attached = Attached()
        notes = Attacher(Discovery(pids=frozenset({pid})), attached, essential_only=True).attach_new(0)
    assert attached == [{"cudaMalloc": 0x55}]
    assert notes == [f"attached to 1 functions of {tmp_path}/libcudart.so.12"]


@x86_64
def test_functions_with_expensive_first_instructions_are_reported(tmp_path):
    code = {"ncclAllReduce": "sub $8, %rsp; add $8, %rsp", "cudaMalloc": "push %rbp; pop %rbp"}
    with loaded(assembled(tmp_path / "libnccl.so.2", code)) as pid:
        notes = Attacher(Discovery(pids=frozenset({pid})), Attached()).attach_new(0)
    assert any(note.startswith("1 functions of") and "5 us" in note for note in notes)


@x86_64
def test_a_library_without_traced_functions_is_reported(tmp_path):
    with loaded(assembled(tmp_path / "libcuda.so.1", {"cuOther": "nop"})) as pid:
        attached = Attached()
        (note,) = Attacher(Discovery(pids=frozenset({pid})), attached).attach_new(0)
    assert attached == []
    assert "none of the functions" in note


@x86_64
def test_a_refused_attach_is_reported_once(tmp_path):
    def refuse(path: str, hooks: list[Hook]) -> None:
        raise KernelRefused("cannot attach: Invalid argument", 22)

    with loaded(assembled(tmp_path / "libnccl.so.2", {"cudaFree": "push %rbp; pop %rbp"})) as pid:
        attaching = Attacher(Discovery(pids=frozenset({pid})), refuse)
        (note,) = attaching.attach_new(0)
        assert "libnccl.so.2 are not traced: cannot attach: Invalid argument" in note
        assert attaching.attach_new(10**10) == []


@x86_64
def test_a_file_is_retried_with_the_next_process_if_the_first_one_ended(tmp_path):
    """The first process ends between being found and being attached to."""
    path = assembled(tmp_path / "libnccl.so.2", {"cudaFree": "push %rbp; pop %rbp"})
    attached = Attached()

    def gone(path: str, hooks: list[Hook]) -> None:
        os.kill(first, 9)
        os.waitid(os.P_PID, first, os.WEXITED)
        raise KernelRefused("cannot attach: No such file or directory", 2)

    discovery = Discovery(pids=frozenset({os.getpid()}))
    with loaded(path) as first:
        assert Attacher(discovery, gone).attach_new(0) == []
    with loaded(path):
        Attacher(discovery, attached).attach_new(10**9)
    assert attached == [{"cudaFree": 0x55}]


@x86_64
def test_an_unused_file_is_detached_and_attached_again_on_reuse(tmp_path):
    """Probes hold a deleted library on the disk; ten minutes without a process are enough."""
    path = assembled(tmp_path / "libnccl.so.2", {"cudaFree": "push %rbp; pop %rbp"})
    attached, second, minute = Attached(), 10**9, 60 * 10**9
    attaching = Attacher(Discovery(pids=frozenset({os.getpid()})), attached)
    with loaded(path):
        attaching.attach_new(0)
        attaching.attach_new(20 * minute)
        assert attaching.drop_unused(20 * minute) == 0
    attaching.attach_new(20 * minute + 11 * second)
    assert attaching.drop_unused(29 * minute) == 0
    assert attaching.drop_unused(31 * minute) == 1
    assert attached.n_closed == 1
    with loaded(path):
        attaching.attach_new(32 * minute)
    assert len(attached) == 2


def test_probes_skip_an_initial_endbr_instruction():
    result = {"a": Symbol(100, 50), "b": Symbol(200, 60), "c": Symbol(300, 70)}
    entries = {"a": Entry.EMULATED, "b": Entry.AFTER_ENDBR, "c": Entry.STEPPED}
    assert probe_offsets(result, entries) == {"a": 100, "b": 204, "c": 300}
