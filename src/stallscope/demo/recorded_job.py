"""The recording that ships with the package: a real job on four H100 GPUs, as a compressed node trace.

A node trace needs no optional package. Made from `tests/data/recorded` by `stallscope import` and `xz -9e`.
"""

import lzma
import tempfile
from importlib.resources import files
from pathlib import Path

from stallscope.events.trace import Trace
from stallscope.store import node


def recorded() -> Trace:
    """The shipped recording. Raises StallscopeError when the temporary folder cannot hold the unpacked trace."""
    packed = (files("stallscope.demo") / "recorded" / "trace.db.xz").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recorded.db"
        path.write_bytes(lzma.decompress(packed))
        return node.read(path)
