"""Batches that wait for a hub: one file per batch in a folder, so that the end of an agent loses nothing.

A batch keeps its id until the hub has it, over retries and restarts of the agent. The hub recognises
a repeated batch by this id. When all files together exceed the size limit, the oldest batches
are deleted and their rows counted. A batch that the hub rejects is kept in `set-aside`,
up to a tenth of the size limit. Batches are compressed while many batches wait, so that the limit is reached later.
"""

import json
import re
import uuid
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stallscope.errors import StorageFailed
from stallscope.events.layout import Array

SET_ASIDE = "set-aside"
"""The folder of batches that the hub refused as bad."""

_N_UNCOMPRESSED, _MIN_COMPRESSED_BYTES = 8, 1 << 16
"""The number of waiting batches from which new batches are compressed: a hub that answers deletes a batch at once, and
compression would only cost time.
"""

_NAME = re.compile(r"(\d{12})-([0-9a-f]{32})-(\d+)\.batch")


@dataclass(frozen=True, order=True)
class SpooledBatch:
    """A batch on disk. number: order of creation."""

    number: int
    batch_id: str
    n_rows: int
    path: Path
    n_bytes: int


class Spool:
    """The batches of one folder, oldest first. For one thread, in one process."""

    def __init__(self, folder: Path, *, max_bytes: int):
        """Lists the batches of an earlier agent. Raises StorageFailed."""
        self.n_dropped = 0
        self.n_set_aside = 0
        self._folder = folder
        self._max_bytes = max_bytes
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for torn in folder.glob("*.part"):
                torn.unlink()
            self._batches = sorted(filter(None, map(_spooled, folder.iterdir())))
        except OSError as error:
            raise StorageFailed(f"cannot store batches for the hub in {folder} ({error.strerror})") from error
        self._number = self._batches[-1].number + 1 if self._batches else 1
        self._keep_to_limit()

    def put(self, tables: Mapping[str, Array]) -> None:
        """Store a batch: arrays (n,) by table name. A batch that the disk refuses is dropped and counted."""
        n_rows = sum(map(len, tables.values()))
        content = _packed(
            {name: rows for name, rows in tables.items() if len(rows)},
            is_compressed=len(self._batches) >= _N_UNCOMPRESSED,
        )
        name = f"{self._number:012d}-{uuid.uuid4().hex}-{n_rows}.batch"
        self._number += 1
        part = self._folder / f"{name}.part"
        try:
            part.write_bytes(content)
            part.rename(self._folder / name)
        except OSError:
            self.n_dropped += n_rows
            part.unlink(missing_ok=True)
            return
        batch = _spooled(self._folder / name)
        if batch:
            self._batches.append(batch)
        self._keep_to_limit()

    def batches(self) -> list[SpooledBatch]:
        """All batches, oldest first."""
        return list(self._batches)

    def done(self, batch: SpooledBatch) -> None:
        """Delete a batch that the hub has."""
        if batch in self._batches:
            self._batches.remove(batch)
        batch.path.unlink(missing_ok=True)

    def set_aside(self, batch: SpooledBatch) -> None:
        """Move a batch that the hub rejects to `set-aside`; its rows are counted."""
        self.n_set_aside += batch.n_rows
        folder = self._folder / SET_ASIDE
        folder.mkdir(exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            batch.path.rename(folder / batch.path.name)
        self.done(batch)
        kept = sorted(filter(None, map(_spooled, folder.iterdir())))
        n_bytes = sum(each.n_bytes for each in kept)
        while n_bytes > self._max_bytes // 10 and len(kept) > 1:
            oldest = kept.pop(0)
            n_bytes -= oldest.n_bytes
            oldest.path.unlink(missing_ok=True)

    def drop(self, batch: SpooledBatch) -> None:
        """Delete a batch that exceeds the size limit; its rows are counted."""
        self.n_dropped += batch.n_rows
        self.done(batch)

    def _keep_to_limit(self) -> None:
        n_bytes = sum(batch.n_bytes for batch in self._batches)
        while n_bytes > self._max_bytes and self._batches:
            n_bytes -= self._batches[0].n_bytes
            self.drop(self._batches[0])


def read(batch: SpooledBatch) -> dict[str, Array]:
    """The arrays of a batch by table name, read-only. Raises ValueError for a damaged or missing file."""
    try:
        return _unpacked(batch.path.read_bytes())
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{batch.path}: {error}") from error


def _packed(tables: Mapping[str, Array], *, is_compressed: bool) -> bytes:
    """One line of JSON (the contents and their checksum), then the arrays' bytes, compressed if they are large."""
    parts = [rows.tobytes() for rows in tables.values()]
    output = [[name, rows.dtype.descr, len(rows)] for name, rows in tables.items()]
    body = b"".join(parts)
    head: dict[str, object] = {"tables": output, "crc32": zlib.crc32(body)}
    if is_compressed and len(body) >= _MIN_COMPRESSED_BYTES:
        from isal import isal_zlib

        head["compression"] = "zlib"
        body = isal_zlib.compress(body, 1)
    return b"".join([json.dumps(head).encode(), b"\n", body])


def _unpacked(content: bytes) -> dict[str, Array]:
    """Raises KeyError, TypeError, ValueError for a content that _packed() did not make."""
    line, _, body = content.partition(b"\n")
    head, at, tables = json.loads(line), 0, {}
    if "compression" in head:
        body = _decompressed(body)
    if zlib.crc32(body) != head["crc32"]:
        raise ValueError("the check sum is wrong")
    for name, fields, n in head["tables"]:
        dtype = np.dtype([(field, form, *map(tuple, shape)) for field, form, *shape in fields])
        tables[name] = np.frombuffer(body, dtype, n, at)
        at += n * dtype.itemsize
    return tables


def _decompressed(body: bytes) -> bytes:
    """Raises ValueError. ISA-L takes a tenth of zlib's time."""
    from isal import isal_zlib

    try:
        return isal_zlib.decompress(body)
    except isal_zlib.error as error:  # type: ignore[misc]  # the stubs declare the class as an instance
        raise ValueError(str(error)) from error


def _spooled(path: Path) -> SpooledBatch | None:
    match = _NAME.fullmatch(path.name)
    if not match:
        return None
    return SpooledBatch(int(match[1]), match[2], int(match[3]), path, path.stat().st_size)
