"""Is there room for the trace, and may it be written?"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from stallscope.check.finding import Finding, failed, passed, warned


def findings(db: Path, max_bytes: int) -> Iterator[Finding]:
    """One line on the folder of the trace. max_bytes: the size at which its oldest rows go."""
    folder = next(each for each in (db.parent, *db.parent.absolute().parents) if each.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield failed("storage", f"{db.parent} cannot be written", "choose another --db, or run it as root")
        return
    free = shutil.disk_usage(folder).free
    said = f"{db}: {_gigabytes(free)} free, at most {_gigabytes(max_bytes)} used"
    if free < max_bytes and not db.exists():
        yield warned("storage", said, "make room, or give a smaller --max-db")
    else:
        yield passed("storage", said)


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB"
