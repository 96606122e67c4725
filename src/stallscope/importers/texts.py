"""Text files from outside, plain or gzip: their first bytes, and the whole up to a limit."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stallscope.errors import BadTrace

HEAD_BYTES = 1 << 16
_WIDE_BYTES = 64 << 20  # longer texts lose their letters beyond ASCII, so that 400 MiB do not become 1.6 GiB
_ONLY_ASCII = bytes(range(128)) + b"?" * 128


def files_of(path: Path) -> list[Path]:
    """The file, or those of a folder, by name; none where the path cannot be read."""
    try:
        return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    except OSError:
        return []


def head_of(file: Path) -> bytes:
    """The first bytes, unpacked; empty where they cannot be read."""
    try:
        with _opened(file) as stream:
            return bytes(stream.read(HEAD_BYTES))
    except (OSError, EOFError, zlib.error):
        return b""


def begins_as_object(file: Path, words: Sequence[bytes]) -> bool:
    """Whether the text begins as a JSON object whose first bytes hold all these words."""
    head = head_of(file)
    return head.lstrip()[:1] == b"{" and all(word in head for word in words)


def text_of(file: Path, most_bytes: int) -> str:
    """The whole text, unpacked. Raises BadTrace where it cannot be read, or is longer than most_bytes."""
    try:
        with _opened(file) as stream:
            raw = stream.read(most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadTrace(f"{file} cannot be read ({error}): copy it again") from error
    if len(raw) > most_bytes:
        raise BadTrace(f"{file} is larger than {most_bytes >> 20} MiB unpacked: record a shorter time")
    if len(raw) > _WIDE_BYTES and not raw.isascii():  # one wide letter makes Python store four bytes for each
        raw = raw.translate(_ONLY_ASCII)
    return str(raw, "utf-8", "replace")


def _opened(file: Path) -> Any:
    return gzip.open(file) if file.name.endswith(".gz") else file.open("rb")
