"""The folder of a hub that shares its data: a cache of sealed files, whose owner is the bucket.

A file is fetched when it is first needed. Files that were not used for some minutes are removed, the least recently
used first, while the folder is larger than its limit or the disk is nearly full.
"""

import os
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from stallscope.errors import Busy, Overloaded, StallscopeError, StorageFailed
from stallscope.store.hub.damage import reason_unreadable, reason_unreadable_inside
from stallscope.store.hub.journal import Segment, line
from stallscope.store.hub.segments import FOLDER
from stallscope.store.shared.bucket import Bucket, ObjectMissing

_AT_ONCE = 8
_RETRY_S = 5.0
_MIN_FREE_BYTES = 1 << 30
"""Kept free, or a twentieth of a smaller disk: new files are on the disk before they are in the bucket."""
_UNUSED_S = 300.0
"""A query lists its files before it reads them."""


class SegmentCache:
    """The cached files of one process. Thread-safe."""

    def __init__(self, folder: Path, bucket: Bucket, *, max_bytes: int):
        self.folder, self.bucket, self._max_bytes = folder, bucket, max_bytes
        self.n_fetched = 0
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}
        self._fetches: dict[str, Future[None]] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="segment-fetch")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def fetch(self, segments: Sequence[Segment], *, within_s: float | None = None) -> None:
        """Make files readable in the folder. Raises Overloaded, StorageFailed.

        within_s: raises Busy after this time, and continues to fetch the files.
        """
        missing = [segment for segment in segments if not self._is_there(segment)]
        if missing and self.bucket.is_away():
            raise Overloaded("the bucket does not answer; send again later", _RETRY_S)
        if len(missing) == 1 and within_s is None:
            self._fetched(missing[0])
            return
        fetches = [self._fetch_of(segment) for segment in missing]
        waited = wait(fetches, timeout=within_s, return_when=FIRST_EXCEPTION)
        for fetch in waited.done:
            fetch.result()
        if waited.not_done:
            raise Busy(
                f"{len(waited.not_done):,} of the {len(segments):,} sealed files that the query needs are still being"
                " fetched from the bucket; retry in a moment, or select a shorter time"
            )

    def put(self, segment: Segment) -> None:
        """Store a new local file in the bucket; removes it if that fails. Raises Overloaded, StorageFailed."""
        try:
            self.bucket.put_file(segment.path, self.folder / segment.path)
        except StallscopeError:
            self.forget(segment)
            raise

    def forget(self, segment: Segment) -> None:
        """Remove the local copy."""
        with suppress(OSError):
            (self.folder / segment.path).unlink(missing_ok=True)

    def reason_unreadable_inside(self, segment: Segment) -> str:
        """Why an object is missing or damaged; a damaged local copy is fetched again first. Raises Overloaded."""
        try:
            self.fetch([segment])
            if not reason_unreadable_inside(self.folder, segment):
                return ""
            self.forget(segment)
            self.fetch([segment])
        except ObjectMissing as error:
            return str(error)
        return reason_unreadable_inside(self.folder, segment)

    def trim(self) -> int:
        """Remove files beyond the limit, and while the disk is nearly full. Returns their number."""
        entries: list[tuple[float, int, Path]] = []
        for path in (self.folder / FOLDER).rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    status = path.stat()
                    entries.append((status.st_mtime, status.st_size, path))
        disk = shutil.disk_usage(self.folder)
        excess = sum(size for _, size, _ in entries) - self._max_bytes
        excess = max(excess, min(_MIN_FREE_BYTES, disk.total // 20) - disk.free)
        n_removed = 0
        for used_s, size, path in sorted(entries):
            if excess <= 0 or time.time() - used_s < _UNUSED_S:
                break
            with suppress(OSError):
                path.unlink()
                excess, n_removed = excess - size, n_removed + 1
        return n_removed

    def _is_there(self, segment: Segment) -> bool:
        """Whether the file is complete; the use of the file is noted in its time."""
        path = self.folder / segment.path
        try:
            os.utime(path)
        except OSError:
            return False
        return path.stat().st_size == segment.n_bytes

    def _fetch_of(self, segment: Segment) -> "Future[None]":
        """The fetch of a file; queries that need the same file wait for the same fetch."""
        with self._lock:
            if fetch := self._fetches.get(segment.path):
                return fetch
            fetch = self._fetches[segment.path] = self._threads.submit(self._fetched, segment)

        def ended(_: "Future[None]") -> None:
            with self._lock:
                self._fetches.pop(segment.path, None)

        fetch.add_done_callback(ended)
        return fetch

    def _fetched(self, segment: Segment) -> None:
        with self._lock:
            one = self._fetching.setdefault(segment.path, threading.Lock())
        try:
            with one:
                if not self._is_there(segment):
                    self._write(segment, self.bucket.get(segment.path))
        finally:
            with self._lock:
                self._fetching.pop(segment.path, None)

    def _write(self, segment: Segment, content: bytes) -> None:
        path = self.folder / segment.path
        part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_bytes(content)
            part.rename(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise StorageFailed(f"cannot write {path}: {line(error)}; check free space") from error
        self.n_fetched += 1


class SlotFiles:
    """The sealed files of one slot."""

    def __init__(self, cache: SegmentCache, *, slot: int, epoch: int):
        """epoch: part of the names, so that two owners of a slot never write the same object.

        A name is never used again, not even by the same owner: its old object may still have to be deleted.
        """
        self._cache = cache
        self.folder, self.prefix = cache.folder, f"{slot}-{epoch}-{secrets.token_hex(4)}-"

    def opened(self, known: Sequence[Segment], *, latest_us: int) -> list[Path]:
        """Nothing: other slots have files in the same folder."""
        return []

    def is_away(self) -> bool:
        """Whether the bucket failed lately."""
        return self._cache.bucket.is_away()

    def put(self, segment: Segment) -> None:
        """Store a new file in the bucket. Raises Overloaded, StorageFailed."""
        self._cache.put(segment)

    def fetch(self, segments: Sequence[Segment]) -> None:
        """Make files readable in the folder. Raises Overloaded, StorageFailed."""
        self._cache.fetch(segments)

    def remove(self, segment: Segment) -> None:
        """Remove the local copy; the journal's transaction has noted the object, which sweep.py deletes."""
        self._cache.forget(segment)

    def reason_unreadable(self, segment: Segment) -> str:
        """Why a local copy is damaged; a damaged copy is removed, so that it is fetched again."""
        if (self.folder / segment.path).exists() and reason_unreadable(self.folder, segment):
            self._cache.forget(segment)
        return ""

    def reason_unreadable_inside(self, segment: Segment) -> str:
        """Why an object is damaged, after reading every row."""
        return self._cache.reason_unreadable_inside(segment)
