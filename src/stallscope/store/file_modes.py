"""Owner and mode of files: private files, and files that root creates for a hub that runs as another user."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def give_to_owner_of_folder(path: Path) -> None:
    """Root gives the file the owner and group of its folder; no effect for other users."""
    if os.geteuid() == 0:
        owner = path.parent.stat()
        os.chown(path, owner.st_uid, owner.st_gid)


def is_stream(path: Path) -> bool:
    """Whether a path names a pipe or device (/dev/stdout, /dev/null): a new file would take its name.

    A link of root or of this user below /dev or /proc is a stream, whatever its target. A link of another user is not,
    because it may name any file; all users can create links in /dev/shm.
    """
    if path.is_symlink():
        owner = path.lstat().st_uid
        if path.absolute().parts[1] in ("dev", "proc") and owner in (0, os.geteuid()):
            return True
        if owner != os.geteuid():
            return False
    return path.exists() and not path.is_file() and not path.is_dir()


def replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file atomically, with the owner of its folder: readers see either the old or the new file.

    It has this mode from its first byte on, independent of the old file. A stream is written in place. Raises OSError.
    """
    with replacing(path, mode) as new, new.open("wb") as file:
        file.write(content)
        file.flush()
        if new != path:
            os.fsync(file.fileno())


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """The path of a new file with this mode, which replaces `path` at the end of the block, and is deleted on errors.

    A stream is written in place: its own path is returned. The target of an own link is replaced; a link of another
    user is replaced itself, because it may name any file. Raises OSError.
    """
    if is_stream(path):
        yield path
        return
    is_own_link = path.is_symlink() and path.lstat().st_uid == os.geteuid()
    final = path.resolve() if is_own_link else path
    temporary = final.with_name(f".part-{os.getpid()}-{threading.get_ident()}{final.suffix[:16]}")
    temporary.unlink(missing_ok=True)
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
        yield temporary
        give_to_owner_of_folder(temporary)
        temporary.replace(final)
    finally:
        temporary.unlink(missing_ok=True)
