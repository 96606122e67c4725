"""A local Unix socket that sends changes of incidents to orchestrators and supervisors, as lines of JSON.

Any number of readers may connect; each gets the open incidents first. Only the owner of the agent (root) may connect.
"""

import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from stallscope.errors import CannotTrace

_MEMORY = frozenset({"out_of_memory", "cuda_alloc"})
_GPU = frozenset({"gpu_fault", "device_error", "gpu_slow", "gpu_throttled"})
_MAX_READERS = 32


class EventSocket:
    """An open socket. take() accepts lines of live/incident_lines.py from any thread."""

    def __init__(self, path: Path):
        """path: replaced if no process listens there. Raises CannotTrace."""
        self._path = path
        self._lock = threading.Lock()
        self._readers: list[socket.socket] = []
        self._open: dict[str, bytes] = {}
        self._listener = _bound(path)
        self._thread = threading.Thread(target=self._accept, name="event-socket", daemon=True)
        self._thread.start()

    def take(self, line: dict[str, Any]) -> None:
        """Send a change to all readers. A reader that falls behind is disconnected."""
        data = (json.dumps(message(line)) + "\n").encode()
        with self._lock:
            if line["state"] == "open":
                self._open[line["incident"]] = data
            else:
                self._open.pop(line["incident"], None)
            self._readers = [reader for reader in self._readers if _sent(reader, data)]

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            for reader in self._readers:
                reader.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            reader.setblocking(False)
            with self._lock:
                is_accepted = len(self._readers) < _MAX_READERS
                if is_accepted and all(_sent(reader, data) for data in self._open.values()):
                    self._readers.append(reader)
                else:
                    reader.close()


def message(line: dict[str, Any]) -> dict[str, Any]:
    """What a reader receives for a change of an incident."""
    verdict = line["verdict"]
    return {
        "type": message_type(line),
        "incident": line["incident"],
        "change": line["change"],
        "reason": line["reason"],
        "at_ns": line["at_ns"],
        **{name: verdict[name] for name in ("kind", "severity", "ranks", "nodes", "pids", "summary")},
        "cause": line["cause"],
        "confidence": verdict["confidence"],
        "recommendation": verdict["recommendation"],
    }


def message_type(line: dict[str, Any]) -> str:
    """straggler, hang, memory, gpu_fault or failure; the kind of the verdict for all others.

    resolved: the fault is over. ended: the data ended while the fault was there.
    """
    if line["state"] == "closed":
        return "resolved" if line["is_resolved"] else "ended"
    if line["cause"] in _MEMORY:
        return "memory"
    if line["cause"] in _GPU or line["kind"] == "device":
        return "gpu_fault"
    return str(line["kind"])


def _bound(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_socket() and not _is_served(path):
            path.unlink()
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(8)
    except OSError as error:
        listener.close()
        raise CannotTrace(f"--event-socket {path}: {error.strerror or error}; choose another path") from None
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _sent(reader: socket.socket, data: bytes) -> bool:
    """Whether all data fits into the reader's buffer; otherwise the reader is closed."""
    try:
        if reader.send(data) == len(data):
            return True
    except OSError:
        pass
    reader.close()
    return False
