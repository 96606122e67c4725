"""Small file systems in memory, for tests of full and read-only disks."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def memory_disk(folder: Path, *, size: str = "1m") -> Iterator[Path]:
    """A file system of this size in a new folder. Skips the test where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
