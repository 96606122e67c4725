"""The audit log: one JSON line per request, with the token and the request it made.

Its size is bounded (the current file and a few older files). Secrets never reach it, even when a client puts a
token into the wrong field.
"""

import logging
from collections.abc import MutableMapping
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from stallscope.credentials import masked
from stallscope.errors import StorageFailed

FILE_NAME = "audit.jsonl"
_MAX_BYTES = 32 << 20
_N_OLD = 4


class AuditLog:
    """Writes to `path`, which only its owner can read."""

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
        sink = logging.Logger(
            f"audit {path}"
        )  # outside the logger tree: other logging settings do not affect it
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
    """A structlog processor that removes token secrets from texts."""
    return {name: masked(value) if isinstance(value, str) else value for name, value in fields.items()}
