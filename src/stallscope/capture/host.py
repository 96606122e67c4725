"""Events of the machine that affect the traced processes, as rows of HOST_EVENTS.

    host = HostEvents(node=0, entries=program.entries)
    rows = host.rows(events, pids, now_ns)      # once a second, with the events since the last call

Most rows come from kernel events. Frequent events are summed up in the kernel and read here: moves between CPUs, short
stalls for memory, requests to disks, retransmits. Quotas are read from the files of the control groups.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stallscope.capture.gpu import drivers
from stallscope.capture.gpu.devices import Devices
from stallscope.capture.gpu.drivers import Driver
from stallscope.capture.probes.operations import SYMBOLS
from stallscope.capture.process.control_groups import ControlGroups
from stallscope.capture.process.sockets import SocketOwners, peer_address
from stallscope.capture.rows import records
from stallscope.events import kernel, layout
from stallscope.events.kernel import Kind
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import BY_SIGNAL, Category, HostKind, OffCpuFlag

Entries = Callable[[str, "np.dtype[Any]", "np.dtype[Any]"], tuple[Array, Array]]
"""Reads the keys and values of a BPF map: Program.entries."""

MIN_MIGRATIONS = 20
"""Migrations between CPUs per second from which a row is stored."""

_REQUESTS = {0: "read", 1: "write", 2: "flush", 3: "discard", 9: "write zeroes"}
"""REQ_OP_* of linux/blk_types.h."""

_SHORT_STALLS = (HostKind.RECLAIM, HostKind.COMPACTION)
_CORE_DUMPED = 0x80


@dataclass
class HostEvents:
    """node: the machine's number in the trace. entries: reads the kernel's maps. proc: mount point of procfs.

    drivers: the GPU driver of each major number.
    """

    node: int
    entries: Entries
    proc: Path = Path("/proc")
    devices: Devices = field(default_factory=Devices)
    drivers: Callable[[], Mapping[int, Driver]] = drivers.majors
    _groups: ControlGroups = field(init=False)
    _owners: SocketOwners = field(init=False)
    _descendants: set[int] = field(default_factory=set)
    _names: dict[int, bytes] = field(default_factory=dict)
    _sums: dict[str, tuple[dict[bytes, int], Array]] = field(default_factory=dict)
    _last_ns: int = 0

    def __post_init__(self) -> None:
        self._groups, self._owners = ControlGroups(self.proc), SocketOwners(self.proc)

    def rows(self, events: Array, pids: Iterable[int], now_ns: int) -> Array:
        """Rows of HOST_EVENTS for the time since the last call."""
        traced = list(pids)
        host_events = records.of_kind(events, Kind.HOST)
        off_cpu = records.of_kind(events, Kind.OFF_CPU)
        self._follow_processes(host_events)
        all_pids = [*traced, *(self._descendants - set(traced))]
        waits = self._waits(off_cpu)
        tables = [
            waits,
            self._event_rows(host_events[host_events["pid"] != 0]),
            self._kernel_thread_requests(host_events[host_events["pid"] == 0], waits),
            self._migrations_and_short_stalls(now_ns),
            self._disk_requests(now_ns),
            self._retransmits(all_pids, now_ns),
            self._throttling(traced, now_ns),
        ]
        self._last_ns = now_ns
        rows = np.concatenate(tables)
        rows["node"] = self.node
        ended_pids = host_events[host_events["op"] == HostKind.EXIT]["pid"].tolist()
        self._descendants -= set(ended_pids)
        alive = set(all_pids).difference(ended_pids)
        self._names = {pid: name for pid, name in self._names.items() if pid in alive}
        return rows[np.argsort(rows["ts_ns"], kind="stable")]

    def _follow_processes(self, host_events: Array) -> None:
        """Update the descendants of the traced processes, and the names of all processes."""
        starts = host_events[np.isin(host_events["op"], (HostKind.FORK, HostKind.EXEC))]
        self._descendants |= set(host_events[host_events["op"] == HostKind.FORK]["pid"].tolist())
        self._names |= dict(zip(starts["pid"].tolist(), starts["name"].tolist(), strict=True))

    def _name(self, pid: int) -> bytes:
        if pid not in self._names:
            try:
                self._names[pid] = (self.proc / str(pid) / "comm").read_bytes().rstrip(b"\n")
            except OSError:
                return b""
        return self._names[pid]

    def _event_rows(self, host_events: Array) -> Array:
        """Events that name their process."""
        rows = layout.empty(layout.HOST_EVENTS, len(host_events))
        for name in ("ts_ns", "duration_ns", "pid", "tid", "value", "by_pid", "by_comm", "cgroup"):
            rows[name] = host_events[name]
        rows["kind"] = host_events["op"]
        rows["comm"] = host_events["name"]
        is_end = rows["kind"] == HostKind.EXIT
        rows["detail"][is_end] = [
            b"core dumped" if v & _CORE_DUMPED else b"" for v in host_events["value"][is_end]
        ]
        rows["value"][is_end] = [exit_status(int(value)) for value in host_events["value"][is_end]]
        for i in np.flatnonzero(rows["kind"] == HostKind.BLOCK_IO).tolist():
            pid = int(host_events["pid"][i])
            rows["device"][i] = self.devices.name(int(host_events["device"][i]), pid).encode()
            rows["detail"][i] = _request(int(host_events["request"][i]))
            rows["comm"][i] = host_events["by_comm"][i]
        for i in np.flatnonzero(rows["kind"] == HostKind.DRIVER_CALL).tolist():
            rows["device"][i] = drivers.device_name(int(host_events["device"][i]), self.drivers()).encode()
            rows["detail"][i] = SYMBOLS[int(host_events["request"][i])].encode()
        return rows

    def _kernel_thread_requests(self, host_events: Array, waits: Array) -> Array:
        """Slow requests by kernel threads, assigned to the process that waited for the same disk at the same time."""
        rows = self._event_rows(host_events)
        begin, end = rows["ts_ns"], rows["ts_ns"] + rows["duration_ns"]
        waits = waits[(waits["kind"] == HostKind.FILE_WAIT) | (waits["kind"] == HostKind.MAJOR_FAULT)]
        keep = np.zeros(len(rows), bool)
        for wait in waits:
            is_same = (rows["device"] == wait["device"]) & ~keep
            meets = is_same & (begin < wait["ts_ns"] + wait["duration_ns"]) & (end > wait["ts_ns"])
            rows["pid"][meets], rows["comm"][meets] = wait["pid"], self._name(int(wait["pid"]))
            keep |= meets
        return rows[keep]

    def _waits(self, off_cpu: Array) -> Array:
        """Waits of GPU threads for a file, a socket, or memory that has to be read from a disk."""
        is_file = (off_cpu["category"] == Category.IO) & (off_cpu["device"] != 0)
        is_socket = (off_cpu["category"] == Category.NET) & (off_cpu["inode"] != 0) & (off_cpu["device"] == 0)
        is_fault = (off_cpu["flags"] & OffCpuFlag.IOWAIT > 0) & (off_cpu["syscall_nr"] == UNKNOWN)
        is_wait = is_file | is_socket | is_fault
        off_cpu = off_cpu[is_wait]
        rows = layout.empty(layout.HOST_EVENTS, len(off_cpu))
        for name in ("ts_ns", "duration_ns", "pid", "tid"):
            rows[name] = off_cpu[name]
        rows["kind"] = np.select(
            [is_file[is_wait], is_socket[is_wait]],
            [int(HostKind.FILE_WAIT), int(HostKind.SOCKET_WAIT)],
            int(HostKind.MAJOR_FAULT),
        )
        for row, event in zip(rows, off_cpu, strict=True):
            row["comm"] = self._name(int(event["pid"]))
            if row["kind"] == HostKind.FILE_WAIT:
                row["device"] = self.devices.name(int(event["device"]), int(event["pid"])).encode()
                row["file"] = self._path(event).encode()[:128]
            elif row["kind"] == HostKind.SOCKET_WAIT:
                row["file"], row["detail"] = _connection_text(_ends(event))
        return rows

    def _path(self, event: Any) -> str:
        """The path of a descriptor if it still refers to that file; otherwise the name that the kernel reported."""
        name: str = event["file"].decode("utf-8", "replace")
        try:
            link = self.proc / str(event["pid"]) / "fd" / str(event["fd"])
            if link.stat().st_ino == event["inode"]:
                return str(link.readlink()).removesuffix(" (deleted)")
        except OSError:
            pass  # it is closed, or its process has ended: the name remains
        return name

    def _migrations_and_short_stalls(self, now_ns: int) -> Array:
        rows = []
        for pid, growth in self._growth("host_sums", np.dtype("<u4"), kernel.HOST_SUMS):
            if growth["n_migrations"] >= MIN_MIGRATIONS:
                rows.append(self._sum_row(HostKind.MIGRATION, int(pid), int(growth["n_migrations"]), now_ns))
            for kind, n, ns in zip(_SHORT_STALLS, growth["n_short"], growth["short_ns"], strict=True):
                if n:
                    row = self._sum_row(kind, int(pid), int(n), now_ns)
                    row["duration_ns"], row["detail"] = ns, b"short ones"
                    rows.append(row)
        return _to_array(rows)

    def _disk_requests(self, now_ns: int) -> Array:
        rows = []
        for key, growth in self._growth("disk_sums", kernel.DISK_KEY, kernel.DISK_SUMS):
            row = self._sum_row(HostKind.BLOCK_IO, int(key["pid"]), int(growth["n_bytes"]), now_ns)
            row["device"] = self.devices.name(int(key["device"]), int(key["pid"])).encode()
            row["duration_ns"] = growth["ns"]
            row["detail"] = b"%d x %s; us: %s" % (
                growth["n"],
                _request(int(key["request"])),
                b" ".join(b"%d:%d" % (1 << i, n) for i, n in enumerate(growth["delays"].tolist()) if n),
            )
            rows.append(row)
        return _to_array(rows)

    def _retransmits(self, pids: list[int], now_ns: int) -> Array:
        entries = self._growth("resent", np.dtype("<u8"), kernel.RESENT)
        owners = self._owners.owners([int(inode) for inode, _ in entries], pids, now_ns)
        rows = []
        for inode, growth in entries:
            if pid := owners.get(int(inode)):
                row = self._sum_row(HostKind.RETRANSMIT, pid, int(growth["n"]), now_ns)
                row["ts_ns"] = max(int(growth["first_ns"]), self._last_ns)
                row["duration_ns"] = max(int(growth["last_ns"]) - int(row["ts_ns"]), 0)
                row["device"] = growth["interface"]
                row["file"], row["detail"] = _connection_text(growth["ends"])
                rows.append(row)
        return _to_array(rows)

    def _throttling(self, pids: list[int], now_ns: int) -> Array:
        rows = []
        for throttled in self._groups.new_throttling(pids, now_ns):
            for pid in throttled.pids:
                row = self._sum_row(HostKind.THROTTLED, pid, throttled.n, now_ns)
                row["ts_ns"], row["duration_ns"] = throttled.since_ns, throttled.ns
                row["file"], row["detail"] = throttled.group.name.encode()[:128], throttled.quota.encode()
                rows.append(row)
        return _to_array(rows)

    def _sum_row(self, kind: HostKind, pid: int, value: int, now_ns: int) -> Any:
        """A row for the sum since the last reading."""
        row = layout.empty(layout.HOST_EVENTS, 1)[0]
        row["ts_ns"] = self._last_ns or now_ns
        row["duration_ns"] = now_ns - row["ts_ns"]
        row["kind"], row["pid"], row["value"], row["comm"] = kind, pid, value, self._name(pid)
        return row

    def _growth(self, name: str, key: "np.dtype[Any]", value: "np.dtype[Any]") -> list[tuple[Any, Any]]:
        """The growth of a map's sums since the last reading: (key, growth) of each entry that has grown."""
        keys, values = self.entries(name, key, value)
        if not len(keys):
            self._sums.pop(name, None)
            return []
        words, counters = _words(values), _counter_words(value)
        key_bytes = keys.view(f"V{key.itemsize}").tolist()
        last_indices, last_words = self._sums.get(name, ({}, words[:0]))
        self._sums[name] = {key_of_entry: i for i, key_of_entry in enumerate(key_bytes)}, words
        index = np.array([last_indices.get(key_of_entry, -1) for key_of_entry in key_bytes])
        last_values, growth = np.zeros_like(words), words.copy()
        last_values[index >= 0] = last_words[index[index >= 0]]
        last_values[(words < last_values)[:, counters].any(axis=1)] = (
            0  # the entry was deleted and created again
        )
        growth[:, counters] -= last_values[:, counters]
        rows = np.ndarray(len(keys), value, buffer=growth)
        return [(keys[i], rows[i]) for i in np.flatnonzero(growth[:, counters].any(axis=1)).tolist()]


def exit_status(code: int) -> int:
    """The exit status as a shell reports it: the code, or 128 + the number of the signal that ended the process."""
    return BY_SIGNAL + (code & 0x7F) if code & 0x7F else code >> 8 & 0xFF


def _counter_words(struct: "np.dtype[Any]") -> list[int]:
    """Indices of the 64-bit words that hold counters: the unsigned words, which only grow."""
    words: list[int] = []
    for name in struct.names or ():
        field, offset = struct.fields[name][:2] if struct.fields else (struct, 0)
        if field.base == np.dtype("<u8"):
            words += range(offset // 8, (offset + field.itemsize) // 8)
    return words


def _words(values: Array) -> Array:
    """Structs (n,) as 64-bit words (n, words of a struct)."""
    return np.ndarray((len(values), values.dtype.itemsize // 8), "<u8", buffer=values)


def _connection_text(ends: Array) -> tuple[bytes, bytes]:
    """The other end of a connection and the socket's own port: as `file` and `detail` of a row."""
    peer = peer_address(ends)
    return peer.encode(), b"from port %d" % ends["own_port"] if ":" in peer else b""


def _ends(event: Any) -> Array:
    """kernel.ENDS, which shares its bytes with the file name."""
    return np.frombuffer(event["file"].ljust(24, b"\0"), kernel.ENDS)[0]


def _request(op: int) -> bytes:
    return _REQUESTS.get(op, f"request {op}").encode()


def _to_array(rows: list[Any]) -> Array:
    return np.array(rows, layout.dtype(layout.HOST_EVENTS))
