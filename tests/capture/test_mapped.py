"""The kernel's records of loaded libraries: real processes, real records."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stallscope.capture.probes.discovery import Discovery, Library
from stallscope.capture.probes.mmap_watch import MmapWatch, Records

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

NCCL = "int ncclAllReduce(void *s) { return 0; }\n"
LOADER = "import ctypes, os, sys\nfor line in sys.stdin:\n    exec(line); print('ok', flush=True)\n"
OLD_NS = 10**15


@pytest.fixture
def mapped() -> Iterator[MmapWatch]:
    with MmapWatch() as output:
        yield output


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process that runs commands of the test."""
    with subprocess.Popen([sys.executable, "-c", LOADER], stdin=-1, stdout=-1, text=True) as process:
        does(process, "pass")
        yield process
        process.kill()


@pytest.fixture
def nccl(tmp_path: Path) -> Path:
    path = tmp_path / "libnccl.so.2"
    command = ["gcc", "-shared", "-fPIC", "-o", path, "-xc", "-"]
    subprocess.run(command, input=NCCL, text=True, check=True)
    return path


def does(process: subprocess.Popen[str], line: str) -> str:
    process.stdin.write(line + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if answer != "ok\n":
        assert process.stdout.readline() == "ok\n"
    return answer


def load(path: Path) -> str:
    return f"ctypes.CDLL({str(path)!r})"


def awaited(mapped: MmapWatch, is_there: Callable[[Records], bool]) -> Records:
    """The reported mappings until the expected mapping is among them; other processes report mappings as well."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        mapped.wait(1)
        rows = mapped.take()
        if is_there(rows):
            return rows
    raise AssertionError("not told")


def test_a_library_load_is_recorded(mapped: MmapWatch, child, nccl: Path):
    does(child, load(nccl))
    output = awaited(mapped, lambda output: (child.pid, os.fsencode(nccl)) in output.mappings)
    assert not output.n_lost


def test_a_record_is_returned_without_a_later_event(mapped: MmapWatch, child, nccl: Path):
    does(child, load(nccl))
    assert mapped.wait(20)
    mapped.wait(1)
    assert (child.pid, os.fsencode(nccl)) in mapped.take().mappings


def test_forks_are_recorded_and_threads_are_not(mapped: MmapWatch, child):
    does(child, "import threading; t = threading.Thread(target=print); t.start(); t.join()")
    does(child, "pid = os.fork() or os._exit(0); os.waitpid(pid, 0)")
    output = awaited(mapped, lambda output: any(fork.parent == child.pid for fork in output.forks))
    assert all(fork.pid != fork.parent for fork in output.forks)


def test_lost_mapping_records_are_counted(mapped: MmapWatch, child, nccl: Path):
    does(child, "import _ctypes")
    many = f"[_ctypes.dlclose(_ctypes.dlopen({str(nccl)!r}, 2)) for _ in range(3000)]"
    does(child, many)
    does(child, load(nccl))
    assert mapped.take().n_lost > 0


def found(discovery: Discovery, now_ns: int, built: Path) -> list[Library]:
    return [library for library in discovery.scan(now_ns) if library.name == str(built)]


def test_a_library_loaded_by_an_old_process_is_discovered_at_once(mapped: MmapWatch, child, nccl: Path):
    discovery = Discovery(mapped=mapped)
    assert found(discovery, OLD_NS, nccl) == []
    does(child, load(nccl))
    assert [library.pid for library in found(discovery, OLD_NS + 1, nccl)] == [child.pid]


def test_a_process_that_starts_later_is_discovered_at_once(mapped: MmapWatch, nccl: Path):
    discovery = Discovery(mapped=mapped)
    assert found(discovery, OLD_NS, nccl) == []
    with subprocess.Popen([sys.executable, "-c", LOADER], stdin=-1, stdout=-1, text=True) as late:
        does(late, load(nccl))
        assert [library.pid for library in found(discovery, OLD_NS + 1, nccl)] == [late.pid]
        late.kill()


def test_a_fork_of_a_chosen_process_is_chosen_at_once(mapped: MmapWatch, child, nccl: Path):
    discovery = Discovery(pids=frozenset({child.pid}), mapped=mapped)
    discovery.scan(OLD_NS)
    pid = int(does(child, "r, w = os.pipe(); pid = os.fork() or (os.read(r, 1), os._exit(0)); print(pid)"))
    discovery.scan(OLD_NS + 1)
    assert pid in discovery.in_scope()
    assert os.getpid() not in discovery.in_scope()
    does(child, "os.write(w, b'x'); os.waitpid(pid, 0)")


def test_processes_without_gpu_libraries_trigger_no_scan(mapped: MmapWatch, child):
    discovery = Discovery(mapped=mapped)
    discovery.scan(OLD_NS)
    subprocess.run([sys.executable, "-c", "import sqlite3"], check=True)
    discovery.scan(OLD_NS + 1)
    assert discovery._next_due_ns > OLD_NS + 1


def test_the_periodic_scan_discovers_libraries_without_a_record(child, nccl: Path):
    class Silent:
        def take(self) -> Records:
            return Records([], [], 0)

    discovery = Discovery(mapped=Silent())  # type: ignore[arg-type]
    discovery.scan(OLD_NS)
    does(child, load(nccl))
    assert found(discovery, OLD_NS + 5 * 10**9, nccl) == []
    assert len(found(discovery, OLD_NS + 11 * 10**9, nccl)) == 1
