"""The state of the alerts in a SQLite file: incidents, alerts with their last delivery, silences.

An alert is one row for each group key and receiver. It stores the wanted notice and the delivered notice; a delivery
is due while the two differ. A restart therefore loses no alert and raises none twice.
"""

import json
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stallscope.alerts.incident import Incident, severity_rank
from stallscope.alerts.notice import Change, Notice, notice
from stallscope.alerts.routing import Target, is_due, matches, targets
from stallscope.errors import BadInput, NotFound, StorageFailed

if TYPE_CHECKING:  # importing pydantic here would slow every command
    from stallscope.alerts.config import Config, Match

_KEPT_NS = 30 * 86_400 * 10**9
_SCHEMA_VERSION = 1
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PRIMARY = 0xFF
"""The part of an error's number that its variants share (SQLite, "Result and Error Codes")."""

_LOG = logging.getLogger(__name__)


def state_path(db: Path) -> Path:
    """The state file that belongs to the folder of a hub, or to a node trace."""
    return db / "alerts.db" if db.is_dir() else db.with_suffix(".alerts.db")


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A change that a receiver has not acknowledged. revision: number of the change, from 1."""

    change: Change
    notice: Notice
    revision: int
    n_failures: int


@dataclass(frozen=True, kw_only=True)
class Silence:
    """Alerts of matching incidents are not sent until then (ns since 1970)."""

    silence_id: str
    tenant: str
    match: dict[str, Any]
    until_ns: int
    made_by: str
    comment: str


class AlertState:
    """An open state file. Thread-safe; several processes may have the file open."""

    def __init__(self, path: Path):
        """Create the file if it is missing. Raises StorageFailed."""
        self.path = path
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(path, timeout=10, isolation_level=None, check_same_thread=False)
            path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.row_factory = sqlite3.Row
            self._check_version()
            self._db.executescript(files("stallscope.alerts").joinpath("state_schema.sql").read_text())
            self._db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            self._db.execute("INSERT OR IGNORE INTO progress VALUES ('created', ?)", (time.time_ns(),))
        except (sqlite3.Error, OSError) as error:
            if hasattr(self, "_db"):
                self._db.close()
            raise StorageFailed(f"{path}: the state of the alerts cannot be opened ({error})") from error

    @classmethod
    def renewed_if_damaged(cls, path: Path) -> "AlertState":
        """Open the file; a damaged file is set aside, because a hub must start without the state of its alerts.

        Alerts on open incidents are sent again then. Raises StorageFailed.
        """
        problem = ""
        try:
            state = cls(path)
            if not (problem := state._damage()):
                return state
            state.close()
        except StorageFailed as failure:
            if not _is_damage(failure.__cause__):
                raise
            problem = str(failure)
        aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
        for end in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                path.with_name(path.name + end).rename(aside.with_name(aside.name + end))
        _LOG.error("%s; it is set aside as %s", problem, aside.name)
        return cls(path)

    def _damage(self) -> str:
        """The first damage in the file; "" if it is intact."""
        try:
            (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise StorageFailed(f"{self.path}: the state of the alerts failed ({error})") from error
            found = str(error)
        return "" if found == "ok" else f"{self.path}: the state of the alerts is damaged ({found})"

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _check_version(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > _SCHEMA_VERSION:
            raise StorageFailed(f"{self.path} was written by a newer stallscope; install that version")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                self._roll_back()
                raise StorageFailed(f"{self.path}: the state of the alerts failed ({error})") from error
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def incidents(self, since_ns: int) -> list[Incident]:
        """The stored incidents that are open, or changed since then; of the last 30 days at most."""
        with self._lock:
            rows = self._db.execute(
                "SELECT incident FROM incidents WHERE is_open OR updated_ns >= ? ORDER BY updated_ns",
                (since_ns,),
            ).fetchall()
        return [Incident.from_text(row[0]) for row in rows]

    def recorded_since_ns(self) -> int:
        """Start of the recorded time: the first start with this file, or the oldest incident that was read then."""
        with self._lock:
            (first,) = self._db.execute(
                "SELECT MIN(json_extract(incident, '$.opened_ns')) FROM incidents"
            ).fetchone()
        created_ns = self.progress("created", 0)
        return created_ns if first is None else min(created_ns, int(first))

    def progress(self, name: str, default: int) -> int:
        """A stored number, for the reader of a source to continue after a restart."""
        with self._lock:
            row = self._db.execute("SELECT value FROM progress WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row else default

    def note(self, incidents: Iterable[Incident], progress: tuple[str, int] | None = None) -> None:
        """Store the latest state of incidents, together with the progress of their source."""
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO incidents VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET is_open = excluded.is_open, "
                "updated_ns = excluded.updated_ns, incident = excluded.incident "
                "WHERE excluded.updated_ns >= incidents.updated_ns",
                [(i.tenant, i.verdict_id, i.is_open, i.updated_ns, i.as_text()) for i in incidents],
            )
            if progress:
                db.execute("INSERT OR REPLACE INTO progress VALUES (?, ?)", progress)

    def evaluate(self, config: "Config | None", now_ns: int) -> None:
        """Raise, change and end alerts according to the stored incidents.

        Incidents that closed before the first evaluation, or while there was no configuration, raise no alert.
        """
        with self._transaction() as db:
            row = db.execute("SELECT value FROM progress WHERE name = 'evaluated'").fetchone()
            since_ns = int(row[0]) if row and config else now_ns
            silences = self._silences(now_ns)
            incidents = self.incidents(since_ns)
            for incident in incidents:
                for target in targets(config, incident) if config else ():
                    if is_due(target.route, incident, now_ns) and not _is_silenced(silences, incident):
                        _join(db, target, incident, now_ns)
            if config:
                for alert in db.execute("SELECT * FROM alerts WHERE delivered != 'resolved'").fetchall():
                    _refresh(db, alert, config, now_ns)
            newest_ns = min(now_ns, max((incident.updated_ns for incident in incidents), default=since_ns))
            if row is None or int(row[0]) != newest_ns:
                db.execute("INSERT OR REPLACE INTO progress VALUES ('evaluated', ?)", (newest_ns,))
            _forget(db, now_ns - _KEPT_NS)

    def due(self, receiver: str, now_ns: int, *, renew_ns: int = 0) -> list[Delivery]:
        """The changes to send to a receiver now, oldest alert first. renew_ns: repeat open alerts this often."""
        with self._lock:
            rows = self._db.execute(
                "SELECT * FROM alerts WHERE receiver = ? AND delivered != 'resolved' AND next_attempt_ns <= ? "
                "ORDER BY raised_ns",
                (receiver, now_ns),
            ).fetchall()
            silences = self._silences(now_ns)
        deliveries = []
        for row in rows:
            wanted = Notice.from_text(row["notice"])
            is_quiet = row["acknowledged_ns"] is not None or any(
                _silence_covers(silence, wanted) for silence in silences
            )
            if change := _change(row, is_quiet=is_quiet, now_ns=now_ns, renew_ns=renew_ns):
                deliveries.append(
                    Delivery(
                        change=change,
                        notice=wanted,
                        revision=row["revision"] + 1,
                        n_failures=row["n_failures"],
                    )
                )
        return deliveries

    def delivered(self, receiver: str, delivery: Delivery, now_ns: int) -> None:
        """The receiver has acknowledged the change."""
        state = "resolved" if delivery.change == "resolved" else "raised"
        with self._transaction() as db:
            db.execute(
                "UPDATE alerts SET delivered = ?, delivered_digest = ?, delivered_ns = ?, revision = ?, "
                "n_failures = 0, next_attempt_ns = 0, last_error = '' WHERE key = ? AND receiver = ?",
                (state, delivery.notice.digest, now_ns, delivery.revision, delivery.notice.key, receiver),
            )

    def failed(self, receiver: str, delivery: Delivery, error: str, next_attempt_ns: int) -> None:
        """The attempt failed; the next attempt is not before then."""
        with self._transaction() as db:
            db.execute(
                "UPDATE alerts SET n_failures = n_failures + 1, next_attempt_ns = ?, last_error = ? "
                "WHERE key = ? AND receiver = ?",
                (next_attempt_ns, error, delivery.notice.key, receiver),
            )

    def listed(
        self, tenant: str | None = None, *, is_open: bool = False, incident: str | None = None
    ) -> list[dict[str, Any]]:
        """The alerts, newest first. tenant: None lists all tenants. incident: only the alerts of this incident."""
        with self._lock:
            rows = self._db.execute(
                "SELECT * FROM alerts AS a WHERE (?1 IS NULL OR tenant = ?1) AND (NOT ?2 OR over_ns IS NULL) "
                "AND (?3 IS NULL OR EXISTS (SELECT 1 FROM members AS m WHERE m.key = a.key "
                "AND m.receiver = a.receiver AND m.tenant = a.tenant AND m.verdict_id = ?3)) "
                "ORDER BY raised_ns DESC",
                (tenant, is_open, incident),
            ).fetchall()
        return [_listed(row) for row in rows]

    def acknowledge(self, key: str, user: str, now_ns: int, tenant: str | None = None) -> None:
        """Send no further updates of an alert, only its end or a higher severity. Raises NotFound."""
        self._set_acknowledged(key, user, now_ns, tenant)

    def end_acknowledgement(self, key: str, tenant: str | None = None) -> None:
        """Send updates of an alert again. Raises NotFound."""
        self._set_acknowledged(key, None, None, tenant)

    def _set_acknowledged(self, key: str, user: str | None, at_ns: int | None, tenant: str | None) -> None:
        with self._transaction() as db:
            n_rows = db.execute(
                "UPDATE alerts SET acknowledged_by = ?2, acknowledged_ns = ?3 "
                "WHERE key = ?1 AND (?4 IS NULL OR tenant = ?4)",
                (key, user, at_ns, tenant),
            ).rowcount
        if not n_rows:
            raise NotFound(f"no alert {key[:80]!r}; `stallscope alerts list` lists the alerts")

    def silence(
        self, match: "Match", *, until_ns: int, user: str, comment: str = "", tenant: str = ""
    ) -> Silence:
        """Silence matching incidents. tenant: "" covers all tenants. Raises BadInput for a silence of everything."""
        conditions = match.model_dump(exclude_defaults=True, mode="json")
        if not conditions:
            raise BadInput(f"a silence needs a condition: {', '.join(type(match).model_fields)}")
        silence = Silence(
            silence_id=secrets.token_hex(4),
            tenant=tenant,
            match=conditions,
            until_ns=until_ns,
            made_by=user,
            comment=comment,
        )
        with self._transaction() as db:
            values = (silence.silence_id, tenant, json.dumps(conditions), until_ns, user, comment)
            db.execute("INSERT INTO silences VALUES (?, ?, ?, ?, ?, ?)", values)
        return silence

    def silences(
        self, now_ns: int, tenant: str | None = None, *, covering: str | None = None
    ) -> list[Silence]:
        """The silences that have not expired. covering: only the silences of this incident of the tenant."""
        with self._lock:
            silences = [each for each in self._silences(now_ns) if tenant is None or each.tenant == tenant]
            if covering is None:
                return silences
            row = self._db.execute(
                "SELECT incident FROM incidents WHERE tenant = ? AND verdict_id = ?", (tenant, covering)
            ).fetchone()
        incident = Incident.from_text(row["incident"]) if row else None
        return [silence for silence in silences if incident and _is_silenced([silence], incident)]

    def end_silence(self, silence_id: str, tenant: str | None = None) -> None:
        """Raises NotFound."""
        with self._transaction() as db:
            n_rows = db.execute(
                "DELETE FROM silences WHERE silence_id = ?1 AND (?2 IS NULL OR tenant = ?2)",
                (silence_id, tenant),
            ).rowcount
        if not n_rows:
            raise NotFound(f"no silence {silence_id[:80]!r}; `stallscope alerts list` lists the silences")

    def _silences(self, now_ns: int) -> list[Silence]:
        rows = self._db.execute("SELECT * FROM silences WHERE until_ns > ? ORDER BY until_ns", (now_ns,))
        return [Silence(**dict(row) | {"match": json.loads(row["match"])}) for row in rows.fetchall()]


def _join(db: sqlite3.Connection, target: Target, incident: Incident, now_ns: int) -> None:
    """Make an incident a member of its alert; start an alert if there is none, or if it is over."""
    identity = (target.key, target.receiver)
    joined = db.execute(
        "INSERT OR IGNORE INTO members VALUES (?, ?, ?, ?)", (*identity, incident.tenant, incident.verdict_id)
    ).rowcount
    if not joined:
        return  # even if its alert is over: an incident is raised once
    row = db.execute("SELECT delivered FROM alerts WHERE key = ? AND receiver = ?", identity).fetchone()
    if row is not None and row["delivered"] != "resolved":
        return
    wanted = notice(target.key, [incident], "")
    db.execute(
        "INSERT OR REPLACE INTO alerts (key, receiver, tenant, raised_ns, notice, digest, revision) "
        "VALUES (?, ?, ?, ?, ?, ?, COALESCE((SELECT revision FROM alerts WHERE key = ?1 AND receiver = ?2), 0))",
        (*identity, incident.tenant, now_ns, wanted.as_text(), wanted.digest),
    )


def _refresh(db: sqlite3.Connection, row: sqlite3.Row, config: "Config", now_ns: int) -> None:
    """Bring the wanted notice of an alert up to date with its members."""
    texts = db.execute(
        "SELECT incident FROM members JOIN incidents USING (tenant, verdict_id) WHERE key = ? AND receiver = ?",
        (row["key"], row["receiver"]),
    ).fetchall()
    members = [Incident.from_text(text[0]) for text in texts]
    current = [i for i in members if i.closed_ns is None or i.updated_ns >= row["raised_ns"]] or members
    if not current:
        return
    wanted = notice(row["key"], current, config.page_url)
    end_ns = wanted.end_ns
    is_over = end_ns is not None and now_ns - end_ns >= config.resolve_after * 1e9
    over_ns = end_ns if is_over else None
    if (row["notice"], row["over_ns"]) == (wanted.as_text(), over_ns):
        return
    is_louder = severity_rank(wanted.severity) > severity_rank(Notice.from_text(row["notice"]).severity)
    db.execute(
        "UPDATE alerts SET notice = ?, digest = ?, over_ns = ?, acknowledged_ns = CASE WHEN ? THEN NULL "
        "ELSE acknowledged_ns END WHERE key = ? AND receiver = ?",
        (
            wanted.as_text(),
            wanted.digest,
            over_ns,
            is_louder,
            row["key"],
            row["receiver"],
        ),
    )


def _change(row: sqlite3.Row, *, is_quiet: bool, now_ns: int, renew_ns: int) -> Change | None:
    """The next change to send. An alert that ended before its raise arrived is raised first."""
    if not row["delivered"]:
        return "raised"
    if row["over_ns"] is not None:
        return "resolved"
    if row["digest"] != row["delivered_digest"] and not is_quiet:
        return "updated"
    if renew_ns and now_ns - row["delivered_ns"] >= renew_ns:
        return "updated"
    return None


def _forget(db: sqlite3.Connection, before_ns: int) -> None:
    db.execute("DELETE FROM alerts WHERE delivered = 'resolved' AND over_ns < ?", (before_ns,))
    db.execute("DELETE FROM incidents WHERE NOT is_open AND updated_ns < ?", (before_ns,))
    db.execute(
        "DELETE FROM members WHERE NOT EXISTS (SELECT 1 FROM incidents AS i "
        "WHERE i.tenant = members.tenant AND i.verdict_id = members.verdict_id)"
    )
    db.execute("DELETE FROM silences WHERE until_ns < ?", (before_ns,))


def _is_silenced(silences: Iterable[Silence], incident: Incident) -> bool:
    from stallscope.alerts.config import Match

    return any(
        silence.tenant in ("", incident.tenant) and matches(Match(**silence.match), incident)
        for silence in silences
    )


def _silence_covers(silence: Silence, wanted: Notice) -> bool:
    """Whether a silence covers every incident of a notice."""
    return all(_is_silenced([silence], _as_incident(wanted, member)) for member in wanted.incidents)


def _as_incident(wanted: Notice, member: dict[str, Any]) -> Incident:
    return Incident(
        tenant=wanted.tenant,
        verdict_id=member["verdict_id"],
        cluster=member["cluster"],
        opened_ns=wanted.begin_ns,
        updated_ns=wanted.begin_ns,
        closed_ns=wanted.end_ns,
        row=member,
        owner=member.get("owner") or {},
    )


def _listed(row: sqlite3.Row) -> dict[str, Any]:
    wanted = Notice.from_text(row["notice"])
    return {
        "key": row["key"],
        "receiver": row["receiver"],
        "tenant": row["tenant"],
        "state": "open" if row["over_ns"] is None else "resolved",
        "delivered": row["delivered"] or "no",
        "severity": wanted.severity,
        "title": wanted.title,
        "cluster": wanted.cluster,
        "nodes": list(wanted.nodes),
        "raised_ns": row["raised_ns"],
        "over_ns": row["over_ns"],
        "acknowledged_by": row["acknowledged_by"] if row["acknowledged_ns"] is not None else None,
        "incidents": [member["verdict_id"] for member in wanted.incidents],
        "n_failures": row["n_failures"],
        "last_error": row["last_error"],
    }


Clock = Callable[[], int]
"""ns since 1970."""


def _is_damage(error: BaseException | None) -> bool:
    """Whether SQLite found the file's content damaged or cut off."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & _PRIMARY in _DAMAGED or code == sqlite3.SQLITE_IOERR_SHORT_READ
