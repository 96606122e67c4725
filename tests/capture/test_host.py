"""Actions of the machine on traced processes: real faults, each recorded with its kind and its originator.

The same actions on an untraced process are not recorded.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stallscope.capture.host import MIN_MIGRATIONS, HostEvents
from stallscope.capture.probes.optional_programs import FEATURES
from stallscope.capture.probes.program import Program
from stallscope.capture.process.control_groups import ControlGroups
from stallscope.capture.rows import records
from stallscope.capture.rows.snapshots import snapshots
from stallscope.events import layout
from stallscope.events.kernel import Kind
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, HostKind, OffCpuFlag

from ..patience import until
from .groups import group, join, network, versions

pytestmark = [pytest.mark.bpf, pytest.mark.compiler, pytest.mark.live]

CALL = "lib.cudaMalloc(0, Z(64))"
SENDER = "import os, sys; os.kill(int(sys.argv[1]), int(sys.argv[2]))"


class Watch:
    """Rows of HOST_EVENTS of the processes that the test calls traced."""

    def __init__(self, program: Program, *pids: int):
        self.pids = pids
        self._program = program
        self._host = HostEvents(0, program.entries)
        self._rows = [layout.empty(layout.HOST_EVENTS)]
        self.look()

    def look(self) -> Array:
        """All rows so far."""
        events = self._program.events.drain()
        self._rows.append(self._host.rows(events, self.pids, time.monotonic_ns()))
        return np.concatenate(self._rows)

    def of(self, kind: HostKind, pid: int) -> Array:
        """Rows of one kind of a process."""
        rows = self.look()
        return rows[(rows["kind"] == kind) & (rows["pid"] == pid)]

    def until(self, kind: HostKind, pid: int, *, n: int = 1) -> Array:
        """Waits for that many."""
        until(lambda: len(self.of(kind, pid)) >= n, state=lambda: f"no {kind.name} of {pid} in {self.look()}")
        return self.of(kind, pid)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[str]]:
    """A process that makes no traced call."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys\nfor line in sys.stdin: exec(line); print('done', flush=True)"],
        stdin=-1,
        stdout=-1,
        text=True,
    ) as process:
        yield process
        process.kill()


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Run the lines in the untraced process."""
    assert process.stdin and process.stdout
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def send(pid: int, number: int) -> int:
    """Send the signal from another process. Returns the pid of the sender."""
    sender = subprocess.Popen([sys.executable, "-c", SENDER, str(pid), str(number)])
    assert sender.wait() == 0
    return sender.pid


def test_this_kernel_supports_every_feature(tracing: Callable[..., Program]):
    assert tracing(features=FEATURES).missing == ()


def test_the_sender_of_a_stop_signal_is_named(tracing: Callable[..., Program], puppet, stranger):
    program = tracing()
    puppet.does(CALL)
    watch = Watch(program, puppet.pid)
    sender = send(puppet.pid, signal.SIGSTOP)
    send(puppet.pid, signal.SIGCONT)
    send(stranger.pid, signal.SIGSTOP)
    send(stranger.pid, signal.SIGCONT)
    rows = watch.until(HostKind.SIGNAL, puppet.pid, n=2)
    assert rows["value"].tolist() == [signal.SIGSTOP, signal.SIGCONT]
    assert (rows["by_pid"][0], rows["by_comm"][0]) == (sender, Path(sys.executable).name.encode())
    assert not len(watch.of(HostKind.SIGNAL, stranger.pid))


def test_a_process_ends_once_however_many_threads_it_has(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(
        CALL,
        "import threading, time, os",
        "[threading.Thread(target=time.sleep, args=(60,)).start() for _ in 'x' * 9]",
    )
    watch = Watch(program, puppet.pid)
    killer = send(puppet.pid, signal.SIGKILL)
    puppet.process.wait()
    (end,) = watch.until(HostKind.EXIT, puppet.pid)
    assert end["value"] == 128 + signal.SIGKILL
    (kill,) = watch.of(HostKind.SIGNAL, puppet.pid)
    assert (kill["value"], kill["by_pid"]) == (signal.SIGKILL, killer)


def test_children_are_followed_and_not_threads(tracing: Callable[..., Program], puppet, stranger):
    program = tracing()
    puppet.does(CALL, "import subprocess, threading")
    watch = Watch(program, puppet.pid)
    puppet.does("thread = threading.Thread(target=int)", "thread.start()", "thread.join()")
    puppet.does("child = subprocess.Popen(['/bin/sh', '-c', 'exit 3'])", "child.wait()")
    tell(stranger, "import subprocess; subprocess.run(['/bin/sh', '-c', 'exit 4'])")
    rows = watch.look()
    (born,) = rows[rows["kind"] == HostKind.FORK]
    assert born["by_pid"] == puppet.pid
    (became,) = watch.of(HostKind.EXEC, int(born["pid"]))
    assert became["comm"] == b"sh"
    ends = rows[rows["kind"] == HostKind.EXIT]
    assert (ends["pid"].tolist(), ends["value"].tolist()) == ([born["pid"]], [3])
    assert os.getpid() not in rows["pid"]


# So small a quota is used up even if other programs leave little of the CPU.
BURN = "import time; end = time.thread_time() + {0}\nwhile time.thread_time() < end: pass"
QUOTAS = {
    1: ({"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "5000"}, b"cpu.cfs_quota_us 5000/100000"),
    2: ({"cpu.max": "5000 100000"}, b"cpu.max 5000/100000"),
}


def preempted(program: Program, pid: int) -> Array:
    """Long intervals in which a process was runnable and did not run."""
    rows = records.offcpu(records.of_kind(program.events.drain(), Kind.OFF_CPU), node=0)
    return rows[(rows["pid"] == pid) & (rows["category"] == Category.PREEMPTED)]


@pytest.mark.parametrize("version", versions("cpu") or QUOTAS)
def test_throttling_by_a_cpu_quota_is_not_attributed_to_a_neighbour(
    tracing: Callable[..., Program], puppet, version: int
):
    limits, words = QUOTAS[version]
    program = tracing()
    puppet.does(CALL)
    with group(version, "cpu", limits) as home:
        join(home, puppet.pid)
        groups = ControlGroups()
        assert not groups.new_throttling([puppet.pid], time.monotonic_ns())

        def is_throttled() -> bool:
            puppet.does(f"exec({BURN.format(0.04)!r})")
            counters = dict(line.split() for line in (home / "cpu.stat").read_text().splitlines())
            return int(counters["nr_throttled"]) >= 3

        until(is_throttled)
        (throttled,) = groups.new_throttling([puppet.pid, os.getpid()], time.monotonic_ns())
    rows = preempted(program, puppet.pid)
    by_quota = rows["flags"] & OffCpuFlag.THROTTLED > 0
    assert rows["duration_ns"][by_quota].sum() > 0.7 * throttled.ns > 0
    assert (throttled.quota.encode(), throttled.pids, throttled.group.path) == (words, (puppet.pid,), home)
    assert throttled.n >= 3


def test_preemption_by_a_neighbour_is_not_attributed_to_a_quota(
    tracing: Callable[..., Program], puppet, stranger
):
    program = tracing()
    for pid in (puppet.pid, stranger.pid):
        os.sched_setaffinity(pid, {0})
    puppet.does(CALL)
    assert stranger.stdin
    stranger.stdin.write("while True: pass\n")
    stranger.stdin.flush()
    puppet.does(f"exec({BURN.format(0.1)!r})")
    rows = preempted(program, puppet.pid)
    assert not (rows["flags"] & OffCpuFlag.THROTTLED).any()
    own_rows = rows[rows["by_pid"] == stranger.pid]
    assert own_rows["duration_ns"].sum() > 20_000_000


WRITES = (
    "f = open({0!r}, 'wb'); [(f.write(bytes(1 << 20)), f.flush(), os.fsync(f.fileno())) for _ in range(3)]"
)


def test_a_disk_is_named_with_file_and_issuer(
    tracing: Callable[..., Program], puppet, stranger, tmp_path: Path
):
    if not (disk := disk_of(tmp_path)):
        pytest.skip(f"other: {tmp_path} lies on no disk")
    program = tracing(slow_off_ns=1000, slow_io_ns=1000)
    puppet.does(CALL, "import os")
    tell(stranger, "import os")
    watch = Watch(program, puppet.pid)
    own_rows, other_rows = tmp_path / "mine", tmp_path / "theirs"
    tell(stranger, WRITES.format(str(other_rows)))
    puppet.does(WRITES.format(str(own_rows)))
    waits = watch.until(HostKind.FILE_WAIT, puppet.pid)
    assert set(waits["file"].tolist()) == {str(own_rows).encode()}
    assert set(waits["device"].tolist()) == {disk.encode()}
    requests = watch.of(HostKind.BLOCK_IO, puppet.pid)
    own = requests[requests["by_pid"] == puppet.pid]
    assert set(own["device"].tolist()) == {disk.encode()} and b"write" in own["detail"].tolist()
    assert own["value"].sum() >= 3 << 20
    sums = requests[requests["by_pid"] == UNKNOWN]
    writes = [re.fullmatch(rb"(\d+) x write; us: (.*)", entry) for entry in sums["detail"].tolist()]
    for output in filter(None, writes):
        assert int(output[1]) == sum(int(each.split(b":")[1]) for each in output[2].split()) > 0
    assert any(writes)
    rows = watch.look()
    assert stranger.pid not in rows["pid"] and stranger.pid not in rows["by_pid"]


def disk_of(path: Path) -> str:
    """The disk or partition that the path lies on; empty for none."""
    number = path.stat().st_dev
    index = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return index.readlink().name if index.exists() else ""


TOUCHES = """
import mmap, os
with open({0!r}, "wb") as file:
    file.write(os.urandom(4 << 20))
    os.fsync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
with open({0!r}, "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    pages.madvise(mmap.MADV_RANDOM)
    total = sum(pages[at] for at in range(0, 4 << 20, 4096 * 16))
"""


def test_memory_that_must_be_read_from_a_disk_is_a_major_fault(
    tracing: Callable[..., Program], puppet, stranger, tmp_path: Path
):
    if not disk_of(tmp_path):
        pytest.skip(f"other: {tmp_path} lies on no disk")
    program = tracing(slow_off_ns=1000)
    puppet.does(CALL)
    watch = Watch(program, puppet.pid)
    tell(stranger, f"exec({TOUCHES.format(str(tmp_path / 'theirs'))!r})")
    puppet.does(f"exec({TOUCHES.format(str(tmp_path / 'mine'))!r})")
    faults = watch.until(HostKind.MAJOR_FAULT, puppet.pid)
    assert (faults["duration_ns"] > 0).all() and set(faults["tid"].tolist()) == {puppet.pid}
    assert stranger.pid not in watch.look()["pid"]


def test_moves_between_cpus_are_counted(tracing: Callable[..., Program], puppet):
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("other: one CPU only")
    program = tracing()
    puppet.does(CALL)
    watch = Watch(program, puppet.pid)
    moves = (
        f"for i in range({2 * MIN_MIGRATIONS}): os.sched_setaffinity(0, {{({cpus[0]}, {cpus[1]})[i % 2]}})"
    )
    puppet.does(f"import os; exec({moves!r})")
    rows = watch.until(HostKind.MIGRATION, puppet.pid)
    assert 2 * MIN_MIGRATIONS - 1 <= rows["value"].sum() <= 3 * MIN_MIGRATIONS


HOLDS = "held = bytearray({0} << 20); held[::4096] = b'x' * len(held[::4096])"


def test_memory_pressure_is_recorded_from_reclaim_to_the_oom_kill(
    tracing: Callable[..., Program], puppet, stranger, tmp_path: Path
):
    program = tracing()
    puppet.does(CALL)
    with group(1, "memory", {"memory.limit_in_bytes": str(96 << 20)}) as home:
        for pid in (puppet.pid, stranger.pid):
            join(home, pid)
        watch = Watch(program, puppet.pid)
        before = fault_ns(program, puppet.pid)
        puppet.does(HOLDS.format(48), f"f = open({str(tmp_path / 'big')!r}, 'wb')")
        puppet.does("[f.write(bytes(1 << 20)) for _ in range(80)]")
        reclaim = watch.until(HostKind.RECLAIM, puppet.pid)
        assert reclaim["duration_ns"].sum() > 0
        assert fault_ns(program, puppet.pid) > before
        assert not len(watch.of(HostKind.OOM_KILL, puppet.pid))
        assert stranger.stdin
        stranger.stdin.write(HOLDS.format(60) + "\n")
        stranger.stdin.flush()
        puppet.process.wait()
        (kill,) = watch.until(HostKind.OOM_KILL, puppet.pid)
        assert (kill["comm"], kill["by_pid"]) == (Path(sys.executable).name.encode(), stranger.pid)
        (end,) = watch.until(HostKind.EXIT, puppet.pid)
        assert end["value"] == 128 + signal.SIGKILL
        assert stranger.pid not in watch.look()["pid"]


def fault_ns(program: Program, pid: int) -> int:
    """Time that the ledger has for memory."""
    state = program.processes()
    return int(snapshots(state, node=0)["ledger_ns"][state.pids == pid, Category.FAULT - 1][0])


COMPACT = Path("/proc/sys/vm/compact_memory")


@pytest.mark.skipif(not COMPACT.exists(), reason="other: this kernel does not compact memory")
def test_compaction_is_recorded_for_the_process_that_performs_it(
    tracing: Callable[..., Program], puppet, stranger
):
    program = tracing()
    puppet.does(CALL)
    watch = Watch(program, puppet.pid)
    tell(stranger, f"open({str(COMPACT)!r}, 'w').write('1')")
    assert HostKind.COMPACTION not in watch.look()["kind"]
    puppet.does(f"open({str(COMPACT)!r}, 'w').write('1')")
    rows = watch.until(HostKind.COMPACTION, puppet.pid)
    assert (rows["duration_ns"] > 0).all()
    assert stranger.pid not in watch.look()["pid"]


HEARS = """
import socket
door = socket.create_server(("{host}", 0), family=socket.{family})
print(door.getsockname()[1], flush=True)
"""
RECVFROM = ("45", "207")
"""The number of the system call on x86-64 and arm64."""


def syscall_of(pid: int) -> str:
    return Path(f"/proc/{pid}/syscall").read_text().split()[0]


@pytest.mark.parametrize(
    ("family", "host", "message"), [("AF_INET", "127.0.0.1", "127.0.0.1"), ("AF_INET6", "::1", "[::1]")]
)
def test_the_peer_of_a_socket_wait_is_named(
    tracing: Callable[..., Program], puppet, stranger, family: str, host: str, message: str
):
    program = tracing(slow_off_ns=1_000_000)
    assert stranger.stdin and stranger.stdout
    stranger.stdin.write(f"exec({HEARS.format(host=host, family=family)!r})\n")
    stranger.stdin.flush()
    port = int(stranger.stdout.readline())
    assert stranger.stdout.readline() == "done\n"
    puppet.does(CALL, f"import socket; link = socket.create_connection(({host!r}, {port}), timeout=None)")
    tell(stranger, "peer = door.accept()[0]")
    watch = Watch(program, puppet.pid)
    puppet.tell("_ = link.recv(1)")
    until(lambda: syscall_of(puppet.pid) in RECVFROM)
    time.sleep(0.05)
    tell(stranger, "peer.send(b'x')")
    rows = watch.until(HostKind.SOCKET_WAIT, puppet.pid)
    (row,) = rows[rows["duration_ns"] > 30_000_000]
    assert row["file"] == f"{message}:{port}".encode()
    assert row["detail"].startswith(b"from port ")
    assert stranger.pid not in watch.look()["pid"]


CONNECTS = """
import socket
place = open("/run/netns/{near}")
assert ctypes.CDLL(None).setns(place.fileno(), 0) == 0
link = socket.create_connection(("{address}", {port}), timeout=5)
"""
LISTENS = """
import ctypes, socket
place = open("/run/netns/{far}")
assert ctypes.CDLL(None).setns(place.fileno(), 0) == 0
door = socket.create_server(("{address}", 0), family=socket.{family})
print(door.getsockname()[1], flush=True)
"""


@pytest.mark.parametrize(
    ("family", "address", "message"),
    [("AF_INET", "10.77.0.2", b"10.77.0.2:%d"), ("AF_INET6", "fd77::2", b"[fd77::2]:%d")],
)
def test_retransmits_belong_to_the_owner_of_the_socket(
    tracing: Callable[..., Program],
    puppet,
    stranger,
    tmp_path: Path,
    family: str,
    address: str,
    message: bytes,
):
    program = tracing()
    with network(tmp_path) as wire:
        assert stranger.stdin and stranger.stdout
        stranger.stdin.write(f"exec({LISTENS.format(far=wire.far, address=address, family=family)!r})\n")
        stranger.stdin.flush()
        port = int(stranger.stdout.readline())
        assert stranger.stdout.readline() == "done\n"
        connects = CONNECTS.format(near=wire.near, address=address, port=port)
        puppet.does(CALL, f"exec({connects!r})")
        tell(stranger, "peer = door.accept()[0]")
        watch = Watch(program, puppet.pid)
        wire.drop_all()
        tell(stranger, "peer.send(b'y' * 9)")  # arrives, but its acknowledgement is dropped: sent again
        puppet.does("_ = link.send(b'x' * 9000)")
        rows = watch.until(HostKind.RETRANSMIT, puppet.pid)
        assert (rows["file"][0], rows["device"][0]) == (message % port, b"wire")
        assert rows["detail"][0].startswith(b"from port ")
        assert rows["value"].sum() >= 1
        assert stranger.pid not in watch.look()["pid"]


def test_actions_of_the_agent_are_not_recorded(tracing: Callable[..., Program], tmp_path: Path):
    """This process is the agent, and is a child of a traced process."""
    program = tracing(pids=frozenset({os.getpid(), os.getppid()}), slow_io_ns=1000)
    watch = Watch(program, os.getpid())
    with (tmp_path / "own").open("wb") as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
    child = subprocess.Popen(["/bin/sleep", "60"])
    child.kill()
    child.wait()
    os.kill(os.getpid(), signal.SIGCONT)
    assert not len(watch.look())


DAEMON = """
if not os.fork():
    if not os.fork():
        os.execvp("sleep", ["sleep", "60"])
    os._exit(0)
os.wait()
"""


def test_a_descendant_whose_parent_has_ended_is_still_traced(tracing: Callable[..., Program], puppet):
    program = tracing()
    puppet.does(CALL, "import os")
    watch = Watch(program, puppet.pid)
    puppet.does(f"exec({DAEMON!r})")

    def pids() -> list[int]:
        rows = watch.look()
        return rows["pid"][(rows["kind"] == HostKind.EXEC) & (rows["comm"] == b"sleep")].tolist()

    (pid,) = until(pids)
    killer = send(pid, signal.SIGTERM)
    (kill,) = watch.until(HostKind.SIGNAL, pid)
    assert (kill["value"], kill["by_pid"]) == (signal.SIGTERM, killer)
    (end,) = watch.until(HostKind.EXIT, pid)
    assert end["value"] == 128 + signal.SIGTERM
