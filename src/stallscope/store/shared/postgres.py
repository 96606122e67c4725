"""Connections to PostgreSQL for all slots of a process, and its errors without secrets.

A connection that fails is replaced at its next use, so that a restart of the server needs no restart of the hub. Every
session ends by itself if its client stops inside a transaction: a stopped process cannot keep another hub from taking
over its slots.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import conninfo

from stallscope.errors import BadInput, Overloaded, StorageFailed
from stallscope.store.hub.journal import line

SCHEMA = "stallscope"
_CONNECT_S = 5
_STATEMENT_S = 60
MAX_CONNECTIONS, LEASE_CONNECTIONS = 8, 2
"""Of a hub. The renewal of leases never waits for a connection that a query or a commit uses."""

_WAIT_S = 20.0
_RETRY_S = 2.0
_LOG_EVERY_S = 10.0
_LOG = logging.getLogger(__name__)
_FORM = "--shared expects postgresql://USER@HOST:PORT/DATABASE; give the password in PGPASSWORD or PGPASSFILE"


class _Reported:
    """Logs each reason at most every ten seconds: a server that is away fails every request. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_s: dict[str, float] = {}

    def warn(self, reason: str) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._at_s = {text: at_s for text, at_s in self._at_s.items() if now_s - at_s < _LOG_EVERY_S}
            is_new = self._at_s.setdefault(reason, now_s) == now_s
        if is_new:
            _LOG.warning("PostgreSQL: %s", reason)


_REPORTED = _Reported()

Connection = psycopg.Connection[tuple[Any, ...]]


class Postgres:
    """A few connections, each for one transaction at a time. Thread-safe."""

    def __init__(
        self, dsn: str, *, name: str, stopped_s: float = 5.0, max_connections: int = MAX_CONNECTIONS
    ):
        """name: of this process, as pg_stat_activity shows it. stopped_s: longest pause inside a transaction.

        Raises BadInput for a DSN that cannot be parsed; does not connect.
        """
        try:
            given = conninfo.conninfo_to_dict(dsn)
        except psycopg.ProgrammingError:
            raise BadInput(_FORM) from None  # the message of the library repeats parts of the DSN
        if given.get("password"):
            raise BadInput(f"--shared contains a password, which other users could see; {_FORM}")
        if "dbname" not in given and "service" not in given:
            raise BadInput(f"--shared names no database; {_FORM}")
        options = {
            "search_path": SCHEMA,
            "idle_in_transaction_session_timeout": f"{round(stopped_s * 1000)}ms",
            "statement_timeout": f"{_STATEMENT_S}s",
            "TimeZone": "UTC",
        }
        own = " ".join(f"-c {key}={value}" for key, value in options.items())
        wanted: dict[str, Any] = {
            "connect_timeout": _CONNECT_S,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 2,
            "tcp_user_timeout": 15_000,
            **given,
            "application_name": name,
            "options": f"{given.get('options') or ''} {own}".strip(),
        }
        self._dsn = conninfo.make_conninfo(**wanted)
        self.address = f"{given.get('host') or 'localhost'}:{given.get('port') or 5432}/{given.get('dbname')}"
        """Host, port and database, for people."""
        self._room = threading.BoundedSemaphore(max_connections)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._is_closed = False

    def checked(self) -> None:
        """Connect once. Raises BadInput if the server refuses the client, StorageFailed if it does not answer."""
        try:
            self._connected().close()
        except psycopg.OperationalError as error:
            text = line(error)
            if "authentication failed" in text or "no password supplied" in text or "no pg_hba.conf" in text:
                raise BadInput(
                    f"PostgreSQL at {self.address} refuses the user or the password; check --shared and PGPASSWORD"
                ) from None
            if _has_too_many(error):
                raise StorageFailed(
                    f"PostgreSQL at {self.address} has no free connection; raise its max_connections: each hub needs"
                    f" {MAX_CONNECTIONS + LEASE_CONNECTIONS}"
                ) from None
            if "does not exist" in text:
                raise BadInput(
                    f"PostgreSQL at {self.address} has no such database or role; create it, or change --shared"
                ) from None
            raise StorageFailed(
                f"PostgreSQL at {self.address} does not answer; check --shared and the server"
            ) from None

    @contextmanager
    def transaction(self, *, is_snapshot: bool = False) -> Iterator[Connection]:
        """A transaction, committed at the end of the with block. is_snapshot: read-only, one moment for all reads.

        Raises Overloaded if the server does not answer, StorageFailed for another failure.
        """
        with self.connection() as db, errors():
            begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY" if is_snapshot else "BEGIN"
            try:
                db.execute(begin)
                if is_snapshot:  # it holds no row that another hub waits for
                    db.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{_STATEMENT_S}s'")
                yield db
                db.execute("COMMIT")
            except BaseException as error:
                with suppress(psycopg.Error):
                    if not db.closed:
                        db.execute("ROLLBACK")
                    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
                        db.close()  # a standby, or the old primary: the next connection may find the new primary
                raise

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """A connection outside of a transaction. Raises Overloaded if the server does not answer."""
        if not self._room.acquire(timeout=_WAIT_S):
            raise Overloaded("all connections to PostgreSQL are busy; retry later", _RETRY_S)
        try:
            with errors():
                db = self._taken()
            try:
                yield db
            finally:
                self._give_back(db)
        finally:
            self._room.release()

    def close(self) -> None:
        """End all connections."""
        self._is_closed = True
        self._forget()

    def _taken(self) -> Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connected()

    def _connected(self) -> Connection:
        return psycopg.connect(self._dsn, autocommit=True)

    def _give_back(self, db: Connection) -> None:
        is_idle = not db.closed and db.info.transaction_status is psycopg.pq.TransactionStatus.IDLE
        if is_idle and not self._is_closed:
            with self._lock:
                self._idle.append(db)
            return
        with suppress(psycopg.Error):
            db.close()
        self._forget()  # the server has probably restarted: its other sessions have ended too

    def _forget(self) -> None:
        with self._lock:
            gone, self._idle = self._idle, []
        for db in gone:
            with suppress(psycopg.Error):
                db.close()


@contextmanager
def errors() -> Iterator[None]:
    """Errors of PostgreSQL as errors of the hub."""
    try:
        yield
    except psycopg.errors.ReadOnlySqlTransaction as error:
        raise _later("PostgreSQL is read-only", error) from error
    except psycopg.errors.DiskFull as error:
        raise _later("PostgreSQL has no space left on its disk", error) from error
    except (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        psycopg.errors.IdleInTransactionSessionTimeout,  # this process was stopped, or had no processor
    ) as error:
        reason = "has no free connection" if _has_too_many(error) else "does not answer"
        raise _later(f"PostgreSQL {reason}", error) from error
    except psycopg.Error as error:
        raise StorageFailed(f"PostgreSQL: {line(error)}; check the server's log") from error


def _later(reason: str, error: psycopg.Error) -> Overloaded:
    _REPORTED.warn(line(error))
    return Overloaded(f"{reason}; retry later", _RETRY_S)


def _has_too_many(error: psycopg.Error) -> bool:
    """Whether the server, the database or the user has reached a limit of connections (SQLSTATE 53300).

    A connection that the server refuses has no SQLSTATE in psycopg.
    """
    return "too many c" in str(error) or "remaining connection slots" in str(error)
