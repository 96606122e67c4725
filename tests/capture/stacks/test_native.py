"""Native frames read from outside: of programs that announce where they wait, and compared with gdb."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stallscope.capture.probes.program import Options, Program
from stallscope.capture.stacks.code_map import Files, MappedCode
from stallscope.capture.stacks.native import Calls, StoppedThread, is_still, stopped_thread, unwind
from stallscope.capture.stacks.sampling import sample_thread

from ...patience import until
from .interpreters import EACH_VERSION, INTERPRETERS, PROGRAMS, at_rest, running

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

FLAGS = {
    "without frame pointers": ("-O2", "-fomit-frame-pointer"),
    "with frame pointers": ("-O2", "-fno-omit-frame-pointer"),
    "not optimised": ("-O0",),
    "another place": ("-O1", "-no-pie", "-Wl,-z,noseparate-code"),
}
WRITE = 1
INNER = ["innermost", "with_alloca", "with_many_registers", "large"]


@pytest.fixture(scope="module")
def program(bpf_object: Path) -> Iterator[Program]:
    """The kernel side, with no function hooked."""
    with Program.load(Options()) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """compiled(*flags): programs/chain.c."""
    folder = tmp_path_factory.mktemp("chain")

    def build(*flags: str) -> Path:
        path = folder / re.sub(r"\W", "", "".join(flags))
        if not path.exists():
            source = PROGRAMS / "chain.c"
            subprocess.run(["gcc", "-g0", "-fno-inline", *flags, "-pthread", "-o", path, source], check=True)
        return path

    return build


@contextmanager
def waiting(path: Path, *words: str) -> Iterator[int]:
    """The program, after it has reported that it waits."""
    with subprocess.Popen([path, *words], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"there\n"
            yield process.pid
        finally:
            process.kill()


def tids(pid: int) -> list[int]:
    return sorted(int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir())


def waits_in(program: Program, pid: int, tid: int) -> tuple[MappedCode, Calls]:
    """The calls of a thread, once it waits."""
    code = MappedCode(pid, Files())
    code.refresh()
    end_s = time.monotonic() + 20
    while True:
        thread = stopped_thread(program.peek, tid)
        if thread and thread.syscall_nr not in (-1, WRITE):
            calls = unwind(code, thread)
            if is_still(program.peek, tid, thread):
                return code, calls
        assert time.monotonic() < end_s, thread
        time.sleep(0.01)


def names(program: Program, pid: int, tid: int) -> list[str]:
    """The functions that a thread is in, innermost first, once it waits; "..." at the end of a cut stack."""
    code, calls = waits_in(program, pid, tid)
    return [plain(code.name(address)) for address in calls.addresses] + ["..."] * calls.is_cut


def plain(name: str) -> str:
    """Without the offset; "?" where the file has no name."""
    return "?" if name.startswith("0x") else name.partition("+")[0]


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_frames_are_those_that_the_program_is_in(program, compiled, flags):
    with waiting(compiled(*flags)) as pid:
        result = names(program, pid, pid)
    expected = [*INNER, "hidden", "again", "again", "again", "again", "main"]
    assert result[: 1 + len(expected)] == ["pause", *expected]
    assert result[-1] == "_start"


def test_the_stack_of_a_second_thread_ends_at_its_start_function(program, compiled):
    with waiting(compiled(*FLAGS["without frame pointers"]), "thread") as pid:
        result = names(program, pid, tids(pid)[1])
    assert result[:10] == ["pause", *INNER, "hidden", "again", "again", "again", "thread"]
    assert result[10:] == ["?", "?"]  # start_thread and clone3, which libc does not export


def test_a_stripped_program_gives_places_without_names(program, compiled, tmp_path):
    path = tmp_path / "stripped"
    shutil.copy(compiled(*FLAGS["without frame pointers"]), path)
    subprocess.run(["strip", path], check=True)
    with waiting(path) as pid:
        result = names(program, pid, pid)
    assert result[:10] == ["pause", *["?"] * 9]


def test_a_deleted_file_is_still_read(program, compiled, tmp_path):
    path = tmp_path / "deleted"
    shutil.copy(compiled(*FLAGS["without frame pointers"]), path)
    with waiting(path) as pid:
        path.unlink()
        path.write_text("another file by now")
        assert names(program, pid, pid)[1:5] == INNER


def test_a_stack_ends_at_a_frame_without_unwind_rules(program, compiled):
    with waiting(compiled(*FLAGS["without frame pointers"], "-fno-asynchronous-unwind-tables")) as pid:
        result = names(program, pid, pid)
    assert result == ["pause", "innermost", "..."]


def test_the_stack_in_a_signal_handler_is_correct_up_to_the_signal_frame(program, compiled):
    with waiting(compiled(*FLAGS["without frame pointers"]), "signal") as pid:
        result = names(program, pid, pid)
    assert result == ["pause", *INNER, "hidden", "again", "handler", "?", "..."]


def preempted_thread(program: Program, pid: int) -> StoppedThread | None:
    """The thread if it is off the CPU outside of system calls."""
    thread = stopped_thread(program.peek, pid)
    return thread if thread and thread.syscall_nr < 0 else None


@contextmanager
def on_one_cpu(pid: int) -> Iterator[None]:
    """Another process and this one share a CPU: whenever this one runs, the other is preempted."""
    cpus = os.sched_getaffinity(0)
    for each in (pid, 0):
        os.sched_setaffinity(each, {min(cpus)})
    try:
        yield
    finally:
        for each in (pid, 0):
            os.sched_setaffinity(each, cpus)


def test_a_preempted_thread_is_unwound_at_any_instruction(program, compiled):
    with waiting(compiled(*FLAGS["without frame pointers"]), "spins") as pid:
        code = MappedCode(pid, Files())
        code.refresh()
        with on_one_cpu(pid):
            for _ in range(500):
                thread = until(lambda: preempted_thread(program, pid))
                assert [plain(code.name(address)) for address in unwind(code, thread).addresses[:4]] == INNER
        until(lambda: stopped_thread(program.peek, pid) is None)  # it has a processor of its own


@pytest.mark.skipif(not shutil.which("gdb"), reason="other: no gdb")
@pytest.mark.parametrize("minor", EACH_VERSION)
def test_frames_are_those_of_gdb_in_every_thread_of_python(program, minor):
    with at_rest(INTERPRETERS[minor], "everywhere.py") as process:
        own_rows = {tid: waits_in(program, process.pid, tid)[1] for tid in tids(process.pid)}
        gdb = by_gdb(process.pid)
    assert own_rows.keys() == gdb.keys()
    assert len(own_rows) == 8
    for tid, calls in own_rows.items():
        groupby = [calls.addresses[0], *(index + 1 for index in calls.addresses[1:])]
        groupby = [address for address, _ in itertools.groupby(groupby)]
        assert not calls.is_cut or len(groupby) > 20
        assert groupby == gdb[tid][: len(groupby)]


def by_gdb(pid: int) -> dict[int, list[int]]:
    """The return addresses of each thread, by gdb; inlined functions have the address of their caller."""
    command = ["gdb", "-batch", "-nx", "-p", str(pid)]
    command += ["-ex", "thread apply all backtrace -frame-info location-and-address"]
    done = subprocess.run(command, capture_output=True, check=True)
    text = done.stdout.decode(errors="replace")  # names of threads are cut anywhere
    result: dict[int, list[int]] = {}
    for part in re.split(r"^Thread ", text, flags=re.MULTILINE)[1:]:
        tid = re.search(r"\(LWP (\d+)\b", part)
        assert tid
        frames = [int(each, 16) for each in re.findall(r"^#\d+ +(0x[0-9a-f]+) ", part, re.MULTILINE)]
        result[int(tid[1])] = [address for address, _ in itertools.groupby(frames)]
    return result


def test_the_interpreter_is_known_by_its_file(program):
    with running(sys.executable, "moving.py") as process:
        code = MappedCode(process.pid, Files())
        code.refresh()
        regions = [region for region in code._regions if code.is_interpreter(region.start)]
    assert regions
    assert all("python" in region.name for region in regions)


def test_a_thread_that_runs_is_sampled(compiled):
    with waiting(compiled(*FLAGS["without frame pointers"]), "spins") as pid:
        code = MappedCode(pid, Files())
        code.refresh()
        end_s = time.monotonic() + 20
        plains: list[str] = []
        while plains[:1] != ["innermost"]:  # at first it writes
            assert time.monotonic() < end_s
            if thread := sample_thread(pid):
                plains = [plain(code.name(address)) for address in unwind(code, thread).addresses]
    assert plains[:10] == [*INNER, "hidden", "again", "again", "again", "again", "main"]
    assert plains[-1] == "_start"


def test_a_thread_that_waits_is_not_sampled():
    with subprocess.Popen(["sleep", "100"]) as process:
        while not Path(f"/proc/{process.pid}/syscall").read_text().startswith("230 "):  # clock_nanosleep
            time.sleep(0.01)
        assert sample_thread(process.pid) is None
        process.kill()
    assert sample_thread(process.pid) is None
