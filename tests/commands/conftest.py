"""A trace for the tests of commands."""

from pathlib import Path

import pytest

from stallscope.store import node

from ..diagnose.builders import MS, dp_trace, every


@pytest.fixture(scope="session")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of 4 ranks, of which rank 2 sleeps 50 ms every 7 steps."""
    path = tmp_path_factory.mktemp("commands") / "trace.db"
    node.write(path, dp_trace(every(2, 7, 50 * MS)))
    return path
