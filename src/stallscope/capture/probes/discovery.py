"""Finds the files that hold NCCL and CUDA functions and their processes, both running and started later.

Examines the mappings of processes, so virtual environments, conda, containers, deleted and renamed files are all found.
Statically linked code is found by its symbols, in processes that also use a GPU library.

A file is reported once, even if several names, mounts and containers show it. A probe on a file covers every process
that maps it, including later processes. So only the first process with a file has a gap, from its load of the library
to the attach: about 20 ms where the kernel reports mappings (mmap_watch.py); a scan of all processes every ten seconds
is the fallback. Elsewhere processes are scanned: about 50 ms after their start, up to a second if they are older than a
minute.
"""

import os
import re
from collections.abc import Iterable, KeysView
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from stallscope.capture.probes import elf
from stallscope.capture.probes.elf import FileKey, Image, NotElf, Symbol
from stallscope.capture.probes.mmap_watch import MmapWatch
from stallscope.capture.process.process_identity import parent_pid, small_file

_LIBRARY = re.compile(r"/lib(?:cudart|cuda|nccl|amdhip64|rccl)(?:-[0-9a-f]+)?\.so(?:\.[0-9.]+)?$")
_MAPPED = re.compile(rb"^(\S+) [r-][w-]x[ps] \S+ (\S+) (\d+) +(/.+)$", re.MULTILINE)
_MARKER_FUNCTIONS = ("ncclAllReduce", "cudaStreamSynchronize")
"""A file with one of these functions is attached to under any name; driver functions are always in libcuda."""

_DELETED = " (deleted)"
_SCAN_INTERVALS = ((10 * 10**9, 10 * 10**6), (60 * 10**9, 10**8), (1 << 62, 10**9))
"""The scan intervals of a process: (up to this age in ns, interval in ns)."""

_FALLBACK_EVERY_NS = 10**10
_LIST_EVERY_NS = 20 * 10**6
_LIST_AT_LEAST_EVERY_NS = 10**10
_MAX_FILES = 20_000
_UNUSED_NS = 600 * 10**9


class Mapping(NamedTuple):
    """A file that a process has mapped as code."""

    addresses: str  # "start-end" in hex, its name in map_files
    device: str
    inode: int
    name: str  # path in the view of the process
    is_deleted: bool


class Library(NamedTuple):
    """A file with functions to trace. `path` opens it while `pid` lives."""

    path: Path
    name: str
    pid: int
    key: FileKey
    is_static: bool  # its functions are local symbols, linked in


@dataclass
class _Process:
    """The known state of a process: its mappings are read again when its size has changed."""

    since_ns: int
    next_ns: int
    size: bytes = b""
    uses_gpu: bool = False
    keys: frozenset[FileKey] = frozenset()


@dataclass
class Discovery:
    """The state of the search for libraries: processes and files known so far.

    proc: mount point of procfs. pids: only these processes and their descendants; empty means all. ignored: processes
    that are left out, above all the tracer itself. mapped: reports mappings when they are made.
    """

    proc: Path = Path("/proc")
    pids: frozenset[int] = frozenset()
    ignored: frozenset[int] = frozenset()
    mapped: MmapWatch | None = None
    _processes: dict[int, _Process] = field(default_factory=dict)
    _out_of_scope: set[int] = field(default_factory=set)
    _used_ns: dict[FileKey, int] = field(default_factory=dict)
    _files: dict[tuple[str, int, str], Library | None] = field(default_factory=dict)
    _last_pid: bytes = b"-"
    _next_list_ns: int = 0
    _next_due_ns: int = 0

    def scan(self, now_ns: int) -> list[Library]:
        """The files found since the last scan. Cheap enough to be called 25 times a second."""
        if self.mapped:
            self._follow_events(self.mapped, now_ns)
        self._follow_processes(now_ns)
        if now_ns < self._next_due_ns:
            return []
        due = [pid for pid, process in self._processes.items() if process.next_ns <= now_ns]
        libraries = [library for pid in due for library in self._scan_process(pid, now_ns)]
        self._next_due_ns = min((process.next_ns for process in self._processes.values()), default=now_ns)
        return libraries

    def unused(self, now_ns: int) -> list[FileKey]:
        """The files that no process has had mapped for ten minutes; to be called from time to time."""
        mapped = frozenset[FileKey]().union(*(process.keys for process in self._processes.values()))
        self._used_ns |= dict.fromkeys(mapped & self._used_ns.keys(), now_ns)
        return [key for key, used_ns in self._used_ns.items() if now_ns - used_ns > _UNUSED_NS]

    def forget(self, key: FileKey) -> None:
        """Forget the file, so that it can be found again: the attach failed, or the probes were detached."""
        self._used_ns.pop(key, None)
        self._files.clear()
        self._rescan_all()

    def in_scope(self) -> KeysView[int]:
        """The running processes in scope: the chosen processes and their descendants."""
        return self._processes.keys()

    def gpu_processes(self) -> tuple[int, ...]:
        """Processes that have a GPU library mapped, whether they use it or not."""
        return tuple(pid for pid, process in self._processes.items() if process.uses_gpu)

    def _follow_events(self, mapped: MmapWatch, now_ns: int) -> None:
        """Scan the processes with relevant new mappings now; scan all processes if records were lost."""
        mappings, forks, n_lost = mapped.take()
        if n_lost:
            self._next_list_ns = 0
            self._rescan_all()
        for _, pid, parent in forks if self.pids else ():
            self._out_of_scope.discard(pid)
            if parent in self._processes:
                self._rescan(pid, now_ns)
        for pid, name in mappings:
            if name.startswith(b"//") or not name.startswith(b"/"):
                continue
            process = self._processes.get(pid)
            if (process and (process.uses_gpu or self.pids)) or _LIBRARY.search(
                os.fsdecode(name).removesuffix(_DELETED)
            ):
                self._rescan(pid, now_ns)

    def _rescan_all(self) -> None:
        self._next_due_ns = 0
        for process in self._processes.values():
            process.size, process.next_ns = b"", 0

    def _rescan(self, pid: int, now_ns: int) -> None:
        """Let the next scan examine the process, regardless of its known state."""
        if pid not in self._processes and not self._is_in_scope(pid):
            return
        process = self._processes.setdefault(pid, _Process(since_ns=now_ns, next_ns=now_ns))
        process.size, process.next_ns = b"", now_ns
        self._next_due_ns = now_ns

    def _follow_processes(self, now_ns: int) -> None:
        if self.mapped and now_ns < self._next_list_ns:
            return
        last_pid = _last_pid(self.proc)
        is_new = last_pid != self._last_pid or not last_pid
        if now_ns < self._next_list_ns + (0 if is_new else _LIST_AT_LEAST_EVERY_NS):
            return
        self._last_pid = last_pid
        self._next_list_ns = now_ns + (_FALLBACK_EVERY_NS if self.mapped else _LIST_EVERY_NS)
        running = {int(entry.name) for entry in os.scandir(self.proc) if entry.name.isdigit()}
        for pid in self._processes.keys() - running:
            del self._processes[pid]
        self._out_of_scope &= running
        for pid in running - self._processes.keys() - self._out_of_scope:
            if self._is_in_scope(pid):
                self._processes[pid] = _Process(since_ns=now_ns, next_ns=now_ns)
                self._next_due_ns = now_ns
            else:
                self._out_of_scope.add(pid)

    def _is_in_scope(self, pid: int) -> bool:
        """Whether the process is in scope. With chosen pids: one of them, or a descendant."""
        if pid in self.ignored or not self.pids or pid in self.pids:
            return pid not in self.ignored
        parent = parent_pid(pid, self.proc)
        while parent > 0 and parent not in self.pids and parent not in self._processes:
            parent = parent_pid(parent, self.proc) if parent not in self._out_of_scope else 0
        return parent > 0

    def _scan_process(self, pid: int, now_ns: int) -> list[Library]:
        process = self._processes[pid]
        age_ns = now_ns - process.since_ns
        interval_ns = next(interval_ns for limit_ns, interval_ns in _SCAN_INTERVALS if age_ns < limit_ns)
        process.next_ns = now_ns + (_FALLBACK_EVERY_NS if self.mapped else interval_ns)
        size = _size(self.proc, pid)
        if size == process.size:
            return []
        process.size = size
        mappings = code_mappings(self.proc, pid)
        process.uses_gpu = any(is_gpu_library(mapping) for mapping in mappings)
        if not process.uses_gpu and pid not in self.pids:
            return []
        libraries = [self._library(pid, mapping) for mapping in mappings]
        by_key = {library.key: library for library in libraries if library is not None}
        process.keys = frozenset(by_key)
        new_libraries = [library for key, library in by_key.items() if key not in self._used_ns]
        self._used_ns |= dict.fromkeys((library.key for library in new_libraries), now_ns)
        return new_libraries

    def _library(self, pid: int, mapping: Mapping) -> Library | None:
        """The mapped file as a library, examined at its first appearance; None if it has nothing to trace."""
        file = (mapping.device, mapping.inode, mapping.name)
        if file not in self._files:
            if len(self._files) >= _MAX_FILES:
                self._files.clear()
            self._files[file] = _find_library(self.proc, pid, mapping)
        return self._files[file]


def functions(image: Image, names: Iterable[str], *, is_static: bool) -> dict[str, Symbol]:
    """The functions among `names` in the file: exported functions, and local functions if linked statically."""
    names = tuple(names)
    exported = elf.exported_functions(image, names)
    return elf.local_functions(image, names) | exported if is_static else exported


def is_gpu_library(mapping: Mapping) -> bool:
    """Whether the name is libnccl, libcudart or libcuda, as a release or as a package manager's copy."""
    return _LIBRARY.search(mapping.name) is not None


def code_mappings(proc: Path, pid: int) -> list[Mapping]:
    """The files that a process has mapped as code, each once; empty if it has ended or is a kernel thread."""
    try:
        text = (proc / str(pid) / "maps").read_bytes()
    except OSError:
        return []
    mappings: dict[tuple[bytes, bytes], Mapping] = {}
    for addresses, device, inode, raw in _MAPPED.findall(text):
        name = os.fsdecode(raw.replace(b"\\012", b"\n"))
        is_deleted = name.endswith(_DELETED)
        plain = name.removesuffix(_DELETED)
        mapping = Mapping(addresses.decode(), device.decode(), int(inode), plain, is_deleted)
        mappings.setdefault((device, inode), mapping)
    return list(mappings.values())


def _find_library(proc: Path, pid: int, mapping: Mapping) -> Library | None:
    """The mapped file as a library, None if it holds nothing to trace or cannot be opened."""
    process_dir = proc / str(pid)
    by_name = process_dir / "root" / mapping.name.lstrip("/")
    by_address = process_dir / "map_files" / mapping.addresses
    for path in (by_address,) if mapping.is_deleted else (by_name, by_address):
        try:
            with elf.open_image(path) as image:
                return _library_from_image(image, path, pid, mapping)
        except (OSError, NotElf):
            continue
    return None


def _library_from_image(image: Image, path: Path, pid: int, mapping: Mapping) -> Library | None:
    if is_gpu_library(mapping) or elf.exported_functions(image, _MARKER_FUNCTIONS):
        return Library(path, mapping.name, pid, image.key, is_static=False)
    if elf.local_functions(image, _MARKER_FUNCTIONS):
        return Library(path, mapping.name, pid, image.key, is_static=True)
    return None


def _last_pid(proc: Path) -> bytes:
    """The newest process id, the last field of loadavg; empty if it cannot be read."""
    return small_file(f"{proc}/loadavg", 100).rstrip().rpartition(b" ")[2]


def _size(proc: Path, pid: int) -> bytes:
    """A value that changes when a process maps a file: its address space in pages."""
    return small_file(f"{proc}/{pid}/statm", 24).partition(b" ")[0]
