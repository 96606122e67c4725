"""The folder of a hub that shares its data: a cache of sealed files, whose owner is the bucket.

A file is fetched when it is first needed. Files that were not used for some minutes are removed, the least recently
used first, while the folder is larger than its limit or the disk is nearly full.
"""

import math
import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from stallscope.errors import Busy, OverLimits, Overloaded, StallscopeError, StorageFailed
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
        self._fetches: dict[str, Future[None]] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="segment-fetch")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def fetch(self, segments: Sequence[Segment]) -> None:
        """Make files readable in the folder. Raises Overloaded, StorageFailed."""
        self._fetch_all(self._missing(segments), until_s=math.inf)

    def fetch_for_query(self, segments: Sequence[Segment], *, until_s: float) -> None:
        """The same for a query, until a moment (monotonic). Raises Busy after it, and OverLimits for too many bytes.

        Files that have arrived stay: the next attempt needs fewer.
        """
        missing = self._missing(segments)
        if missing:
            n_bytes = sum(segment.n_bytes for segment in missing)
            self._check_room(n_bytes, n_there=sum(segment.n_bytes for segment in segments) - n_bytes)
        if n_left := self._fetch_all(missing, until_s=until_s):
            raise Busy(
                f"{n_left:,} of the {len(segments):,} sealed files that the query needs have not arrived from the"
                " bucket yet; retry in a moment, or select a shorter time"
            )

    def _missing(self, segments: Sequence[Segment]) -> list[Segment]:
        missing = [segment for segment in segments if not self._is_there(segment)]
        if missing and self.bucket.is_away():
            raise Overloaded("the bucket does not answer; send again later", _RETRY_S)
        return missing

    def _fetch_all(self, missing: Sequence[Segment], *, until_s: float) -> int:
        """Fetch files, a few at a time, so that others get their turn. Returns the number of files that are missing."""
        waiting, under_way = deque(missing), set[Future[None]]()
        while waiting or under_way:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            while waiting and len(under_way) < _AT_ONCE:
                under_way.add(self._fetch_of(waiting.popleft()))
            timeout_s = None if math.isinf(left_s) else left_s
            done, under_way = wait(under_way, timeout=timeout_s, return_when=FIRST_COMPLETED)
            for fetch in done:
                fetch.result()
        return len(waiting) + len(under_way)

    def _check_room(self, n_bytes: int, *, n_there: int) -> None:
        """n_there: bytes of files that the query also needs, so that they stay."""
        if n_bytes > (room := min(self._max_bytes - n_there, self._free_bytes())):
            self.trim()
            room = min(self._max_bytes - n_there, self._free_bytes())
        if n_bytes > room:
            raise OverLimits(
                f"the query needs {n_bytes / 1e6:,.1f} MB of sealed files from the bucket, and the hub's cache has room"
                f" for {max(0, room) / 1e6:,.1f} MB; select a shorter time, or one cluster"
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
        excess = sum(size for _, size, _ in entries) - self._max_bytes
        excess = max(excess, -self._free_bytes())
        n_removed = 0
        for used_s, size, path in sorted(entries):
            if excess <= 0 or time.time() - used_s < _UNUSED_S:
                break
            with suppress(OSError):
                path.unlink()
                excess, n_removed = excess - size, n_removed + 1
        return n_removed

    def _free_bytes(self) -> int:
        """Free space of the disk beyond the reserve, negative if the reserve is used."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it may have been deleted
        disk = shutil.disk_usage(self.folder)
        return disk.free - min(_MIN_FREE_BYTES, disk.total // 20)

    def _is_there(self, segment: Segment) -> bool:
        """Whether the file is complete; the use of the file is noted in its time."""
        path = self.folder / segment.path
        try:
            os.utime(path)
        except OSError:
            return False
        return path.stat().st_size == segment.n_bytes

    def _fetch_of(self, segment: Segment) -> "Future[None]":
        """The fetch of a file; callers that need the same file wait for the same fetch."""
        with self._lock:
            fetch = self._fetches.get(segment.path)
            if fetch and not fetch.done():
                return fetch
            fetch = self._fetches[segment.path] = self._threads.submit(self._fetched, segment)

        def ended(_: "Future[None]") -> None:
            with self._lock:
                if self._fetches.get(segment.path) is fetch:
                    del self._fetches[segment.path]

        fetch.add_done_callback(ended)
        return fetch

    def _fetched(self, segment: Segment) -> None:
        if not self._is_there(segment):
            self._write(segment, self.bucket.get(segment.path))

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
