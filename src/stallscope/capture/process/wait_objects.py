"""The object that a blocked system call waits for, in words: a file, a pipe and its other end, a lock and its holder.

    objects = WaitObjects()
    objects.blocked_call(pid, tid)  # BlockedCall(nr, "pipe to 812 loader"), from /proc; None while the thread runs

Only /proc/PID/task/TID/syscall is read and, for poll and select, the list of descriptors in the thread's memory. Only
x86-64 system call numbers are known; on other architectures the object is empty.
"""

import os
import platform
import stat
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from stallscope.capture.process.process_identity import parent_pid, small_file
from stallscope.capture.process.unix_peer import unix_peer
from stallscope.capture.stacks.memory import Memory, Unreadable

Key = TypeVar("Key")
Value = TypeVar("Value")

_CACHE_NS = 3 * 10**9
_PEER_CACHE_NS = 60 * 10**9
"""The other end of a pipe or a Unix socket rarely changes, and finding it may read the descriptors of all processes."""

_LOCKS_PAUSE = 200
"""Reading the locks of a machine that has 5,000 locks takes 14 ms, during which no other lock can change."""

_MAX_CACHED = 4096
_MAX_POLLED = 8

_ON_DESCRIPTOR = frozenset(
    # read, write, pread64, pwrite64, readv, writev, preadv(2), pwritev(2), fsync, fdatasync, sync_file_range,
    # ftruncate, fallocate, getdents64, recv*, send*, connect, accept
    (
        0,
        1,
        17,
        18,
        19,
        20,
        295,
        296,
        327,
        328,
        74,
        75,
        277,
        77,
        285,
        217,
        45,
        47,
        44,
        46,
        42,
        43,
        288,
        299,
        307,
        306,
    )
)
_FILE_LOCKS = frozenset((73, 72))  # flock, fcntl
_CHILD_WAITS = frozenset((61, 247))  # wait4, waitid
_POLLS = frozenset((7, 271))  # poll, ppoll
_SELECTS = frozenset((23, 270))  # select, pselect6
_EPOLLS = frozenset((232, 281, 441))  # epoll_wait, epoll_pwait, epoll_pwait2
_FUTEX, _FUTEX_PRIVATE = 202, 128  # FUTEX_PRIVATE_FLAG in the operation (linux/futex.h)
_FUTEXES = frozenset((_FUTEX, 449))
_SLEEPS = frozenset((35, 230))  # nanosleep, clock_nanosleep
_WRITES = frozenset((1, 18, 20, 296, 328))
_STARTERS = frozenset(
    ("sh", "bash", "dash", "ash", "zsh", "env", "timeout", "nice", "taskset", "xargs", "sudo")
)
"""Programs that start another program, whose name is of more use."""

_FORK_SERVER = b"from multiprocessing.forkserver import main"
"""In the command line of a fork server (CPython 3.11, Lib/multiprocessing/forkserver.py)."""

_LISTENING = b"0A"  # TCP_LISTEN in /proc/net/tcp
_ACCEPTS = 0x10000  # __SO_ACCEPTCON in the flags of /proc/net/unix
_READABLE = 0x1  # EPOLLIN

CLIENT = "client connection from"
"""How the object of a wait for a client begins: the connection's own port has a listening socket."""

TIMER = "a timer of an event loop"
"""The object of a wait of an event loop that has no connection, pipe or process to wait for."""

NEW_CONNECTIONS = "new connections"
"""The object of a wait of a server for its next client."""

LOCK = "lock on"
"""How the object of a wait for a file lock begins. A thread that sleeps may poll the lock."""

SHARED_LOCK = "a lock shared with other processes"
"""The object of a wait for a lock or a semaphore in shared memory."""

_MAX_PEERS = 2
_STANDARD = 2  # descriptors 0 to 2: input, output and errors of a program


class BlockedCall(NamedTuple):
    """nr: the system call, -1 for a page fault. object: in words, empty if there is none or if it is unknown."""

    nr: int
    object: str


class FileLock(NamedTuple):
    """A row of /proc/locks. pid: of the holder, 0 or -1 if it is unknown. device: of its file system, major:minor."""

    pid: int
    device: str
    inode: str
    is_exclusive: bool


@dataclass
class _Recent(Generic[Key, Value]):
    """Values that are made again when they are older than max_age_ns."""

    max_age_ns: int
    _known: dict[Key, tuple[int, Value]] = field(default_factory=dict)

    def get(self, key: Key, now_ns: int, make: Callable[[], Value]) -> Value:
        known = self._known.get(key)
        if known and now_ns - known[0] < self.max_age_ns:
            return known[1]
        value = make()
        if len(self._known) >= _MAX_CACHED:
            self._known.clear()
        self._known[key] = now_ns, value
        return value


@dataclass
class WaitObjects:
    """now_ns: a monotonic clock; the target of a descriptor is cached for some seconds."""

    now_ns: Callable[[], int]
    proc: Path = Path("/proc")
    _texts: _Recent[tuple[int, int, int], str] = field(default_factory=lambda: _Recent(_CACHE_NS))
    _shared: _Recent[tuple[int, int], bool] = field(default_factory=lambda: _Recent(_PEER_CACHE_NS))
    _peers: _Recent[tuple[int, str, bool], list[int]] = field(default_factory=lambda: _Recent(_PEER_CACHE_NS))
    _files: _Recent[int, dict[str, Path]] = field(default_factory=lambda: _Recent(_CACHE_NS))
    _fork_servers: _Recent[int, bool] = field(default_factory=lambda: _Recent(_CACHE_NS))
    _held_locks: list[FileLock] = field(default_factory=list)
    _locks_due_ns: int = 0

    def blocked_call(self, pid: int, tid: int, memory: Memory | None = None) -> BlockedCall | None:
        """The system call that a thread is blocked in, and its object; None while it runs or cannot be read."""
        words = small_file(f"{self.proc}/{pid}/task/{tid}/syscall").split()
        if not words or words[0] == b"running":
            return None
        nr = int(words[0])
        if nr < 0 or platform.machine() != "x86_64" or len(words) < 7:
            return BlockedCall(nr, "")
        arguments = [int(word, 16) for word in words[1:7]]
        return BlockedCall(nr, self._object(pid, nr, arguments, memory))

    def _object(self, pid: int, nr: int, arguments: list[int], memory: Memory | None) -> str:
        if nr in _SLEEPS:
            return self._polled_lock(pid)
        if nr == _FUTEX and not arguments[1] & _FUTEX_PRIVATE:
            return self._shared_lock(pid, arguments[0])
        if nr in _FUTEXES or not (descriptor := self._operand(nr, arguments, memory)):
            return ""
        if nr in _CHILD_WAITS:
            return self._child(pid, descriptor[0])
        (number,) = descriptor
        return self._texts.get((pid, nr, number), self.now_ns(), lambda: self._description(pid, nr, number))

    def _operand(self, nr: int, arguments: list[int], memory: Memory | None) -> tuple[int] | None:
        """The descriptor, or the process waited for (0: any child)."""
        if nr in _ON_DESCRIPTOR or nr in _FILE_LOCKS or nr in _EPOLLS:
            return (arguments[0],)
        if nr in _CHILD_WAITS:
            pid = arguments[0] if nr == 61 else arguments[1] if arguments[0] == 1 else 0
            return (pid if 0 < pid < 1 << 22 else 0,)
        try:
            if nr in _POLLS and memory and 0 < arguments[1] <= _MAX_POLLED:
                return struct.unpack("=i", memory.read(arguments[0], 4))
            if nr in _SELECTS and memory and arguments[1]:
                bits = int.from_bytes(memory.read(arguments[1], 8), "little")
                return ((bits & -bits).bit_length() - 1,) if bits else None
        except Unreadable:
            return None
        return None

    def _description(self, pid: int, nr: int, number: int) -> str:
        if nr in _EPOLLS:
            return self._event_loop(pid, number)
        link = self.proc / str(pid) / "fd" / str(number)
        try:
            target = str(link.readlink())
            is_fifo = stat.S_ISFIFO(link.stat().st_mode)
        except OSError:
            return ""
        if nr in _FILE_LOCKS:
            return f"{LOCK} {target}{self._holder(pid, number)}"
        if target.startswith("pipe:[") or is_fifo:
            return self._pipe(pid, target, is_writing=nr in _WRITES)
        if target.startswith("socket:["):
            return self._socket(pid, target)
        return target.removesuffix(" (deleted)")

    def _event_loop(self, pid: int, number: int) -> str:
        """The first process, pipe or connection that an event loop waits for; otherwise a timer.

        The loop's own means of waking up (an eventfd, a pair of sockets) and sockets that listen do not count.
        """
        own = {_target(link) for link in _entries(self.proc / str(pid) / "fd")}
        sockets = []
        for line in small_file(f"{self.proc}/{pid}/fdinfo/{number}").splitlines():
            words = line.split()
            if len(words) < 4 or words[0] != b"tfd:":
                continue
            watched, is_reading = int(words[1]), bool(int(words[3], 16) & _READABLE)
            target = _target(self.proc / str(pid) / "fd" / str(watched))
            if target == "anon_inode:[pidfd]":
                return self._child(pid, _pid_of(self.proc / str(pid) / "fdinfo" / str(watched)))
            if target.startswith("pipe:["):
                return self._pipe(pid, target, is_writing=not is_reading)
            if target.startswith("socket:[") and self._is_connection(pid, target, own):
                sockets.append(target)
        return self._socket(pid, sockets[0]) if sockets else TIMER

    def _is_connection(self, pid: int, target: str, own: set[str]) -> bool:
        """Whether a socket leads to another process; own: the targets of the process's own descriptors."""
        inode = target[8:-1]
        if (peer := unix_peer(int(inode))) is not None:
            return f"socket:[{peer}]" not in own
        return any(row[9] == inode.encode() and row[3] != _LISTENING for row in self._connections(pid))

    def _connections(self, pid: int) -> list[list[bytes]]:
        """The rows of /proc/net/tcp and tcp6 in the network namespace of a process."""
        return [
            words
            for name in ("tcp", "tcp6")
            for line in _file_bytes(self.proc / str(pid) / "net" / name).splitlines()[1:]
            if len(words := line.split()) > 9
        ]

    def _child(self, pid: int, child: int) -> str:
        """The program that a process waits for; for a wait on any child, the present child."""
        children = [child] if child else self.children(pid)
        names = [name for child_pid in children[:2] if (name := self.program(self._started(child_pid)))]
        return f"end of {', '.join(names)}" if names else "end of a child process"

    def _started(self, pid: int) -> int:
        """The program that a shell or a similar program has started and waits for; otherwise the process itself."""
        while small_file(f"{self.proc}/{pid}/comm").decode("utf-8", "replace").strip() in _STARTERS:
            children = self.children(pid)
            if not children:
                break
            pid = children[0]
        return pid

    def children(self, pid: int, tids: Iterable[int] = ()) -> list[int]:
        """The child processes that the main thread has started, and those that other threads `tids` have started."""
        return [
            int(word)
            for tid in (pid, *tids)
            for word in small_file(f"{self.proc}/{pid}/task/{tid}/children").split()
        ]

    def workers(self, pid: int, tids: Iterable[int] = ()) -> list[int]:
        """The child processes, and in place of a fork server of multiprocessing the processes that it has started."""
        return [
            worker
            for child in self.children(pid, tids)
            for worker in (self.children(child) if self._is_fork_server(child) else [child])
        ]

    def _is_fork_server(self, pid: int) -> bool:
        return self._fork_servers.get(
            pid, self.now_ns(), lambda: _FORK_SERVER in small_file(f"{self.proc}/{pid}/cmdline")
        )

    def program(self, pid: int) -> str:
        """Pid and command of a process: its name, and the file that a shell or an interpreter runs."""
        name = small_file(f"{self.proc}/{pid}/comm").decode("utf-8", "replace").strip()
        words = small_file(f"{self.proc}/{pid}/cmdline").decode("utf-8", "replace").split("\0")
        script = next((word for word in words[1:] if word and not word.startswith("-")), "")
        if "-c" in words or not script.isprintable():
            script = ""
        return f"{name} {pid}{f' ({script[:60]})' if script else ''}" if name else ""

    def _pipe(self, pid: int, target: str, *, is_writing: bool) -> str:
        peers = self._peer_programs(pid, target, wants_reader=is_writing)
        if not peers:
            return "pipe that no other process reads" if is_writing else "pipe"
        return f"{'full pipe read by' if is_writing else 'pipe written by'} {', '.join(peers)}"

    def _peer_programs(self, pid: int, target: str, *, wants_reader: bool | None) -> list[str]:
        """At most two other processes that have one end of a pipe open: the reading end if wants_reader.

        Relatives are examined first, since most pipes lead to them. An end that is the standard input or output of a
        program comes before an end that a program has inherited. wants_reader: None for a socket, which has no ends.
        """

        def found() -> list[int]:
            peers = self._peers_among(self._relatives(pid), target, wants_reader)
            if peers:
                return peers
            everyone = (int(entry.name) for entry in self.proc.iterdir() if entry.name.isdecimal())
            return self._peers_among((other for other in everyone if other != pid), target, wants_reader)

        peers = self._peers.get((pid, target, bool(wants_reader)), self.now_ns(), found)
        started = dict.fromkeys(self._started(peer) for peer in peers)
        return [name for peer in started if (name := self.program(peer))]

    def _relatives(self, pid: int) -> list[int]:
        """The children of a process, their children, and its parent."""
        children = self.children(pid)
        parent = parent_pid(pid, self.proc)
        return [
            *children,
            *(grandchild for child in children for grandchild in self.children(child)),
            *([parent] if parent else ()),
        ]

    def _peers_among(self, pids: Iterable[int], target: str, wants_reader: bool | None) -> list[int]:
        ends = []
        for pid in pids:
            number = _descriptor(self.proc / str(pid), target, wants_reader)
            if number is not None:
                ends.append((number > _STANDARD, pid))
            if sum(not is_inherited for is_inherited, _ in ends) == _MAX_PEERS:
                break
        return [pid for _, pid in sorted(ends, key=lambda end: end[0])[:_MAX_PEERS]]

    def _socket(self, pid: int, target: str) -> str:
        inode = target[8:-1]
        if inode.isdigit() and (peer := unix_peer(int(inode))):
            return f"a Unix socket{self._of_peer(pid, str(peer))}"
        rows = self._connections(pid)
        for words in rows:
            if words[9] == inode.encode():
                if words[3] == _LISTENING:
                    return NEW_CONNECTIONS
                remote = [other[9].decode() for other in rows if (other[1], other[2]) == (words[2], words[1])]
                port = words[1].rpartition(b":")[2]
                is_server = any(
                    other[3] == _LISTENING and other[1].rpartition(b":")[2] == port for other in rows
                )
                way = CLIENT if is_server else "connection to"
                return f"{way} {_address(words[2].decode())}{self._of_peer(pid, *remote[:1])}"
        return NEW_CONNECTIONS if self._is_listening(pid, inode) else "a Unix socket"

    def _is_listening(self, pid: int, inode: str) -> bool:
        """Whether a Unix socket waits for clients: a flag in /proc/net/unix, in the namespace of the process."""
        for line in _file_bytes(self.proc / str(pid) / "net" / "unix").splitlines()[1:]:
            words = line.split()
            if len(words) > 6 and words[6] == inode.encode():
                return bool(int(words[3], 16) & _ACCEPTS)
        return False

    def _of_peer(self, pid: int, inode: str = "0") -> str:
        """ " of PROGRAM" for the other end of a socket, if another process of this machine has it open."""
        peers = self._peer_programs(pid, f"socket:[{inode}]", wants_reader=None) if inode != "0" else []
        return f" of {peers[0]}" if peers else ""

    def _holder(self, pid: int, descriptor: int) -> str:
        """The holder of a file lock that another process waits for."""
        try:
            inode = str((self.proc / str(pid) / "fd" / str(descriptor)).stat().st_ino)
        except OSError:
            return ""
        locks = [lock for lock in self._locks() if lock.inode == inode and lock.pid != pid]
        device = self._device(pid, small_file(f"{self.proc}/{pid}/fdinfo/{descriptor}")) if locks else ""
        holders = (f" held by {self._program_or_number(lock.pid)}" for lock in locks if lock.device == device)
        return next(holders, "")

    def _shared_lock(self, pid: int, address: int) -> str:
        """A lock in memory that other processes can share. (A thread that joins another thread also waits for an
        address that is not marked as private.)
        """
        is_shared = self._shared.get((pid, address), self.now_ns(), lambda: self._is_shared(pid, address))
        return SHARED_LOCK if is_shared else ""

    def _is_shared(self, pid: int, address: int) -> bool:
        for line in _file_bytes(self.proc / str(pid) / "maps").splitlines():
            span, _, rest = line.partition(b" ")
            begin, _, end = span.partition(b"-")
            if int(begin, 16) <= address < int(end, 16):
                return rest[3:4] == b"s"
        return False

    def _polled_lock(self, pid: int) -> str:
        """The lock that another process holds on a file that this process has open: SQLite and similar libraries sleep
        between two attempts to lock a file. Empty without such a lock.
        """
        others = [lock for lock in self._locks() if lock.is_exclusive and lock.pid != pid]
        files = self._open_files(pid) if others else {}
        for lock in others:
            link = files.get(lock.inode)
            if link is None:
                continue
            state = small_file(f"{self.proc}/{pid}/fdinfo/{link.name}")
            # A file that was locked before a fork is locked for the child as well.
            if b"lock:" not in state and self._device(pid, state) == lock.device:
                return f"{LOCK} {_target(link)} held by {self._program_or_number(lock.pid)}"
        return ""

    def _device(self, pid: int, descriptor_state: bytes) -> str:
        """The device of a descriptor's file system, as /proc/locks has it: stat's device differs on Btrfs and overlays.

        descriptor_state: the descriptor's file in fdinfo.
        """
        mount = next(
            (line.split()[1] for line in descriptor_state.splitlines() if line[:7] == b"mnt_id:"), b""
        )
        for line in _file_bytes(self.proc / str(pid) / "mountinfo").splitlines():
            words = line.split(maxsplit=3)
            if words[0] == mount:
                return words[2].decode()
        return ""

    def _open_files(self, pid: int) -> dict[str, Path]:
        """The regular files that a process has open, by inode: links to them."""

        def found() -> dict[str, Path]:
            files = {}
            for link in _entries(self.proc / str(pid) / "fd"):
                with suppress(OSError):
                    status = link.stat()
                    if stat.S_ISREG(status.st_mode):
                        files[str(status.st_ino)] = link
            return files

        return self._files.get(pid, self.now_ns(), found)

    def _locks(self) -> list[FileLock]:
        """The locks that are held, read again after _LOCKS_PAUSE times the duration of the last reading."""
        begin_ns = self.now_ns()
        if begin_ns >= self._locks_due_ns:
            self._held_locks = self._read_locks()
            end_ns = self.now_ns()
            self._locks_due_ns = end_ns + _LOCKS_PAUSE * (end_ns - begin_ns)
        return self._held_locks

    def _read_locks(self) -> list[FileLock]:
        rows = map(str.split, _file_bytes(self.proc / "locks").decode("ascii", "replace").splitlines())
        locks = []
        for words in rows:
            if "->" in words or len(words) < 6 or not words[4].lstrip("-").isdecimal():
                continue
            with suppress(ValueError):  # a lock without a file
                major, minor, inode = words[5].split(":")
                device = f"{int(major, 16)}:{int(minor, 16)}"
                locks.append(FileLock(int(words[4]), device, inode, words[3] == "WRITE"))
        return locks

    def _program_or_number(self, pid: int) -> str:
        return (self.program(pid) if pid > 0 else "") or f"process {pid}"


def _file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _descriptor(process_dir: Path, target: str, wants_reader: bool | None) -> int | None:
    """The lowest descriptor by which a process has a file open, for reading if wants_reader, otherwise for writing."""
    with suppress(OSError):
        numbers = [
            int(link.name)
            for link in (process_dir / "fd").iterdir()
            if _target(link) == target and wants_reader in (None, _reads(process_dir, link.name))
        ]
        return min(numbers, default=None)
    return None


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def _pid_of(pidfd_info: Path) -> int:
    """The process of a pidfd, by its row of fdinfo; 0 where it has ended."""
    words = _file_bytes(pidfd_info).partition(b"Pid:")[2].split()
    return max(int(words[0]), 0) if words else 0


def _target(link: Path) -> str:
    with suppress(OSError):
        return str(link.readlink())
    return ""


def _reads(process_dir: Path, descriptor: str) -> bool | None:
    """Whether a descriptor is open for reading; None where it has been closed."""
    flags = small_file(f"{process_dir}/fdinfo/{descriptor}").partition(b"flags:")[2].split()
    return int(flags[0], 8) & os.O_ACCMODE != os.O_WRONLY if flags else None


def _address(text: str) -> str:
    """Address and port of /proc/net/tcp."""
    address, _, port = text.partition(":")
    raw = bytes.fromhex(address)
    if len(raw) == 4:
        host = ".".join(str(byte) for byte in raw[::-1])
    else:
        words = [raw[i : i + 4][::-1] for i in range(0, 16, 4)]
        data = b"".join(words)
        is_mapped = data[:12] == bytes(10) + b"\xff\xff"
        host = ".".join(map(str, data[12:])) if is_mapped else f"[{data.hex(':', 2)}]"
    return f"{host}:{int(port, 16)}"
