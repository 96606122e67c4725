"""The audit log: one JSON line for each request, for whoever asks later who asked what.

Its size is bounded (the file, and a few before it). No secret is ever in it, even when somebody puts a token
where it does not belong.
"""

import logging
from collections.abc import MutableMapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from stallscope.errors import StorageFailed
from stallscope.serve.tokens import redacted

FILE_NAME = "audit.jsonl"
_MAX_BYTES = 32 << 20
_N_OLD = 4


class AuditLog:
    """Writes into `path`, which is made for its owner only."""

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES, n_old: int = _N_OLD):
        """Raises StorageFailed when the file cannot be written."""
        import structlog

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._file = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=n_old, encoding="utf-8")
        except OSError as error:
            raise StorageFailed(f"the audit log {path} cannot be written ({error.strerror})") from error
        self._file.setFormatter(logging.Formatter("%(message)s"))
        sink = logging.Logger(f"audit {path}")  # not in the tree of loggers: nobody else's settings reach it
        sink.addHandler(self._file)
        self._log = structlog.wrap_logger(
            sink,
            processors=[
                structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
                without_secrets,
                structlog.processors.JSONRenderer(sort_keys=True),
            ],
            wrapper_class=structlog.BoundLogger,
        )

    def info(self, event: str, **fields: Any) -> None:
        """Write one line."""
        self._log.info(event, **fields)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def without_secrets(logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A step of structlog: texts without the secrets of tokens."""
    return {name: redacted(value) if isinstance(value, str) else value for name, value in fields.items()}
