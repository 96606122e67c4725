"""The lock of a hub's folder: one hub at a time uses a folder, however its process ends."""

import fcntl
import os
from pathlib import Path

from stallscope.errors import StorageFailed

LOCK_NAME = "hub.lock"


def locked(folder: Path) -> int:
    """The hub's lock, held until the file descriptor is closed, however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.stat().st_uid == os.geteuid() and _is_ours(folder):
            folder.chmod(0o700)
        lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageFailed(
            f"cannot use {folder}: {error.strerror}; choose another path with --db"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise StorageFailed(
            f"another stallscope hub uses {folder}; stop it, or name another folder"
        ) from None
    return lock


def _is_ours(folder: Path) -> bool:
    """Whether a folder has no foreign files: it is empty, or belongs to a hub."""
    return (folder / LOCK_NAME).exists() or not any(folder.iterdir())
