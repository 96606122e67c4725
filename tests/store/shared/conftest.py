"""Hubs that share a new database and a new prefix of the bucket."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.shared_servers import PostgresServer, S3Server
from tests.store.shared.hubs import Started


@pytest.fixture
def start(postgres_server: PostgresServer, s3_server: S3Server, tmp_path: Path) -> Iterator[Started]:
    dsn = postgres_server.new_database()
    bucket = s3_server.bucket(f"b{postgres_server.n_databases}")
    with ExitStack() as stack:
        yield Started(dsn, bucket, tmp_path, stack)
