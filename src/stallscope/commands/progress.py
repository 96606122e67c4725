"""A progress bar while large files are read, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

_MIN_BYTES = 100 << 20  # smaller files are read within seconds


@contextmanager
def reading_progress(paths: Sequence[Path], *, min_bytes: int = _MIN_BYTES) -> Iterator[None]:
    """Show the share of the bytes read. Compressed files count with their unpacked bytes, at most with their size."""
    from stallscope.importers.texts import files_of, on_read

    total = sum(file.stat().st_size for file in files_of([path for path in paths if path.exists()]))
    if total < min_bytes or not sys.stderr.isatty():
        yield
        return
    with typer.progressbar(length=total, label="reading files", file=sys.stderr) as bar:
        token = on_read.set(bar.update)
        try:
            yield
        finally:
            on_read.reset(token)
