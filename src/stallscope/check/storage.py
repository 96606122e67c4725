"""Whether the trace's folder has room and is writable."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from stallscope.check.finding import Finding, failed, passed, warned


def findings(db: Path, max_bytes: int) -> Iterator[Finding]:
    """One line on the folder of the trace. max_bytes: the size above which the oldest rows are deleted; 0: none."""
    folder = next(each for each in (db.parent, *db.parent.absolute().parents) if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        remedy = f"choose another path with --db, or create the folder: sudo install -d -o {os.getuid()} {db.parent}"
        yield failed("storage", f"{db.parent} cannot be written", remedy)
        return
    free = shutil.disk_usage(folder).free
    limit = f"at most {_gigabytes(max_bytes)} used" if max_bytes else "no size limit"
    usage = f"{db}: {_gigabytes(free)} free, {limit}"
    if free < max_bytes and not db.exists():
        yield warned("storage", usage, "make room, or give a smaller --max-db")
    else:
        yield passed("storage", usage)


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB"
