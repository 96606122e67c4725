"""libbpf through ctypes, and the bpf() system call for the two link types that old versions of it lack."""

import ctypes as c
import errno
import os
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stallscope.errors import CannotTrace

UPROBE_MULTI = 48
UPROBE_SESSION = 57
"""Attach types (linux/bpf.h, 6.6 and 6.13)."""

_BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}
_LINK_CREATE, _ENABLE_STATS, _ITERATOR_CREATE = 28, 32, 33
_TRACE_ITERATOR = 28
_MAX_OUTPUT_BYTES = 1 << 16
_MULTI_RETURN = 1
_PATTERNS = {
    "bpf_object__open_file": (c.c_void_p, (c.c_char_p, c.c_void_p)),
    "bpf_object__load": (c.c_int, (c.c_void_p,)),
    "bpf_object__close": (None, (c.c_void_p,)),
    "bpf_object__next_program": (c.c_void_p, (c.c_void_p, c.c_void_p)),
    "bpf_object__next_map": (c.c_void_p, (c.c_void_p, c.c_void_p)),
    "bpf_program__name": (c.c_char_p, (c.c_void_p,)),
    "bpf_program__fd": (c.c_int, (c.c_void_p,)),
    "bpf_program__set_autoload": (c.c_int, (c.c_void_p, c.c_bool)),
    "bpf_program__set_expected_attach_type": (c.c_int, (c.c_void_p, c.c_int)),
    "bpf_program__attach": (c.c_void_p, (c.c_void_p,)),
    "bpf_program__attach_uprobe_opts": (
        c.c_void_p,
        (c.c_void_p, c.c_int, c.c_char_p, c.c_size_t, c.c_void_p),
    ),
    "bpf_link__destroy": (c.c_int, (c.c_void_p,)),
    "bpf_map__name": (c.c_char_p, (c.c_void_p,)),
    "bpf_map__fd": (c.c_int, (c.c_void_p,)),
    "bpf_map__set_max_entries": (c.c_int, (c.c_void_p, c.c_uint32)),
    "bpf_map__initial_value": (c.c_void_p, (c.c_void_p, c.POINTER(c.c_size_t))),
    "bpf_map_lookup_elem": (c.c_int, (c.c_int, c.c_void_p, c.c_void_p)),
    "bpf_map_update_elem": (c.c_int, (c.c_int, c.c_void_p, c.c_void_p, c.c_uint64)),
    "bpf_map_delete_elem": (c.c_int, (c.c_int, c.c_void_p)),
    "bpf_map_get_next_key": (c.c_int, (c.c_int, c.c_void_p, c.c_void_p)),
    "libbpf_num_possible_cpus": (c.c_int, ()),
    "libbpf_set_print": (c.c_void_p, (c.c_void_p,)),
}
_SHIPPED = Path(__file__).parent.parent / "lib" / os.uname().machine
_DEPENDENCIES = ("libz.so.1", "libelf.so.1")
_PRINT = c.CFUNCTYPE(c.c_int, c.c_int, c.c_void_p, c.c_void_p)


class _UprobeOptions(c.Structure):
    _fields_ = (
        ("sz", c.c_size_t),
        ("ref_ctr_offset", c.c_size_t),
        ("bpf_cookie", c.c_uint64),
        ("retprobe", c.c_bool),
        ("func_name", c.c_char_p),
    )


class KernelRefused(CannotTrace):
    """The kernel refused a program or a link; `errno` has the reason if there is one. program: the failed program."""

    def __init__(self, message: str, errno: int = 0, program: str = ""):
        super().__init__(message)
        self.errno, self.program = errno, program


class MultiLink(NamedTuple):
    """A uprobe_multi or session link."""

    fd: int

    def close(self) -> None:
        """Detach."""
        os.close(self.fd)


def _load_library(name: str) -> Any:
    """The library with the types of its functions. Raises OSError; AttributeError for a version without them."""
    library = c.CDLL(name, use_errno=True)
    for function, (return_type, arguments) in _PATTERNS.items():
        symbol = getattr(library, function)
        symbol.restype, symbol.argtypes = return_type, arguments
    return library


class Library:
    """The functions of libbpf. `messages` holds its output since the last Object was opened."""

    def __init__(self, name: str = "libbpf.so.1", shipped: Path = _SHIPPED):
        """shipped: folder with a copy of libbpf and its dependencies. Raises CannotTrace."""
        try:
            self._library = _load_library(name)
        except (OSError, AttributeError) as error:
            try:
                for dependency in _DEPENDENCIES:
                    c.CDLL(str(shipped / dependency), mode=c.RTLD_GLOBAL)
                self._library = _load_library(str(shipped / name))
            except (OSError, AttributeError):
                raise CannotTrace(
                    f"cannot load {name} ({error}): install libbpf 1.0 or newer (Debian, Ubuntu: libbpf1)"
                ) from None
        self._libc = c.CDLL(None, use_errno=True)
        self._number = _BPF_SYSCALL[os.uname().machine]
        self.messages: list[str] = []
        self._print = _PRINT(self._append_message)
        self._library.libbpf_set_print(c.cast(self._print, c.c_void_p))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def bpf(self, command: int, attributes: bytes | c.Array[c.c_char]) -> int:
        """The system call. Raises OSError."""
        size = max(len(attributes), 128)
        is_bytes = isinstance(attributes, bytes)
        buffer = c.create_string_buffer(bytes(attributes), size) if is_bytes else attributes
        result = int(self._libc.syscall(self._number, command, buffer, size if is_bytes else len(attributes)))
        if result < 0:
            raise OSError(c.get_errno(), os.strerror(c.get_errno()))
        return result

    def failed_programs(self) -> list[str]:
        """The programs that could not be loaded, from the output of libbpf."""
        return re.findall(r"prog '(\w+)': (?:BPF program load failed|failed to)", "".join(self.messages))

    def _append_message(self, _level: int, form: int, arguments: int) -> int:
        """libbpf's printf. Its messages come in pieces, so the format is expanded by C's own vsnprintf."""
        text = c.create_string_buffer(4096)
        self._libc.vsnprintf(text, c.c_size_t(len(text)), c.c_void_p(form), c.c_void_p(arguments))
        self.messages.append(text.value.decode(errors="replace"))
        del self.messages[:-200]
        return 0


class Object:
    """An opened BPF object: choose its programs, load, attach. Close frees its resources."""

    def __init__(self, library: Library, path: Path):
        self._library = library
        library.messages.clear()
        self._handle = library.bpf_object__open_file(os.fsencode(path), None)
        if not self._handle:
            raise CannotTrace(
                f"{path}: cannot be opened ({os.strerror(c.get_errno())}); build it with `make bpf`"
            )
        self.programs = self._handles(library.bpf_object__next_program, library.bpf_program__name)
        self.maps = self._handles(library.bpf_object__next_map, library.bpf_map__name)

    def choose(self, names: Iterable[str]) -> None:
        """Load these programs and no others."""
        chosen = set(names)
        for name, program in self.programs.items():
            self._library.bpf_program__set_autoload(program, name in chosen)

    def expect(self, program: str, attach_type: int) -> None:
        """Load the program for this kind of link."""
        self._library.bpf_program__set_expected_attach_type(self.programs[program], attach_type)

    def resize(self, map_name: str, n_entries: int) -> None:
        """Entries of a map, bytes of a ring."""
        self._library.bpf_map__set_max_entries(self.maps[map_name], n_entries)

    def set_constant(self, offset: int, value: bytes) -> None:
        """Write into .rodata before the load."""
        name = next(name for name in self.maps if name.endswith(".rodata"))
        size = c.c_size_t()
        start = self._library.bpf_map__initial_value(self.maps[name], c.byref(size))
        if offset + len(value) > size.value:
            raise ValueError(f"offset {offset} lies outside .rodata")
        c.memmove(start + offset, value, len(value))

    def load(self) -> None:
        """Create the maps, verify the programs. Raises KernelRefused."""
        error = -self._library.bpf_object__load(self._handle)
        if error:
            raise KernelRefused(f"the kernel refused the programs: {self._reason(error)}", error)

    def map_fd(self, name: str) -> int:
        """File descriptor of a loaded map."""
        return int(self._library.bpf_map__fd(self.maps[name]))

    def program_fd(self, name: str) -> int:
        """File descriptor of a loaded program."""
        return int(self._library.bpf_program__fd(self.programs[name]))

    def attach(self, program: str) -> int:
        """Attach to the tracepoint that its section names. Returns the link, for detach(). Raises KernelRefused."""
        link = self._library.bpf_program__attach(self.programs[program])
        if not link:
            error = c.get_errno()
            raise KernelRefused(f"cannot attach {program}: {self._reason(error)}", error, program)
        return int(link)

    def attach_uprobe(self, program: str, path: str, offset: int, cookie: int, *, is_return: bool) -> int:
        """One perf-event link, for kernels without multi links. Raises KernelRefused."""
        options = _UprobeOptions(c.sizeof(_UprobeOptions), 0, cookie, is_return, None)
        link = self._library.bpf_program__attach_uprobe_opts(
            self.programs[program], -1, os.fsencode(path), offset, c.byref(options)
        )
        if not link:
            error = c.get_errno()
            raise KernelRefused(f"cannot attach to {path} at {offset:#x}: {self._reason(error)}", error)
        return int(link)

    def detach(self, link: int) -> None:
        """Undo attach() or attach_uprobe()."""
        self._library.bpf_link__destroy(link)

    def multi_link(
        self,
        program: str,
        path: str,
        offsets: Sequence[int],
        cookies: Sequence[int],
        *,
        is_session: bool,
        is_return: bool,
        pid: int = 0,
    ) -> MultiLink:
        """One link for many offsets in a file, in one process if pid is given. Raises KernelRefused."""
        n = len(offsets)
        name = c.create_string_buffer(os.fsencode(path))
        locations, values = (c.c_uint64 * n)(*offsets), (c.c_uint64 * n)(*cookies)
        attributes = struct.pack(
            "=IIIIQQQQIIII",
            *(self.program_fd(program), 0, UPROBE_SESSION if is_session else UPROBE_MULTI, 0),
            *(c.addressof(name), c.addressof(locations), 0, c.addressof(values)),
            *(n, _MULTI_RETURN if is_return else 0, pid, 0),
        )
        try:
            return MultiLink(self._library.bpf(_LINK_CREATE, attributes))
        except OSError as error:
            raise KernelRefused(f"cannot attach to {path}: {error.strerror}", error.errno or 0) from None

    def thread_output(self, program: str, tid: int) -> bytes:
        """The output of an iterator over threads for one thread; empty without such a thread. Raises KernelRefused.

        Before Linux 6.1 the kernel passes all threads to the program, which has to choose.
        """
        link_info = c.create_string_buffer(struct.pack("=III", tid, 0, 0))
        attributes = struct.pack(
            "=IIIIQI", self.program_fd(program), 0, _TRACE_ITERATOR, 0, c.addressof(link_info), 12
        )
        fds: list[int] = []
        try:
            fds.append(self._library.bpf(_LINK_CREATE, attributes))
            fds.append(self._library.bpf(_ITERATOR_CREATE, struct.pack("=II", fds[0], 0)))
            output = b""
            while len(output) < _MAX_OUTPUT_BYTES and (chunk := os.read(fds[1], _MAX_OUTPUT_BYTES)):
                output += chunk
            return output
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.EINVAL):  # the thread has ended
                return b""
            raise KernelRefused(f"{program}: {error.strerror}", error.errno or 0) from None
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Free maps and programs; links are detached by their own close."""
        if self._handle:
            self._library.bpf_object__close(self._handle)
            self._handle = None

    def _handles(self, next_handle: Any, name: Any) -> dict[str, int]:
        handles, handle = {}, next_handle(self._handle, None)
        while handle:
            handles[name(handle).decode()] = handle
            handle = next_handle(self._handle, handle)
        return handles

    def _reason(self, error: int) -> str:
        """The error in words, with the first error message of libbpf."""
        lines = [
            line
            for text in self._library.messages
            for line in text.splitlines()
            if line.startswith("libbpf: ")
        ]
        errors = [line for line in lines if "failed" in line or "Error" in line or "error" in line]
        return os.strerror(error) + (f" ({errors[0].removeprefix('libbpf: ')})" if errors else "")


def statistics_fd(library: Library) -> int:
    """While this file descriptor is open, the kernel counts runs and time of all BPF programs."""
    return library.bpf(_ENABLE_STATS, bytes(4))
