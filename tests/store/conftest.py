"""A PostgreSQL server and an S3 server for all tests of the stores."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import shared_servers


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[shared_servers.PostgresServer]:
    if reason := shared_servers.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        with shared_servers.postgres_server(Path(folder) / "postgres") as server:
            yield server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shared_servers.S3Server]:
    if reason := shared_servers.missing():
        pytest.skip(reason)
    with (
        shared_servers.s3_server(tmp_path_factory.mktemp("s3")) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in shared_servers.environment().items():
            patch.setenv(name, value)
        yield server
