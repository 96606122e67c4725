"""Which hub owns which slot: leases in PostgreSQL, by its clock.

A hub renews its leases several times within their time. A slot whose lease ran out is taken by another hub, which
raises the epoch: commits of the previous owner are refused from then on, even if that hub still runs. Each hub has
the same share of the slots; a hub with more hands slots over, one after the other.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stallscope.store.shared.postgres import Connection, Postgres
from stallscope.store.shared.postgres_journal import Lease
from stallscope.store.shared.slots import N_SLOTS

_FORGET_S = 3600.0
_MAX_ROUND_TRIP_S = 1.0
"""Of a comparison of clocks: half of it may be the error."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A hub of the cluster, as the other hubs see it.

    name: of the process, never used again. peer: HOST:PORT for other hubs; certificate: of that port (PEM).
    ingest: HOST:PORT for agents; empty if agents are not directed here.
    """

    name: str
    peer: str
    certificate: str
    ingest: str
    version: str


@dataclass(frozen=True, kw_only=True)
class MemberState:
    """A member and its latest report. is_alive: its last renewal is within the lease."""

    member: Member
    is_alive: bool
    is_leaving: bool
    seen_s_ago: float
    state: Mapping[str, Any]


@dataclass(frozen=True)
class SlotState:
    """A slot's owner ("" for no owner), its epoch, and the remaining time of the lease in s."""

    slot: int
    owner: str
    epoch: int
    expires_in_s: float


class Leases:
    """The leases of one hub. For one thread at a time."""

    def __init__(self, postgres: Postgres, member: Member, *, lease_s: float):
        self.member, self.lease_s = member, lease_s
        self.clock_ahead_ns = 0
        """How far the clock of this machine is ahead of the clock of PostgreSQL, to some ms."""
        self._postgres = postgres

    def renew(self, state: Mapping[str, Any], *, is_leaving: bool = False) -> dict[int, int]:
        """Report this hub and renew its leases. Returns the epoch of each slot that it still owns."""
        me = self.member
        with self._postgres.transaction() as db:
            self._compare_clocks(db)
            db.execute(
                "INSERT INTO hubs (name, peer, certificate, ingest, version, seen, is_leaving, state)"
                " VALUES (%s, %s, %s, %s, %s, clock_timestamp(), %s, %s) ON CONFLICT (name) DO UPDATE SET"
                " seen = excluded.seen, is_leaving = excluded.is_leaving, state = excluded.state",
                [me.name, me.peer, me.certificate, me.ingest, me.version, is_leaving, json.dumps(state)],
            )
            rows = db.execute(
                "UPDATE leases SET expires = clock_timestamp() + make_interval(secs => %s)"
                " WHERE slot IN (SELECT slot FROM leases WHERE owner = %s ORDER BY slot FOR NO KEY UPDATE)"
                " RETURNING slot, epoch",
                [self.lease_s, me.name],
            ).fetchall()
        return dict(rows)

    def _compare_clocks(self, db: Connection) -> None:
        """Compare the clocks by a statement that waits for no row. A slow answer changes nothing."""
        begin_s, begin_ns = time.monotonic(), time.time_ns()
        ((now_s,),) = db.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchall()
        took_s = time.monotonic() - begin_s
        if took_s <= _MAX_ROUND_TRIP_S:
            self.clock_ahead_ns = begin_ns + int((took_s / 2 - now_s) * 1e9)

    def share(self) -> int:
        """The number of slots that each hub should own."""
        with self._postgres.transaction() as db:
            ((n_alive,),) = db.execute(
                "SELECT count(*) FROM hubs WHERE NOT is_leaving"
                " AND seen > clock_timestamp() - make_interval(secs => %s)",
                [self.lease_s],
            ).fetchall()
        return math.ceil(N_SLOTS / max(1, n_alive))

    def take(self, n: int) -> list[Lease]:
        """Take up to n slots without an owner, or whose lease ran out."""
        with self._postgres.transaction() as db:
            rows = db.execute(
                "WITH free AS MATERIALIZED (SELECT slot FROM leases WHERE expires < clock_timestamp()"
                " AND owner IS DISTINCT FROM %s ORDER BY owner IS NULL, slot LIMIT %s FOR UPDATE SKIP LOCKED)"
                " UPDATE leases SET owner = %s, epoch = epoch + 1,"
                " expires = clock_timestamp() + make_interval(secs => %s)"
                " WHERE slot IN (SELECT slot FROM free) RETURNING slot, epoch",
                [self.member.name, n, self.member.name, self.lease_s],
            ).fetchall()
        taken = [Lease(slot, self.member.name, epoch) for slot, epoch in sorted(rows)]
        if len(taken) < n:
            self._end_stopped_sessions()
        return taken

    def _end_stopped_sessions(self) -> None:
        """A hub that stopped inside a transaction still shares the row of its lease: end its sessions."""
        with self._postgres.transaction() as db:
            db.execute(
                "SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a WHERE a.usename = current_user"
                " AND a.application_name IN (SELECT DISTINCT owner FROM leases WHERE owner <> %s"
                " AND expires < clock_timestamp() - interval '0.5 s')",
                [self.member.name],
            )

    def release(self, lease: Lease) -> None:
        """Give a slot up, so that another hub takes it at once."""
        with self._postgres.transaction() as db:
            db.execute(
                "UPDATE leases SET owner = NULL, expires = 'epoch' WHERE slot = %s AND owner = %s AND epoch = %s",
                [lease.slot, lease.owner, lease.epoch],
            )

    def leave(self) -> None:
        """Remove this hub, which owns no slot any more, and hubs that have been away for long."""
        with self._postgres.transaction() as db:
            db.execute(
                "DELETE FROM hubs WHERE name = %s OR seen < clock_timestamp() - make_interval(secs => %s)",
                [self.member.name, _FORGET_S],
            )


def slots(postgres: Postgres) -> list[SlotState]:
    """The current state of all slots."""
    with postgres.transaction() as db:
        return _slots(db)


def members(postgres: Postgres, *, lease_s: float) -> list[MemberState]:
    """The known hubs."""
    with postgres.transaction() as db:
        return _members(db, lease_s)


def directory(postgres: Postgres, *, lease_s: float) -> tuple[list[SlotState], list[MemberState]]:
    """Slots and hubs at one moment."""
    with postgres.transaction(is_snapshot=True) as db:
        return _slots(db), _members(db, lease_s)


def _slots(db: Connection) -> list[SlotState]:
    rows = db.execute(
        "SELECT slot, coalesce(owner, ''), epoch, extract(epoch FROM expires - clock_timestamp())::float8"
        " FROM leases ORDER BY slot"
    ).fetchall()
    return [SlotState(*row) for row in rows]


def _members(db: Connection, lease_s: float) -> list[MemberState]:
    rows = db.execute(
        "SELECT name, peer, certificate, ingest, version, is_leaving,"
        " extract(epoch FROM clock_timestamp() - seen)::float8, state FROM hubs ORDER BY name"
    ).fetchall()
    return [
        MemberState(
            member=Member(name=name, peer=peer, certificate=certificate, ingest=ingest, version=version),
            is_alive=seen_s_ago <= lease_s,
            is_leaving=is_leaving,
            seen_s_ago=seen_s_ago,
            state=json.loads(state),
        )
        for name, peer, certificate, ingest, version, is_leaving, seen_s_ago, state in rows
    ]
