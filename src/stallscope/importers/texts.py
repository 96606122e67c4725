"""Files of other tools, plain or compressed: the files of a folder, their first bytes, their text and their lines.

Compression is recognised by content (gzip, bzip2, xz, zstd, lz4, a zip with one member), never by the file's name.
"""

import bz2
import gzip
import io
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import IO

from stallscope.errors import BadTrace

Source = Path | Sequence[Path]
"""A file, a folder, or several of them."""

HEAD_BYTES = 1 << 16
LINE_BYTES = 1 << 16  # longer lines are read in parts
_BLOCK_BYTES = 1 << 20
_MAX_FILES = 200_000
_UTF_8 = "utf-8-sig"
_WIDE_BYTES = 64 << 20  # longer texts lose their letters beyond ASCII, so that 400 MiB do not become 1.6 GiB
_ONLY_ASCII = bytes(range(128)) + b"?" * 128
_DAMAGED = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
)
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])|[\x00\x0e\x0f\x7f]"
)
"""Terminal control sequences (ECMA-48) and bytes without a meaning in text."""


on_read: ContextVar[Callable[[int], object] | None] = ContextVar("on_read", default=None)
"""Called with each number of bytes that was read, unpacked, about once per MiB: for a progress bar."""


def _report(n_bytes: int) -> None:
    if call := on_read.get():
        call(n_bytes)


def files_of(source: Source) -> list[Path]:
    """The files themselves and those in folders at any depth, by name; none where a folder cannot be read."""
    paths = [source] if isinstance(source, Path) else source
    return [file for path in paths for file in (_below(path) if path.is_dir() else [path])]


def _below(folder: Path) -> list[Path]:
    """The files in a folder and its visible folders, in natural order."""
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files.extend(path for name in names if (path := Path(parent, name)).is_file())
        if len(files) > _MAX_FILES:
            raise BadTrace(f"{folder} contains more than {_MAX_FILES:,} files: give the folder of one job")
    return sorted(files, key=natural_order)


def natural_order(path: Path) -> list[tuple[int, str]]:
    """A sort key under which rank10 comes after rank9."""
    return [
        (int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d{1,18})", str(path))
    ]


def head_of(file: Path, n_bytes: int = HEAD_BYTES) -> bytes:
    """The first bytes, unpacked, with UTF-16 text as UTF-8; empty where they cannot be read."""
    if n_bytes > HEAD_BYTES:
        return _first_bytes(file, n_bytes)
    with suppress(OSError):
        state = file.stat()
        return _head(file, state.st_mtime_ns, state.st_size)
    return b""


def tail_of(file: Path, n_bytes: int) -> bytes:
    """The last bytes, unpacked; empty where they cannot be read, as of a file that ends within its compression."""
    try:
        with opened(file) as stream:
            if isinstance(stream, io.BufferedReader):
                stream.seek(0, os.SEEK_END)
                stream.seek(max(stream.tell() - n_bytes, 0))
                return stream.read()
            tail = b""
            while part := stream.read(HEAD_BYTES):
                tail = (tail + part)[-n_bytes:]
            return tail
    except _DAMAGED:
        return b""


def has_last_line(file: Path) -> bool:
    """Whether a text ends with the end of a line: a copy that broke off, or a paste, may not."""
    return tail_of(file, 2).strip(b"\0")[-1:] in (b"\n", b"\r")


@lru_cache(maxsize=256)
def _head(file: Path, mtime_ns: int, size: int) -> bytes:
    """mtime_ns, size: a changed file is read again."""
    return _first_bytes(file, HEAD_BYTES)


def _first_bytes(file: Path, n_bytes: int) -> bytes:
    raw = _raw_bytes(file, n_bytes)
    encoding = _encoding_of(raw)
    return raw if encoding == _UTF_8 else raw.decode(encoding, "ignore").encode()


def _raw_bytes(file: Path, n_bytes: int) -> bytes:
    try:
        with opened(file) as stream:
            return bytes(stream.read(n_bytes))
    except _DAMAGED:
        return b""


def _encoding_of(raw: bytes) -> str:
    """The encoding of a text by its first bytes: UTF-16 with a byte order mark or in ASCII letters, otherwise UTF-8."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    even, odd = raw[0:128:2], raw[1:128:2]
    if len(odd) >= 4 and b"\0" not in even and odd.count(b"\0") == len(odd):
        return "utf-16-le"
    return "utf-16-be" if len(odd) >= 4 and b"\0" not in odd and even.count(b"\0") == len(even) else _UTF_8


def begins_as_object(head: bytes, words: Sequence[bytes]) -> bool:
    """Whether a text begins as a JSON object whose first bytes hold all these words."""
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" and all(word in head for word in words)


def text_of(file: Path, max_bytes: int) -> str:
    """The whole text, unpacked. Raises BadTrace where it cannot be read, or is longer than max_bytes."""
    try:
        with opened(file) as stream:
            raw = stream.read(max_bytes + 1)
    except _DAMAGED as error:
        raise BadTrace(f"{file} cannot be read ({error}): copy it again") from error
    if len(raw) > max_bytes:
        raise BadTrace(f"{file} is larger than {max_bytes >> 20} MiB unpacked: record a shorter time")
    _report(len(raw))
    if (encoding := _encoding_of(raw[:128])) != _UTF_8:
        return raw.decode(encoding, "replace")
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    if len(raw) > _WIDE_BYTES and not raw.isascii():  # one wide letter makes Python store four bytes for each
        raw = raw.translate(_ONLY_ASCII)
    return str(raw, "utf-8", "replace")


def lines_of(file: Path) -> Iterator[str]:
    """The lines of a text one by one, without ends, colours and control characters.

    UTF-8, or UTF-16 with a byte order mark; damaged characters are replaced. A file that ends in the middle of its
    compression ends there.
    Raises BadTrace where the file cannot be opened.
    """
    try:
        stream = opened(file)
    except _DAMAGED as error:
        raise BadTrace(f"cannot read {file}: {error}; copy it again, or check its permissions") from error
    with stream:
        encoding = _encoding(file)
        reader = io.TextIOWrapper(stream, encoding, "replace", newline=None)
        n_bytes = 0
        while True:
            try:
                line = reader.readline(LINE_BYTES)
            except (*_DAMAGED, UnicodeError):
                return
            if not line:
                return
            n_bytes += len(line)
            if n_bytes >= _BLOCK_BYTES:
                _report(n_bytes)
                n_bytes = 0
            yield plain_line(line)


def plain_line(line: str) -> str:
    """A line without its end, colours and control characters."""
    line = line.rstrip("\r\n")
    return line if line.isprintable() else _ESCAPES.sub("", line)


def lines_with(file: Path, words: Sequence[bytes], is_open: Callable[[], bool]) -> Iterator[str]:
    """The lines of a text, without whole blocks that contain none of the words while is_open() is false.

    A block is about a megabyte. Raises BadTrace where the file cannot be opened.
    """
    if _encoding(file) != _UTF_8:
        yield from lines_of(file)
        return
    try:
        stream = opened(file)
    except _DAMAGED as error:
        raise BadTrace(f"cannot read {file}: {error}; copy it again, or check its permissions") from error
    with stream:
        rest = b""
        while block := _next_block(stream):
            _report(len(block))
            block = rest + block
            end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1 or (
                len(block) if len(block) > _BLOCK_BYTES else 0
            )
            block, rest = block[:end], block[end:]
            if is_open() or any(word in block for word in words):
                yield from map(plain_line, str(block, "utf-8", "replace").splitlines())
        yield from map(plain_line, str(rest, "utf-8", "replace").splitlines())


def _next_block(stream: IO[bytes]) -> bytes:
    try:
        return stream.read(_BLOCK_BYTES)
    except _DAMAGED:
        return b""


def _encoding(file: Path) -> str:
    return _encoding_of(_raw_bytes(file, 128))


def opened(file: Path) -> IO[bytes]:
    """The file as bytes, unpacked. Raises one of the errors of damaged files, see text_of()."""
    with file.open("rb") as stream:
        magic = stream.read(6)
    if magic[:2] == b"\x1f\x8b":
        return gzip.open(file)  # type: ignore[return-value]
    if magic[:3] == b"BZh":
        return bz2.open(file)
    if magic == b"\xfd7zXZ\x00":
        return lzma.open(file)
    if magic[:4] == b"\x28\xb5\x2f\xfd" or magic[:4] == b"\x04\x22\x4d\x18":
        import pyarrow as pa

        stream = pa.OSFile(str(file))
        return io.BufferedReader(pa.CompressedInputStream(stream, "zstd" if magic[:1] == b"\x28" else "lz4"))
    return _only_member(file) if magic[:4] == b"PK\x03\x04" else file.open("rb")


def _only_member(file: Path) -> IO[bytes]:
    archive = zipfile.ZipFile(file)
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) != 1:
        archive.close()
        raise zipfile.BadZipFile(f"the archive has {len(members)} files; unpack it into a folder first")
    return archive.open(members[0])


def archive_words(file: Path) -> str:
    """An archive of several files in words; "" for any other file."""
    with suppress(*_DAMAGED):
        with file.open("rb") as raw:
            if raw.read(4) == b"PK\x03\x04":
                with zipfile.ZipFile(file) as archive:
                    n = len([member for member in archive.infolist() if not member.is_dir()])
                return f"a zip archive of {n} files" if n != 1 else ""
        with opened(file) as stream:
            return "a tar archive" if stream.read(263)[257:262] == b"ustar" else ""
    return ""
