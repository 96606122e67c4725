"""The socket at which jobs set labels (step, epoch, phase), and the labels received.

A local stream socket: a JSON object per line, each answered with "ok" or the error. It belongs to the agent's user,
mode 0600; with a group 0660. The identity of the peer comes from the kernel (SO_PEERCRED), never from the message.
"""

import json
import os
import re
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stallscope.errors import CannotTrace

_LABEL = re.compile(r"[a-z][a-z0-9_.-]{0,31}")
_MAX_BYTES = 4096
_MAX_VALUE_LENGTH = 128
_MAX_CONNECTIONS = 256
_MAX_WAITING = 100_000
_OLDEST_NS = 60 * 10**9
_SO_PEERGROUPS = 59  # asm-generic/socket.h, since Linux 4.13


class Label(NamedTuple):
    """pid: the process that set the label, 0 for the whole machine."""

    ts_ns: int
    pid: int
    label: str
    value: str


class Peer(NamedTuple):
    """The identity of the peer, from the kernel."""

    pid: int
    uid: int
    groups: frozenset[int]


@dataclass
class Labels:
    """Listens from the start to close(). group: number of the group whose users may also set labels.

    Raises CannotTrace if another agent uses the path, or if the path belongs to another user.
    """

    path: Path
    group: int | None = None
    proc: Path = Path("/proc")
    now_ns: Callable[[], int] = time.monotonic_ns
    n_refused: int = 0
    _labels: list[Label] = field(default_factory=list)
    _lines: dict[int, tuple[socket.socket, Peer, bytearray]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._listening = _bound(self.path, self.group)
        self._listening.setblocking(False)
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="labels", daemon=True)
        self._thread.start()

    def take_labels(self) -> list[Label]:
        """The labels received since the last call."""
        with self._lock:
            labels, self._labels = self._labels, []
        return labels

    def close(self) -> None:
        """Stop listening; the socket is removed."""
        self._waker.send(b"x")
        self._thread.join()
        for line, _, _ in self._lines.values():
            line.close()
        self._selector.close()
        for each in (self._listening, self._waker, self._woken):
            each.close()
        with suppress(OSError):
            self.path.unlink()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    self._read(key.fd)

    def _accept(self) -> None:
        with suppress(OSError):
            line, _ = self._listening.accept()
            peer = _peer(line)
            if len(self._lines) >= _MAX_CONNECTIONS or not self._may_set(peer):
                self.n_refused += 1
                with suppress(OSError):
                    line.send(b"not allowed\n" if len(self._lines) < _MAX_CONNECTIONS else b"too many\n")
                line.close()
                return
            line.setblocking(False)
            self._lines[line.fileno()] = (line, peer, bytearray())
            self._selector.register(line, selectors.EVENT_READ)

    def _may_set(self, peer: Peer) -> bool:
        return peer.uid in (0, os.geteuid()) or (self.group is not None and self.group in peer.groups)

    def _read(self, fd: int) -> None:
        line, peer, rest = self._lines[fd]
        try:
            new = line.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            new = b""
        rest += new
        *whole, tail = rest.split(b"\n")
        answers = "".join(f"{self._answer(peer, bytes(whole_line))}\n" for whole_line in whole)
        rest[:] = tail
        is_over = not new or len(rest) > _MAX_BYTES
        if answers:
            try:
                is_over |= line.send(answers.encode()) < len(answers)
            except OSError:  # the peer does not read its answers
                is_over = True
        if is_over:
            self._selector.unregister(line)
            del self._lines[fd]
            line.close()

    def _answer(self, peer: Peer, line: bytes) -> str:
        """Accept one label. Returns "ok", or the error."""
        try:
            message = json.loads(line[:_MAX_BYTES])
            label, value = message["label"], message.get("value", "")
            pid, ts_ns = message.get("pid", peer.pid), message.get("ts_ns", self.now_ns())
        except (ValueError, KeyError, TypeError, AttributeError):
            return 'send {"label": ..., "value": ...}'
        if not isinstance(label, str) or not _LABEL.fullmatch(label):
            return "a label must be a word of at most 32 lowercase letters"
        if isinstance(value, bool) or not isinstance(value, str | int):
            return "a value must be text or a whole number"
        if not isinstance(pid, int) or not self._is_of(peer, pid):
            return f"not allowed to set labels of process {pid}"
        now_ns = self.now_ns()
        if not isinstance(ts_ns, int) or not now_ns - _OLDEST_NS <= ts_ns <= now_ns:
            ts_ns = now_ns
        with self._lock:
            if len(self._labels) >= _MAX_WAITING:
                return "too many labels are waiting; send fewer"
            self._labels.append(Label(ts_ns, pid, label, str(value)[:_MAX_VALUE_LENGTH]))
        return "ok"

    def _is_of(self, peer: Peer, pid: int) -> bool:
        """Whether a peer may set labels of a process: itself, a process of its user; local users for the machine."""
        if pid in (peer.pid, 0) or peer.uid in (0, os.geteuid()):
            return pid >= 0
        try:
            return (self.proc / str(pid)).stat().st_uid == peer.uid
        except OSError:
            return False


def _bound(path: Path, group: int | None) -> socket.socket:
    """A listening socket that gets its mode and group before it gets its name."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_path(path)
        with suppress(FileNotFoundError):
            part.unlink()
        listening.bind(str(part))
        part.chmod(0o600 if group is None else 0o660)
        if group is not None:
            os.chown(part, -1, group)
        listening.listen(64)
        part.rename(path)
    except OSError as error:
        listening.close()
        reason = error.strerror or str(error)
        raise CannotTrace(
            f"cannot listen at {path}: {reason}; choose another path with --annotate-socket"
        ) from error
    except CannotTrace:
        listening.close()
        raise
    return listening


def _check_path(path: Path) -> None:
    """Raises CannotTrace if another agent listens there, or if the file or folder belongs to another user."""
    folder = path.parent.stat()
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        raise CannotTrace(
            f"cannot listen at {path}: its folder is writable for all users; choose another path with --annotate-socket"
        )
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise CannotTrace(
            f"cannot listen at {path}: the file belongs to another user; choose another path with --annotate-socket"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        if trial.connect_ex(str(path)) == 0:
            raise CannotTrace(
                f"cannot listen at {path}: another agent listens there; choose another path with --annotate-socket"
            )


def _peer(line: socket.socket) -> Peer:
    pid, uid, gid = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        raw = line.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * 1024)
    except OSError:
        raw = b""
    groups = struct.unpack(f"{len(raw) // 4}i", raw)
    return Peer(pid, uid, frozenset({gid, *groups}))
