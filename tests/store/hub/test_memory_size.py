"""The memory setting of a hub covers its child processes."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Event

import pyarrow as pa
import pytest

from stallscope.errors import Overloaded
from stallscope.store.hub import memory_size
from stallscope.store.hub.batches import Batch
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.memory_size import ProcessMemory, process_memory, resident_bytes
from stallscope.store.hub.store import HubStore

PAGE = os.sysconf("SC_PAGE_SIZE")
MB = 1_000_000
HOLDS = "import sys; held = b'x' * {n}; print('holds', flush=True); sys.stdin.read()"


@pytest.fixture
def child():
    """A child process that holds 200 MB."""
    words = [sys.executable, "-c", HOLDS.format(n=200 * MB)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.stdin.close()


def test_a_child_counts_until_it_ends(child):
    before = resident_bytes(os.getpid())
    with_child = ProcessMemory().total()
    assert with_child > before / 2 + 200 * MB
    assert resident_bytes(child.pid) > 200 * MB
    child.stdin.close()
    child.wait()
    assert ProcessMemory().total() < with_child - 150 * MB
    assert resident_bytes(child.pid) == 0


def test_pages_of_files_count_once(tmp_path):
    for name, resident, shared in (("self", 100, 40), ("7", 60, 50), ("8", 30, 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "statm").write_text(f"999 {resident} {shared} 1 0 9 0\n")
    task = tmp_path / "self" / "task" / "1"
    task.mkdir(parents=True)
    (task / "children").write_text("7 8 9 ")
    assert ProcessMemory(proc=tmp_path).total() == (60 + 10 + 30 + 50) * PAGE, "9 has ended"


def test_the_sum_is_not_read_again_for_each_request(tmp_path):
    now_s = [0.0]
    (tmp_path / "self").mkdir()
    memory = ProcessMemory(clock_s=lambda: now_s[0], proc=tmp_path)
    assert memory.total() == 0
    (tmp_path / "self" / "statm").write_text("9 5 0 1 0 9 0\n")
    assert memory.total() == 0
    now_s[0] = 1.0
    assert memory.total() == 5 * PAGE


def test_threads_do_not_wait_while_another_thread_returns_memory(tmp_path, monkeypatch):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text("9 5 0 1 0 9 0\n")
    memory, begun, may_end, n_returned = ProcessMemory(proc=tmp_path), Event(), Event(), [0]

    def slow_return() -> None:
        n_returned[0] += 1
        begun.set()
        assert may_end.wait(20)

    monkeypatch.setattr(memory_size, "return_freed_memory", slow_return)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(memory.is_above, 1)
        assert begun.wait(20)
        assert threads.submit(memory.is_above, 1).result(10)
        may_end.set()
        assert first.result(20)
    assert n_returned == [1]


def test_memory_is_returned_during_a_small_part_of_the_time(tmp_path, monkeypatch):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text("9 5 0 1 0 9 0\n")
    now_s, begun_s = [100.0], []
    memory = ProcessMemory(clock_s=lambda: now_s[0], proc=tmp_path)

    def slow_return() -> None:
        begun_s.append(now_s[0])
        now_s[0] += 2.0

    monkeypatch.setattr(memory_size, "return_freed_memory", slow_return)
    while now_s[0] < 200.0:
        memory.return_early(1)
        now_s[0] += 0.5
    assert begun_s == [100.0, 142.0, 184.0]


def test_rows_are_refused_while_a_child_takes_the_memory(tmp_path, child):
    process_memory.cache_clear()
    limits = Limits(max_memory_bytes=resident_bytes(os.getpid()) + 100 * MB)
    batch = Batch("", "t", {"events": pa.table({"ts_ns": [1]})})
    with closing(HubStore.open(tmp_path, limits)) as store:
        with pytest.raises(Overloaded, match="memory limit"):
            store.append(batch)
        child.stdin.close()
        child.wait()
        process_memory.cache_clear()
        assert store.append(batch).result(20).n_rows == 1


@pytest.mark.parametrize(
    "step",
    [
        "return_freed_memory()",
        "assert process_memory().is_above(1)",
        "process_memory().return_early(int(1.1 * process_memory().total()))",
    ],
)
def test_freed_memory_below_used_memory_is_returned_to_the_system(step):
    """In a new process, as the heap of this process has gaps that take the blocks."""
    code = (
        "import os\n"
        "from stallscope.store.hub.memory_size import process_memory, return_freed_memory\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "blocks = [bytearray(b'x') * 50_000 for _ in range(2_000)]\n"
        "del blocks[:-1]\n"
        "before = resident()\n"
        f"{step}\n"
        "print(before - resident())\n"
    )
    n_returned = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert n_returned > 50_000_000


def test_tables_that_another_thread_frees_leave_no_memory_behind():
    """In a new process, as the pool of this process is in use."""
    code = (
        "import os, threading\n"
        "import pyarrow as pa\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from stallscope.store.hub.memory_size import choose_arrow_pool, return_freed_memory\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "choose_arrow_pool()\n"
        "together = threading.Barrier(8)\n"
        "def made(_):\n"
        "    together.wait()\n"
        "    return [pa.nulls(1_000, pa.binary(100)).fill_null(b'x' * 100) for _ in range(200)]\n"
        "with ThreadPoolExecutor(8) as threads:\n"
        "    before, tables = resident(), list(threads.map(made, range(8)))\n"
        "    held = resident() - before\n"
        "    del tables\n"
        "    return_freed_memory()\n"
        "    print(held, resident() - before)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    held, kept = map(int, out.split())
    assert held > 150 * MB > 5 * kept
