"""The C libraries that jobs load, as they are shipped with this package for each machine."""

import os
from pathlib import Path

from stallscope.errors import NotFound


def shipped_library(name: str, purpose: str) -> Path:
    """A library for this machine. purpose: for the message. Raises NotFound where it was not built."""
    machine = os.uname().machine
    library = Path(__file__).parent / "plugin" / machine / name
    if not library.is_file():
        raise NotFound(f"this installation has no {purpose} for {machine}: run `make plugin` in the source")
    return library
