"""Offsets of functions in an ELF file, for attaching probes. Needs only the standard library and numpy.

Supports 64-bit little-endian ELF: exported symbols through DT_GNU_HASH (0.5 ms for a 450 MB library: only the pages
with the result are read), local symbols through .symtab (statically linked libraries), the build id, and how the kernel
will run the first instruction under a probe.

The file is untrusted and may change during the reading. It is read with pread, never mapped (truncation would kill a
process that has it mapped), and every value from it is bounded. Broken files raise NotElf.
"""

import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stallscope.events.layout import Array

_PT_LOAD, _PT_DYNAMIC, _PT_NOTE = 1, 2, 4
_DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 5, 6, 0x6FFFFEF5
_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_STT_OBJECT, _STT_FUNC = 1, 2
_NT_GNU_BUILD_ID = 3
_PF_X = 1

_MAX_HEADERS = 4096
_MAX_DYNAMIC_BYTES = 64 << 10
_MAX_NOTE_BYTES = 64 << 10
_MAX_CHAIN = 4096
_STRINGS_CHUNK_BYTES = 4 << 20
_SYMBOLS_CHUNK = 64 << 10
_MAX_SYMTAB_BYTES = 1 << 30
_MAX_FUNCTIONS_BYTES = 64 << 20

_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)


_FUNCTION = np.dtype([("value", "<u8"), ("size", "<u8"), ("position", "<u8")])


class NotElf(ValueError):
    """The file is not a regular 64-bit ELF file, or its tables are broken."""


class Symbol(NamedTuple):
    """A function: offset of its first byte in the file (what uprobes take), and its size in bytes."""

    offset: int
    size: int


class Variable(NamedTuple):
    """A variable: its address in the file (before the loader relocates it), and its size in bytes."""

    address: int
    size: int


class Entry(Enum):
    """How the kernel handles a probe on a function's first instruction."""

    EMULATED = "emulated"  # push or nop: cheap
    AFTER_ENDBR = "after endbr64"  # the instruction 4 bytes on is cheap
    STEPPED = "stepped"  # single-stepped: about five times the cost
    UNKNOWN = "unknown"  # other architecture


class _Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    address: int
    n_bytes: int


class FileKey(NamedTuple):
    """Identifies a file under any path, mount or container: overlayfs shows one inode under several devices."""

    inode: int
    n_bytes: int
    mtime_ns: int
    build_id: str


@dataclass(frozen=True)
class Image:
    """An opened ELF file. `path` leads to the same file while it is open, even if it is renamed or replaced."""

    fd: int
    path: str
    n_bytes: int
    machine: int
    segments: tuple[_Segment, ...]
    dynamic: dict[int, int]
    key: FileKey


@contextmanager
def open_image(path: Path | str) -> Iterator[Image]:
    """The ELF file at `path`, open inside the with block.

    Raises NotElf unless it is a regular ELF file, OSError if it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        yield _parse_image(fd)
    finally:
        os.close(fd)


def exported_functions(image: Image, names: Iterable[str]) -> dict[str, Symbol]:
    """The functions among `names` that the file exports."""
    table = image.dynamic.get(_DT_GNU_HASH)
    if table is None or _DT_SYMTAB not in image.dynamic or _DT_STRTAB not in image.dynamic:
        return {}
    lookup = _GnuHash.of(image, table)
    symbols = ((name, lookup.symbol(image, name)) for name in names)
    return {name: symbol for name, symbol in symbols if symbol is not None}


def variables(image: Image, names: Iterable[str]) -> dict[str, Variable]:
    """The variables among `names` that the file exports."""
    table = image.dynamic.get(_DT_GNU_HASH)
    if table is None or _DT_SYMTAB not in image.dynamic or _DT_STRTAB not in image.dynamic:
        return {}
    lookup = _GnuHash.of(image, table)
    rows = {name: lookup.row(image, name, _STT_OBJECT) for name in names}
    return {name: Variable(row[4], row[5]) for name, row in rows.items() if row is not None}


def address_of(image: Image, offset: int) -> int:
    """The address (before the loader moves it) of the file's byte at `offset`, which is code. Raises NotElf."""
    for segment in image.segments:
        start = segment.offset & ~0xFFF  # a mapping begins with a page, which another segment may share
        is_code = segment.kind == _PT_LOAD and segment.flags & _PF_X
        if is_code and start <= offset < segment.offset + segment.n_bytes:
            return segment.address - segment.offset + offset
    raise NotElf(f"no code contains the byte at {offset:#x}")


def contents(image: Image, address: int, n_bytes: int) -> bytes:
    """The content of the file for an address: constants, and initial values of variables. Raises NotElf."""
    offset = _file_offset(image, address)
    if offset is None:
        raise NotElf(f"no segment contains {address:#x}")
    return _read(image.fd, offset, n_bytes)


def local_functions(image: Image, names: Iterable[str]) -> dict[str, Symbol]:
    """The functions among `names` in the file's .symtab: statically linked code. Empty if stripped."""
    sections = _sections(image)
    table = next((section for section in sections if section[1] == _SHT_SYMTAB), None)
    if table is None or table[6] >= len(sections) or table[5] > _MAX_SYMTAB_BYTES:
        return {}
    strings = sections[table[6]]
    by_position = _string_positions(image, strings[4], strings[5], frozenset(names))
    if not by_position:
        return {}
    return _named_symbols(image, table[4], table[5], by_position)


def function_rows(image: Image) -> Array:
    """Address, size and name position of all functions in the file, unsorted: `value`, `size`, `position`.

    From .symtab if it exists, otherwise from .dynsym; empty without both, or if they are huge. Raises NotElf.
    """
    sections = _sections(image)
    for kind in (_SHT_SYMTAB, _SHT_DYNSYM):
        table = next((section for section in sections if section[1] == kind), None)
        if table is not None and table[6] < len(sections) and table[5] <= _MAX_FUNCTIONS_BYTES:
            return _function_rows(image, table[4], table[5], sections[table[6]][4])
    return np.empty(0, _FUNCTION)


def text_at(image: Image, position: int, max_bytes: int) -> bytes:
    """The zero-terminated text at a position in the file, at most max_bytes."""
    return _read_up_to(image.fd, position, max_bytes).partition(b"\0")[0]


def _function_rows(image: Image, start: int, n_bytes: int, strings: int) -> Array:
    chunks = []
    step = _SYMBOLS_CHUNK * _SYMBOL.itemsize
    for at in range(0, n_bytes // _SYMBOL.itemsize * _SYMBOL.itemsize, step):
        rows = np.frombuffer(_read(image.fd, start + at, min(step, n_bytes - at) // 24 * 24), _SYMBOL)
        rows = rows[(rows["section"] != 0) & ((rows["info"] & 15) == _STT_FUNC) & (rows["size"] > 0)]
        functions = np.empty(len(rows), _FUNCTION)
        functions["value"], functions["size"] = rows["value"], rows["size"]
        functions["position"] = rows["name"].astype("<u8") + np.uint64(strings)
        chunks.append(functions)
    return np.concatenate(chunks) if chunks else np.empty(0, _FUNCTION)


def probe_entry(image: Image, symbol: Symbol) -> Entry:
    """How a probe on the first instruction of the function will be run (x86-64)."""
    if image.machine != 62:
        return Entry.UNKNOWN
    code = _read_up_to(image.fd, symbol.offset, 9)
    if _is_emulated(code):
        return Entry.EMULATED
    if code.startswith(b"\xf3\x0f\x1e\xfa") and _is_emulated(code[4:]):
        return Entry.AFTER_ENDBR
    return Entry.STEPPED


def _is_emulated(code: bytes) -> bool:
    if not code:
        return False
    is_push = 0x50 <= code[0] <= 0x57 or (code[0] == 0x41 and 0x50 <= code[1] <= 0x57)
    return is_push or code[0] == 0x90 or code.startswith(b"\x0f\x1f\x44\x00\x00")


def _parse_image(fd: int) -> Image:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise NotElf("not a regular file")
    header = _read(fd, 0, 64)
    if header[:6] != b"\x7fELF\x02\x01":
        raise NotElf("not a 64-bit little-endian ELF file")
    (machine,) = struct.unpack_from("<H", header, 18)
    (table,) = struct.unpack_from("<Q", header, 32)
    entry_bytes, n = struct.unpack_from("<HH", header, 54)
    segments = _segments(fd, table, entry_bytes, n)
    build_id = _build_id(fd, segments)
    key = FileKey(status.st_ino, status.st_size, status.st_mtime_ns, build_id)
    path = f"/proc/self/fd/{fd}"
    return Image(fd, path, status.st_size, machine, segments, _dynamic(fd, segments), key)


def _read_up_to(fd: int, offset: int, n: int) -> bytes:
    if offset >= 1 << 62:
        raise NotElf(f"offset {offset:#x} lies outside the file")
    return os.pread(fd, n, offset)


def _read(fd: int, offset: int, n: int) -> bytes:
    data = _read_up_to(fd, offset, n)
    if len(data) < n:
        raise NotElf(f"the file ends within {n} bytes at {offset:#x}")
    return data


def _segments(fd: int, table: int, entry_bytes: int, n: int) -> tuple[_Segment, ...]:
    if n and (entry_bytes != 56 or n > _MAX_HEADERS):
        raise NotElf("broken program headers")
    data = _read(fd, table, entry_bytes * n) if n else b""
    rows = (struct.unpack_from("<IIQQQQQQ", data, i * entry_bytes) for i in range(n))
    return tuple(_Segment(row[0], row[1], row[2], row[3], row[5]) for row in rows)


def _dynamic(fd: int, segments: tuple[_Segment, ...]) -> dict[int, int]:
    """The dynamic section: tag -> value; empty for a static program."""
    segment = next((s for s in segments if s.kind == _PT_DYNAMIC), None)
    if segment is None:
        return {}
    n_bytes = min(segment.n_bytes, _MAX_DYNAMIC_BYTES) // 16 * 16
    rows = np.frombuffer(_read(fd, segment.offset, n_bytes), "<i8").reshape(-1, 2)
    end_rows = np.flatnonzero(rows[:, 0] == 0)
    return dict(rows[: end_rows[0] if len(end_rows) else None].tolist())


def _build_id(fd: int, segments: tuple[_Segment, ...]) -> str:
    for segment in segments:
        if segment.kind != _PT_NOTE:
            continue
        data = _read(fd, segment.offset, min(segment.n_bytes, _MAX_NOTE_BYTES))
        build_id = _build_id_in(data)
        if build_id:
            return build_id
    return ""


def _build_id_in(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name_bytes, desc_bytes, kind = struct.unpack_from("<III", notes, at)
        desc = at + 12 + (name_bytes + 3) // 4 * 4
        if kind == _NT_GNU_BUILD_ID and notes[at + 12 : at + 16] == b"GNU\0":
            return notes[desc : desc + desc_bytes].hex()
        at = desc + (desc_bytes + 3) // 4 * 4
    return ""


def _file_offset(image: Image, address: int, flags: int = 0) -> int | None:
    """The file offset of a virtual address, in a segment that has `flags`."""
    for segment in image.segments:
        inside = segment.address <= address < segment.address + segment.n_bytes
        if segment.kind == _PT_LOAD and inside and segment.flags & flags == flags:
            return address - segment.address + segment.offset
    return None


def _table_offset(image: Image, address: int) -> int:
    offset = _file_offset(image, address)
    if offset is None:
        raise NotElf(f"no segment contains the table at {address:#x}")
    return offset


def gnu_hash(name: bytes) -> int:
    """The hash of a symbol's name in DT_GNU_HASH."""
    hash_value = 5381
    for byte in name:
        hash_value = (hash_value * 33 + byte) & 0xFFFFFFFF
    return hash_value


class _GnuHash(NamedTuple):
    """The tables of an exported-symbol lookup, as offsets in the file."""

    bloom: int
    n_bloom: int
    shift: int
    buckets: int
    n_buckets: int
    first: int
    chain: int
    symbols: int
    strings: int

    @classmethod
    def of(cls, image: Image, address: int) -> "_GnuHash":
        start = _table_offset(image, address)
        n_buckets, first, n_bloom, shift = struct.unpack("<IIII", _read(image.fd, start, 16))
        if not n_buckets or not n_bloom:
            raise NotElf("empty symbol hash table")
        buckets = start + 16 + 8 * n_bloom
        symbols = _table_offset(image, image.dynamic[_DT_SYMTAB])
        strings = _table_offset(image, image.dynamic[_DT_STRTAB])
        chain = buckets + 4 * n_buckets
        return cls(start + 16, n_bloom, shift, buckets, n_buckets, first, chain, symbols, strings)

    def symbol(self, image: Image, name: str) -> Symbol | None:
        row = self.row(image, name, _STT_FUNC)
        offset = None if row is None else _file_offset(image, row[4], _PF_X)
        return None if row is None or offset is None else Symbol(offset, row[5])

    def row(self, image: Image, name: str, kind: int) -> tuple[int, ...] | None:
        """The symbol's row (name, info, other, section, address, bytes), if the file defines a symbol of this kind."""
        name_bytes = name.encode() + b"\0"
        hash_value = gnu_hash(name_bytes[:-1])
        if not self._may_have(image, hash_value):
            return None
        (index,) = struct.unpack("<I", _read(image.fd, self.buckets + 4 * (hash_value % self.n_buckets), 4))
        if index < self.first:
            return None
        for _ in range(_MAX_CHAIN):
            (link,) = struct.unpack("<I", _read(image.fd, self.chain + 4 * (index - self.first), 4))
            if link | 1 == hash_value | 1:
                row = self._matching_row(image, index, name_bytes, kind)
                if row is not None:
                    return row
            if link & 1:
                return None
            index += 1
        raise NotElf("endless chain in the symbol hash table")

    def _may_have(self, image: Image, hash_value: int) -> bool:
        word_at = self.bloom + 8 * ((hash_value // 64) % self.n_bloom)
        (word,) = struct.unpack("<Q", _read(image.fd, word_at, 8))
        return bool(word >> (hash_value % 64) & word >> ((hash_value >> self.shift) % 64) & 1)

    def _matching_row(self, image: Image, index: int, wanted: bytes, kind: int) -> tuple[int, ...] | None:
        row = struct.unpack("<IBBHQQ", _read(image.fd, self.symbols + 24 * index, 24))
        name_at, info, _, section, _, _ = row
        if not section or info & 15 != kind:
            return None
        return row if _read_up_to(image.fd, self.strings + name_at, len(wanted)) == wanted else None


def _sections(image: Image) -> list[tuple[int, ...]]:
    """Section headers: (name, type, flags, address, offset, bytes, link, info, alignment, entry bytes)."""
    header = _read(image.fd, 0, 64)
    (table,) = struct.unpack_from("<Q", header, 40)
    entry_bytes, n = struct.unpack_from("<HH", header, 58)
    if not table or not n:
        return []
    if entry_bytes != 64:
        raise NotElf("broken section headers")
    data = _read(image.fd, table, entry_bytes * n)
    return [struct.unpack_from("<IIQQQQIIQQ", data, i * entry_bytes) for i in range(n)]


def _string_positions(image: Image, start: int, n_bytes: int, names: frozenset[str]) -> dict[int, str]:
    """Positions in a string table that hold any of the names, including the tail of a longer name."""
    longest = max(map(len, names), default=0) + 1
    heads = {name[:4].encode() for name in names}
    names_at: dict[int, str] = {}
    end = min(n_bytes, image.n_bytes)
    for at in range(0, end, _STRINGS_CHUNK_BYTES):
        chunk = _read_up_to(image.fd, start + at, min(_STRINGS_CHUNK_BYTES + longest, end - at))
        for head in heads:
            for position, text in _strings_with(chunk, head, longest):
                if text in names:
                    names_at[at + position] = text
    return names_at


def _strings_with(chunk: bytes, head: bytes, longest: int) -> Iterator[tuple[int, str]]:
    at = chunk.find(head)
    while at >= 0:
        end = chunk.find(b"\0", at, at + longest)
        if end > 0:
            yield at, chunk[at:end].decode("latin-1")
        at = chunk.find(head, at + 1)


def _named_symbols(image: Image, start: int, n_bytes: int, by_position: dict[int, str]) -> dict[str, Symbol]:
    positions = np.array(sorted(by_position), "<u4")
    symbols: dict[str, Symbol] = {}
    step = _SYMBOLS_CHUNK * _SYMBOL.itemsize
    for at in range(0, n_bytes // _SYMBOL.itemsize * _SYMBOL.itemsize, step):
        rows = np.frombuffer(_read(image.fd, start + at, min(step, n_bytes - at) // 24 * 24), _SYMBOL)
        is_function = (rows["section"] != 0) & ((rows["info"] & 15) == _STT_FUNC)
        for row in rows[is_function & np.isin(rows["name"], positions)]:
            offset = _file_offset(image, int(row["value"]), _PF_X)
            if offset is not None:
                symbols[by_position[int(row["name"])]] = Symbol(offset, int(row["size"]))
    return symbols
