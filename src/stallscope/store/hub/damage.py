"""Damage that the hub tolerates: unreadable segments, and commits that the write-ahead log lost.

A damaged segment stays in its folder and in the list, but is not served. A file restored from a copy is served again
after the next start. The last commit is noted in a separate file, so that a truncated log is detected.
"""

import json
import logging
import os
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stallscope.errors import StorageFailed, writing
from stallscope.store.hub.journal import Segment

_LOG = logging.getLogger(__name__)
_MAGIC = b"PAR1"
_MIN_BYTES = 12
_REMEDY = "move it aside and start the hub again"
POSITION_NAME, GAPS_NAME = "hub.position", "gaps.jsonl"
_POSITION = struct.Struct("<QQ")


@dataclass(frozen=True)
class Unreadable:
    """A sealed segment that is not served, and why."""

    segment: Segment
    reason: str


class Damage:
    """Known damage in one hub's folder. Thread-safe."""

    def __init__(self, folder: Path, *, needs_restart: bool = True):
        """needs_restart: a restored segment is served only after a restart."""
        self._folder, self._needs_restart = folder, needs_restart
        self._lock = threading.Lock()
        self._unreadable: dict[str, Unreadable] = {}
        self._gaps = _read_gaps(folder)
        self.n_unlisted = 0

    def set_aside(self, segment: Segment, reason: str) -> None:
        """Record an unreadable segment."""
        with self._lock:
            is_known = segment.path in self._unreadable
            self._unreadable[segment.path] = Unreadable(segment, reason)
        if not is_known:
            _LOG.error(
                "%s is set aside: %s; restore it from a copy%s",
                segment.path,
                reason,
                ", then restart the hub" if self._needs_restart else "",
            )

    def restored(self, segment: Segment) -> None:
        """A segment that was set aside is readable again."""
        with self._lock:
            self._unreadable.pop(segment.path, None)
        _LOG.info("%s is readable again", segment.path)

    def unreadable(self, tenant: str | None = None) -> list[Unreadable]:
        """The segments set aside; tenant: only that tenant's segments."""
        with self._lock:
            return [each for each in self._unreadable.values() if tenant in (None, each.segment.tenant)]

    @property
    def gaps(self) -> list[Mapping[str, int]]:
        """Lost commits: from_us and to_us (us since 1970), and found_us."""
        return list(self._gaps)

    def note_unlisted(self, paths: Sequence[Path]) -> None:
        """Record sealed files that the list lacks, because the list is older than the files."""
        self.n_unlisted = len(paths)
        if paths:
            _LOG.error(
                "%d sealed files are not in the hub's list, such as %s: the list is older than the files; stop the hub"
                " and run `stallscope hub check %s --repair`",
                len(paths),
                paths[0],
                self._folder,
            )

    def check_position(self, latest_us: int) -> None:
        """Compare the newest commit in the file with the last noted commit; a gap is logged and recorded.

        Raises StorageFailed.
        """
        noted_us = read_position(self._folder)
        if noted_us <= latest_us:
            return
        gap = {"from_us": latest_us, "to_us": noted_us, "found_us": time.time_ns() // 1000}
        self._gaps.append(gap)
        path = self._folder / GAPS_NAME
        with writing(path, _REMEDY), path.open("a") as file:
            file.write(json.dumps(gap) + "\n")
        _LOG.error("%s", lost_commits(latest_us, noted_us))

    def warning(self, tenant: str) -> str:
        """One sentence for a tenant whose answers lack rows; "" if they are complete."""
        parts = []
        if bad := self.unreadable(tenant):
            n_rows = sum(each.segment.n_rows for each in bad)
            parts.append(
                f"{len(bad)} damaged files with {n_rows:,} rows are set aside and missing from all answers."
            )
        if self.n_unlisted:
            parts.append(f"{self.n_unlisted} sealed files are not listed and missing from all answers.")
        if self._gaps:
            parts.append(f"The hub lost commits {len(self._gaps)} times when its log was damaged.")
        return " ".join(parts)


class Position:
    """Notes the last commit. Not synced: the note survives the end of the process, as the log itself does."""

    def __init__(self, folder: Path):
        """Raises StorageFailed."""
        path = folder / POSITION_NAME
        if path.exists() and not path.is_file():
            raise StorageFailed(f"{path} is not a file; {_REMEDY}")
        with writing(path, _REMEDY):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def note(self, received_us: int) -> None:
        """Note a commit that is on disk."""
        os.pwrite(self._fd, _POSITION.pack(received_us, ~received_us & (1 << 64) - 1), 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def lost_commits(latest_us: int, noted_us: int) -> str:
    """The commits that are missing: the newest that is stored (0: none), and the last that was noted."""
    if not latest_us:
        return "the file is empty, but commits were noted: all rows that were not sealed are missing"
    lost_s = (noted_us - latest_us) / 1e6
    return f"the write-ahead log lost its tail: the commits of its last {lost_s:.1f} s are missing"


def read_position(folder: Path) -> int:
    """The last noted commit, us since 1970; 0 if unknown."""
    path = folder / POSITION_NAME
    try:
        content = path.read_bytes() if path.is_file() else b""  # to read a pipe would block
        received_us, inverse = _POSITION.unpack(content[: _POSITION.size])
    except (OSError, struct.error):
        return 0
    return int(received_us) if received_us == ~inverse & (1 << 64) - 1 else 0


def reason_unreadable(folder: Path, segment: Segment) -> str:
    """Why a segment must be damaged, by its size, header and footer; "" if it may be intact."""
    path = folder / segment.path
    try:
        size = path.stat().st_size
        if size != segment.n_bytes:
            return f"it has {size:,} bytes instead of {segment.n_bytes:,}"
        with path.open("rb") as file:
            begin = file.read(4)
            file.seek(-8, os.SEEK_END)
            (n_footer,), end = struct.unpack("<I", file.read(4)), file.read(4)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if begin != _MAGIC or end != _MAGIC or not 0 < n_footer <= size - _MIN_BYTES:
        return "it is not a Parquet file"
    return ""


UNREADABLE = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)
"""Errors of pyarrow for damaged files: bytes of names that are not UTF-8 raise ValueError, wrong sizes MemoryError."""


def reason_unreadable_inside(folder: Path, segment: Segment) -> str:
    """As reason_unreadable(), after reading every row."""
    import pyarrow.parquet as pq

    if reason := reason_unreadable(folder, segment):
        return reason
    try:
        with pq.ParquetFile(folder / segment.path) as file:
            n_rows = sum(batch.num_rows for batch in file.iter_batches())
    except UNREADABLE as error:
        return f"its content is damaged ({(str(error).splitlines() or ['no reason'])[0][:100]})"
    return "" if n_rows == segment.n_rows else f"it has {n_rows:,} rows instead of {segment.n_rows:,}"


def _read_gaps(folder: Path) -> list[Mapping[str, int]]:
    path = folder / GAPS_NAME
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    except (OSError, ValueError):
        return []
