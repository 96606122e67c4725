"""Prepares a trace for writing: a lock for its only writer, and a new file after each boot."""

import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from stallscope.errors import StorageFailed
from stallscope.store import node

_SUFFIXES = ("", "-wal", "-shm")
_MODE = 0o640


@contextmanager
def only_writer(path: Path, group: int | None = None) -> Iterator[None]:
    """Inside the with block this process is the only writer of the trace at `path`.

    A missing trace is created with its tables. group: number of the group that may read a new trace; its owner may
    always read it.
    The lock is the kernel's (flock) and ends with the process. Raises StorageFailed when
    another process has it, or the file cannot be written. Leave the block after closing the trace.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        node.create_file(path, mode=_MODE, group=group)
        fd = _open_or_create(path, group)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StorageFailed(f"cannot write {path}: {reason}; choose another path with --db") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise StorageFailed(
            f"another stallscope trace writes {path}: end it, or choose another path with --db"
        ) from error
    finally:
        os.close(fd)


def _open_or_create(path: Path, group: int | None) -> int:
    """Open the file; create it where the file system has no links.

    SQLite gives its additional files the same owner, group and mode.
    """
    try:
        return node.new_descriptor(path, mode=_MODE, group=group)
    except FileExistsError:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def set_aside_if_of_another_boot(path: Path, boot_id: str, wall_ns: int) -> Path | None:
    """Rename a trace of another boot, because monotonic clocks restart at each boot. Returns its new path.

    The new name contains the day and time of the move. A file that is not a trace is left alone.
    """
    if not path.exists() or _boot_of(path) in ("", boot_id):
        return None
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime(wall_ns / 1e9))
    aside = path.with_name(f"{path.stem}-until-{moment}{path.suffix}")
    for suffix in _SUFFIXES:
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside


def _boot_of(path: Path) -> str:
    """The boot in which the trace was last written; empty if it is not recorded."""
    try:
        with closing(sqlite3.connect(f"file:{quote(os.fsencode(path.absolute()))}?mode=ro", uri=True)) as db:
            row = db.execute("SELECT facts FROM sessions ORDER BY id DESC LIMIT 1").fetchone()
    except sqlite3.Error:
        return ""
    return str(json.loads(row[0]).get("boot_id", "")) if row else ""
