"""A small file that every hub of a database has, such as the token file: its current content is in PostgreSQL."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stallscope.errors import StorageFailed
from stallscope.store.shared.postgres import Postgres


class SharedFile:
    """A file in the folder of this hub, and its content in PostgreSQL. For one thread at a time."""

    def __init__(self, postgres: Postgres, path: Path):
        self.path, self._postgres, self._version = path, postgres, -1

    def pull(self) -> bool:
        """Replace the local file if its content has changed. Returns whether it was replaced."""
        with self._postgres.transaction() as db:
            row = db.execute(
                "SELECT content, version FROM files WHERE name = %s AND version <> %s",
                [self.path.name, self._version],
            ).fetchone()
        if row is None:
            return False
        self._write(row[0])
        self._version = row[1]
        return True

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the local file inside the with block, while no other process changes the content."""
        with self._postgres.transaction() as db:
            db.execute("INSERT INTO files VALUES (%s, NULL, 0) ON CONFLICT DO NOTHING", [self.path.name])
            ((content,),) = db.execute(
                "SELECT content FROM files WHERE name = %s FOR UPDATE", [self.path.name]
            ).fetchall()
            if content is not None:
                self._write(content)
            yield
            if self.path.exists():
                db.execute(
                    "UPDATE files SET content = %s, version = version + 1 WHERE name = %s",
                    [self.path.read_bytes(), self.path.name],
                )

    def _write(self, content: bytes | None) -> None:
        if content is None:
            return
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.touch(mode=0o600)
            part.write_bytes(content)
            part.rename(self.path)
        except OSError as error:
            raise StorageFailed(f"cannot write {self.path}: {error.strerror}; check free space") from error
