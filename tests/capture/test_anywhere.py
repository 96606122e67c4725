"""A library at any location, loaded at any time: each of its calls is recorded once, by real probes."""

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stallscope.capture.probes.attaching import Attacher
from stallscope.capture.probes.discovery import Discovery
from stallscope.capture.probes.libbpf import KernelRefused
from stallscope.capture.probes.mmap_watch import MmapWatch
from stallscope.capture.probes.operations import Hook
from stallscope.capture.probes.program import Link, Options, Program

pytestmark = [
    pytest.mark.bpf,
    pytest.mark.live,
    pytest.mark.compiler,
    pytest.mark.skipif(not shutil.which("unshare"), reason="unshare(1) is missing"),
]

N = 50
CHILD = """
import ctypes, os, sys, threading
P, Z = ctypes.c_void_p, ctypes.c_size_t
class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]
def load(path):
    global lib
    lib = ctypes.CDLL(path)
def calls(n):
    for _ in range(n):
        lib.ncclAllReduce(P(0), P(0), Z(16), 7, 0, P(4711), P(0))
def old_thread():
    asked.wait()
    calls(calls_of_thread)
asked = threading.Event()
thread = threading.Thread(target=old_thread)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""
STATIC = """
#include <stdio.h>
typedef struct { char internal[128]; } ncclUniqueId;
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int cudaStreamSynchronize(long, long);
int main(void)
{
	char line[64];

	while (fgets(line, sizeof(line), stdin)) {
		for (int i = 0; line[0] == 'c' && i < 50; i++)
			ncclAllReduce(0, 0, 16, 7, 0, (void *)4711, 0);
		puts("done");
		fflush(stdout);
	}
	return cudaStreamSynchronize(0, 0);
}
"""


@dataclass
class Child:
    """A process that runs one line at a time."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def does(self, *lines: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        for line in lines:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
            assert self.process.stdout.readline() == "done\n", f"failed: {line}"


@dataclass
class Agent:
    """The steps of an agent: notices libraries, attaches, counts."""

    program: Program
    attaching: Attacher
    mapped: MmapWatch
    links: list[Link] = field(default_factory=list)

    def attaches(self, n: int = 1) -> float:
        """Wait until this many files have probes. Returns the time in seconds."""
        begin = time.monotonic()
        while len(self.links) < n:
            assert time.monotonic() - begin < 20, "not found"
            notes = self.attaching.attach_new(time.monotonic_ns())
            assert not [note for note in notes if "not seen" in note]
            if len(self.links) < n:
                self.mapped.wait(1)
        return time.monotonic() - begin

    def looks(self) -> None:
        """Attach once to the libraries that exist now."""
        self.attaching.attach_new(time.monotonic_ns())

    def counted(self) -> Counter[int]:
        """Calls by process."""
        return Counter(self.program.arrivals.drain()["pid"].tolist())


@pytest.fixture(scope="module")
def program(bpf_object: Path) -> Iterator[Program]:
    with Program.load(Options()) as loaded:
        yield loaded


@pytest.fixture
def agent(program: Program, tmp_path: Path) -> Iterator[Agent]:
    """Examines only the processes of this test: other users may run jobs on this machine as well."""
    with ExitStack() as stack, MmapWatch() as mapped:
        links: list[Link] = []

        def attach(path: str, hooks: list[Hook]) -> Link:
            link = program.attach(path, hooks)
            links.append(link)
            stack.callback(link.close)
            return link

        discovery = Discovery(pids=frozenset({os.getpid()}), mapped=mapped)
        attaching = Attacher(discovery, lambda path, hooks: attach(path, list(hooks)))
        program.arrivals.drain()
        yield Agent(program, attaching, mapped, links)


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """child(*prefix): a process in the environment that the prefix command creates."""
    with ExitStack() as stack:

        def start(*prefix: str, command: tuple[str, ...] = (sys.executable, "-c", CHILD)) -> Child:
            process = subprocess.Popen([*prefix, *command], stdin=-1, stdout=-1, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            started = Child(process)
            started.does("pass")
            return started

        yield start


@pytest.fixture
def copy(library: Path, tmp_path: Path) -> Callable[[str], Path]:
    """copy(name): the library under a name of this test."""

    def to(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, path)
        return path

    return to


def load(path: Path | str) -> str:
    return f"load({str(path)!r})"


@pytest.mark.parametrize(
    "name",
    [
        "venv/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2",
        "miniconda3/envs/my env/lib/libnccl.so.2.26.2",
        "home/someone/libnccl-0a1b2c3d.so.2",
    ],
)
def test_calls_are_counted_for_any_library_path_and_name(agent: Agent, child, copy, name: str):
    entry = child()
    entry.does(load(copy(name)))
    agent.attaches()
    entry.does(f"calls({N})")
    assert agent.counted() == {entry.pid: N}


def test_calls_into_a_deleted_library_are_counted(agent: Agent, child, copy):
    path = copy("libnccl.so.2")
    entry = child()
    entry.does(load(path))
    path.unlink()
    agent.attaches()
    entry.does(f"calls({N})")
    assert agent.counted() == {entry.pid: N}


def test_a_library_loaded_later_is_attached(agent: Agent, child, copy):
    entry = child()
    agent.looks()
    assert not agent.links
    entry.does(load(copy("libnccl.so.2")))
    took_s = agent.attaches()
    entry.does(f"calls({N})")
    assert agent.counted() == {entry.pid: N}
    print(f"from dlopen to attached: {took_s * 1000:.1f} ms")


def test_a_process_that_starts_later_loses_no_call(agent: Agent, child, copy):
    path = copy("libnccl.so.2")
    first = child()
    first.does(load(path))
    agent.attaches()
    later = child()
    later.does(load(path), f"calls({N})")
    assert agent.counted() == {later.pid: N}


def test_a_fork_is_a_process_of_its_own(agent: Agent, child, copy):
    entry = child()
    entry.does(load(copy("libnccl.so.2")))
    agent.attaches()
    entry.does(f"pid = os.fork() or (calls({N}), os._exit(0)); os.waitpid(pid, 0); calls(7)")
    counted = agent.counted()
    assert counted.pop(entry.pid) == 7
    assert list(counted.values()) == [N]


def test_calls_of_a_thread_older_than_the_agent_are_counted(agent: Agent, child, copy):
    entry = child()
    entry.does(load(copy("libnccl.so.2")), "thread.start()")
    agent.attaches()
    entry.does(f"calls_of_thread = {N}; asked.set(); thread.join()")
    assert agent.counted() == {entry.pid: N}


def test_calls_into_several_versions_at_once_are_counted(agent: Agent, child, copy):
    children = [child(), child()]
    for entry, version in zip(children, ("2.18.3", "2.32.3"), strict=True):
        entry.does(load(copy(f"{version}/libnccl.so.2")))
    agent.attaches(2)
    for entry in children:
        entry.does(f"calls({N})")
    assert agent.counted() == {entry.pid: N for entry in children}


@pytest.mark.parametrize("is_hidden", [False, True])
def test_calls_into_statically_linked_code_are_counted(
    agent: Agent, child, tmp_path: Path, copy, is_hidden: bool
):
    """Its symbols are in .symtab only, where hidden symbols are local. A driver next to it shows that it uses a GPU."""
    main, both, program = tmp_path / "main.c", tmp_path / "both.o", tmp_path / "job"
    main.write_text(STATIC)
    calls = Path(__file__).parent / "targets" / "calls.c"
    subprocess.run(["gcc", "-O1", "-r", "-o", both, main, calls], check=True)
    if is_hidden:
        subprocess.run(["objcopy", "--keep-global-symbol=main", both], check=True)
    driver = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-o", driver, "-xc", "-"],
        input="int unrelated(void) { return 0; }",
        text=True,
        check=True,
    )
    subprocess.run(["gcc", "-o", program, both, "-Wl,--no-as-needed", driver], check=True)
    entry = child(command=(str(program),))
    agent.looks()
    assert len(agent.links) == 1
    entry.does("calls")
    assert agent.counted() == {entry.pid: N}


def test_calls_in_a_container_with_its_own_root_are_counted(agent: Agent, child, copy, tmp_path: Path):
    """On the host, the library's path leads to another file or to no file."""
    image = copy("image/libnccl.so.2")
    root = tmp_path / "root"
    root.mkdir()
    script = (
        f"mount --rbind / {root} && mount -t tmpfs none {root}/opt && cp {image} {root}/opt/ "
        f"&& cd {root} && mkdir opt/old && pivot_root . opt/old && cd / && umount -l /opt/old "
        f'&& exec "$@"'
    )
    entry = child("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")
    entry.does(load("/opt/libnccl.so.2"))
    assert not Path("/opt/libnccl.so.2").exists()
    agent.attaches()
    entry.does(f"calls({N})")
    assert agent.counted() == {entry.pid: N}


def test_an_image_that_two_containers_share_is_hooked_once(agent: Agent, child, copy, tmp_path: Path):
    copy("image/libnccl.so.2")
    children = []
    for name in ("one", "two"):
        at = tmp_path / name
        at.mkdir()
        script = (
            f"mount -t tmpfs none {at} && mkdir {at}/upper {at}/work {at}/merged && mount -t overlay none "
            f"-o lowerdir={tmp_path}/image,upperdir={at}/upper,workdir={at}/work {at}/merged "
            f'&& exec "$@"'
        )
        children.append(child("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"))
        children[-1].does(load(at / "merged" / "libnccl.so.2"))
    agent.attaches()
    agent.looks()
    assert len(agent.links) == 1
    for entry in children:
        entry.does(f"calls({N})")
    assert agent.counted() == {entry.pid: N for entry in children}


@pytest.mark.pure
def test_attaching_to_a_directory_is_refused(program: Program, tmp_path: Path):
    path = tmp_path / "libnccl.so.2"
    path.mkdir()
    with pytest.raises(KernelRefused):
        program.attach(str(path), [Hook(64, 0, "nccl", "x")])
    assert os.geteuid() == 0
