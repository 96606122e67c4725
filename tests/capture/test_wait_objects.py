"""The object of a blocked system call, with the program at the other end."""

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stallscope.capture.process.unix_peer import unix_peer
from stallscope.capture.process.wait_objects import (
    CLIENT,
    NEW_CONNECTIONS,
    SHARED_LOCK,
    TIMER,
    BlockedCall,
    WaitObjects,
)

from ..memory_disk import memory_disk
from ..patience import until

CLOCK_NANOSLEEP, FUTEX = 230, 202
_WAITING = {
    "unix": "s = socket.socket(socket.AF_UNIX); s.connect(at); s.recv(1)",
    "tcp": "socket.create_connection(('127.0.0.1', int(at))).recv(1)",
    "server": "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); "
    "s.accept()[0].recv(1)",
    "accept": "socket.create_server(('127.0.0.1', 0)).accept()",
    "accept_unix": "s = socket.socket(socket.AF_UNIX); s.bind(at); s.listen(); s.accept()",
    "fifo": "open(at).read(1)",
    "shell": "subprocess.run(['sh', '-c', 'sleep 30; true'])",
    "timer": "asyncio.run(asyncio.sleep(30))",
    "end": "p = subprocess.Popen(['sleep', '30']); e = select.epoll(); e.register(os.pidfd_open(p.pid), 1); e.poll()",
    "lock": "f = open(at); f.read(); time.sleep(30)",
    "exclusive": "f = open(at); fcntl.flock(f, fcntl.LOCK_EX); time.sleep(30)",
    "inherited": "f = open(at); fcntl.flock(f, fcntl.LOCK_EX); "
    "sys.exit(subprocess.run([sys.executable, '-c', 'import time; time.sleep(30)'], pass_fds=[f.fileno()]).returncode)",
    "shared": "from multiprocessing import Semaphore; Semaphore(0).acquire()",
    "thread": "from threading import Semaphore; Semaphore(0).acquire()",
    "forkserver": "from multiprocessing import get_context; "
    "get_context('forkserver').Process(target=time.sleep, args=(30,)).start(); time.sleep(30)",
    "loop": """
async def read():
    reader, _ = await asyncio.open_connection('127.0.0.1', int(at))
    await reader.read(1)
asyncio.run(read())""",
}


@contextmanager
def waiting(kind: str, at: str) -> Iterator[int]:
    """A process that blocks in this kind of wait."""
    code = f"import asyncio, fcntl, os, select, socket, subprocess, sys, time; at = sys.argv[1]; {_WAITING[kind]}"
    with subprocess.Popen([sys.executable, "-c", code, at]) as process:
        try:
            yield process.pid
        finally:
            objects = WaitObjects(time.monotonic_ns)
            for child in [*objects.workers(process.pid), *objects.children(process.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(child, 9)
            process.kill()


def blocked_call(pid: int, word: str) -> BlockedCall:
    """The call that a process is blocked in, once its object contains a word."""
    return _blocked(pid, lambda blocked: word in blocked.object)


def blocked_in(pid: int, nr: int) -> BlockedCall:
    """The call that a process is blocked in, once it is this system call."""
    return _blocked(pid, lambda blocked: blocked.nr == nr)


def _blocked(pid: int, is_wanted: Callable[[BlockedCall], bool]) -> BlockedCall:
    def present() -> BlockedCall | None:
        return WaitObjects(time.monotonic_ns).blocked_call(pid, pid)

    def wanted() -> BlockedCall | None:
        blocked = present()
        return blocked if blocked and is_wanted(blocked) else None

    return until(wanted, seconds=20, state=lambda: f"process {pid} is in another call: {present()}")


def test_the_peer_of_a_unix_socket_is_found():
    first, second = socket.socketpair()
    with first, second:
        assert unix_peer(os.fstat(first.fileno()).st_ino) == os.fstat(second.fileno()).st_ino
    with socket.socket(socket.AF_UNIX) as alone:
        assert unix_peer(os.fstat(alone.fileno()).st_ino) is None


@pytest.mark.live
def test_the_process_at_the_other_end_of_a_unix_socket_is_named(tmp_path: Path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "service"))
        server.listen()
        with waiting("unix", str(tmp_path / "service")) as pid:
            connection, _ = server.accept()
            with connection:
                name = Path("/proc/self/comm").read_text().strip()
                assert f"of {name} {os.getpid()}" in blocked_call(pid, "a Unix socket of").object


@pytest.mark.live
def test_the_process_at_the_other_end_of_a_local_connection_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with waiting("tcp", str(port)) as pid:
            connection, _ = server.accept()
            with connection:
                text = blocked_call(pid, f"connection to 127.0.0.1:{port}").object
                assert f" {os.getpid()}" in text


@pytest.mark.live
def test_a_server_waits_for_its_client():
    with waiting("server", "") as pid:
        assert blocked_call(pid, "127.0.0.1").object.startswith(CLIENT)


@pytest.mark.live
def test_the_writer_of_a_fifo_is_named(tmp_path: Path):
    path = tmp_path / "feed"
    os.mkfifo(path)
    with waiting("fifo", str(path)) as pid, path.open("w"):
        assert f" {os.getpid()}" in blocked_call(pid, "pipe written by").object


@pytest.mark.live
def test_the_program_that_a_shell_runs_is_named(tmp_path: Path):
    with waiting("shell", "") as pid:
        assert blocked_call(pid, "end of sleep").nr == 61


@pytest.mark.live
def test_an_event_loop_without_connections_waits_for_a_timer():
    with waiting("timer", "") as pid:
        assert blocked_call(pid, TIMER).object == TIMER


@pytest.mark.live
@pytest.mark.parametrize("kind", ["accept", "accept_unix"])
def test_a_server_without_clients_waits_for_new_connections(kind: str, tmp_path: Path):
    with waiting(kind, str(tmp_path / "socket")) as pid:
        assert blocked_call(pid, NEW_CONNECTIONS).object == NEW_CONNECTIONS


@pytest.mark.live
def test_the_connection_of_an_event_loop_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with waiting("loop", str(port)) as pid:
            connection, _ = server.accept()
            with connection:
                text = blocked_call(pid, f"connection to 127.0.0.1:{port}").object
                assert f" {os.getpid()}" in text


@pytest.mark.live
def test_the_program_whose_end_an_event_loop_awaits_is_named():
    with waiting("end", "") as pid:
        assert "sleep" in blocked_call(pid, "end of").object


def test_a_lock_that_a_sleeping_process_may_poll_is_named_with_its_holder(tmp_path: Path):
    path = tmp_path / "runs.db"
    with path.open("w") as file, waiting("lock", str(path)) as pid:
        fcntl.lockf(file, fcntl.LOCK_EX)
        text = blocked_call(pid, "lock on").object
        name = Path("/proc/self/comm").read_text().strip()
        assert text.startswith(f"lock on {path} held by {name} {os.getpid()}")
        fcntl.lockf(file, fcntl.LOCK_UN)
        again = WaitObjects(time.monotonic_ns).blocked_call(pid, pid)
        assert again and not again.object


@pytest.fixture
def two_file_systems(tmp_path: Path) -> Iterator[list[Path]]:
    """Two new file systems, whose first files have the same inode number."""
    with memory_disk(tmp_path / "a") as first, memory_disk(tmp_path / "b") as second:
        yield [first, second]


def test_a_lock_on_a_file_of_another_file_system_with_the_same_inode_is_not_polled(two_file_systems):
    used, locked = (folder / "file" for folder in two_file_systems)
    used.touch()
    with locked.open("w") as file, waiting("lock", str(used)) as pid:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert used.stat().st_ino == locked.stat().st_ino
        assert not blocked_in(pid, CLOCK_NANOSLEEP).object


def test_the_holder_of_a_lock_is_not_sought_on_another_file_system(two_file_systems):
    paths = [folder / "file" for folder in two_file_systems]
    for path in paths:
        path.touch()
    first, second = map(str, paths)
    with paths[0].open() as file, waiting("exclusive", second) as holder:
        fcntl.flock(file, fcntl.LOCK_EX)
        until(lambda: f" {holder} " in Path("/proc/locks").read_text())
        for path, pid in (first, os.getpid()), (second, holder):
            with waiting("exclusive", path) as waiter:
                assert str(pid) in blocked_call(waiter, "lock on").object.split()


def test_a_process_that_has_inherited_a_locked_file_does_not_wait_for_it(tmp_path: Path):
    path = tmp_path / "launcher.lock"
    path.touch()
    with waiting("inherited", str(path)) as pid:
        assert "python" in blocked_call(pid, "end of").object
        objects = WaitObjects(time.monotonic_ns)
        (child,) = objects.children(pid)
        assert not blocked_in(child, CLOCK_NANOSLEEP).object


def test_a_lock_in_shared_memory_differs_from_a_lock_of_threads():
    with waiting("shared", "") as pid:
        assert blocked_call(pid, SHARED_LOCK).nr == FUTEX
    with waiting("thread", "") as pid:
        assert not blocked_in(pid, FUTEX).object


def test_the_workers_of_a_fork_server_are_workers_of_the_process():
    def calls() -> list[int]:
        objects = WaitObjects(time.monotonic_ns)
        blocked = [objects.blocked_call(worker, worker) for worker in objects.workers(pid)]
        return [call.nr for call in blocked if call]

    with waiting("forkserver", "") as pid:
        until(lambda: CLOCK_NANOSLEEP in calls(), seconds=20)


def test_locks_are_read_more_rarely_where_reading_takes_long(tmp_path: Path):
    data, process = tmp_path / "data.db", tmp_path / "1"
    data.touch()
    for name in ("task/1", "fd", "fdinfo"):
        (process / name).mkdir(parents=True)
    (process / "task/1/syscall").write_text(f"{CLOCK_NANOSLEEP} 0 0 0 0 0 0 0 0\n")
    (process / "fd/3").symlink_to(data)
    (process / "fdinfo/3").write_text("pos:\t0\nmnt_id:\t5\n")
    (process / "mountinfo").write_text("5 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    (tmp_path / "locks").write_text(f"1: POSIX ADVISORY WRITE 999 08:01:{data.stat().st_ino} 0 EOF\n")
    now_ns = 0

    def slow_clock() -> int:
        nonlocal now_ns
        now_ns += 10**6
        return now_ns

    def is_locked() -> bool:
        call = objects.blocked_call(1, 1)
        return bool(call and call.object == f"lock on {data} held by process 999")

    objects = WaitObjects(slow_clock, tmp_path)
    assert is_locked()
    (tmp_path / "locks").write_text("")
    now_ns += 150 * 10**6
    assert is_locked()
    now_ns += 100 * 10**6
    assert not is_locked()
