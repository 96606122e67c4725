"""PostgreSQL that refuses: senders repeat their rows later with the reason, and nothing needs a restart."""

from contextlib import closing

import pytest
from tests.shared_servers import PostgresServer
from tests.store.shared.hubs import Started, events, names, settled, stored, until

from stallscope.errors import Overloaded, StorageFailed
from stallscope.store.hub.batches import Batch
from stallscope.store.shared.postgres import Postgres


def database(dsn: str) -> str:
    return dsn.rpartition("/")[2]


def end_sessions(server: PostgresServer, dsn: str) -> None:
    server.sql(
        "postgres",
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database(dsn)}'",
    )


def test_a_read_only_server_refuses_rows_until_it_is_writable_again(
    start: Started, postgres_server: PostgresServer
):
    """As after a failover to a standby that is promoted later: connections from before are not used again."""
    store = start("hub-a", lease_s=60.0)
    settled(store)
    assert not stored(store, Batch("b1", "a", {"events": events("c", "x")}))
    name = database(start.dsn)
    postgres_server.sql("postgres", f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    end_sessions(postgres_server, start.dsn)
    reasons: list[str] = []

    def is_refused_as_read_only() -> bool:
        try:
            store.append(Batch("b2", "a", {"events": events("c", "y")})).result(30)
        except Overloaded as error:
            reasons.append(str(error))
        return "PostgreSQL is read-only; retry later" in reasons

    until(is_refused_as_read_only)
    assert names(store) == ["x"], "stored rows are still answered"
    postgres_server.sql("postgres", f"ALTER DATABASE {name} RESET default_transaction_read_only")
    assert not stored(store, Batch("b2", "a", {"events": events("c", "y")}))
    assert names(store) == ["x", "y"]


def test_a_full_disk_of_the_server_is_named_and_rows_are_stored_once_there_is_room(start: Started):
    store = start("hub-a", lease_s=60.0)
    settled(store)
    with store.postgres.connection() as db:
        db.execute(
            "CREATE FUNCTION stallscope.full() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$"
        )
        db.execute("CREATE TRIGGER full_disk BEFORE INSERT ON journal EXECUTE FUNCTION stallscope.full()")
    with pytest.raises(Overloaded, match="PostgreSQL has no space left on its disk; retry later"):
        store.append(Batch("b1", "a", {"events": events("c", "x")})).result(30)
    with store.postgres.connection() as db:
        db.execute("DROP TRIGGER full_disk ON journal")
    assert not stored(store, Batch("b1", "a", {"events": events("c", "x")}))
    assert names(store) == ["x"]


def test_a_limit_of_connections_is_named_and_the_leases_have_connections_of_their_own(
    start: Started, postgres_server: PostgresServer
):
    role = f"few{postgres_server.n_databases}"
    postgres_server.sql("postgres", f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 1")
    dsn = start.dsn.replace("postgres@", f"{role}@")
    with (
        closing(Postgres(dsn, name="one")) as one,
        one.connection(),
        closing(Postgres(dsn, name="two")) as two,
    ):
        with (
            pytest.raises(Overloaded, match="PostgreSQL has no free connection; retry later"),
            two.connection(),
        ):
            pass
        with pytest.raises(StorageFailed, match="raise its max_connections: each hub needs 10"):
            two.checked()


def test_leases_are_renewed_while_all_connections_are_busy(start: Started):
    store = start("hub-a")
    settled(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.postgres, "_room", _NoRoom())
        renewed_s = store.membership._last_renewed_s
        until(lambda: store.membership._last_renewed_s > renewed_s + 2 * store.membership._every_s)
        with pytest.raises(Overloaded, match="all connections to PostgreSQL are busy"):
            store.tenants()


class _NoRoom:
    """A pool whose connections are all in use for longer than anybody waits."""

    def acquire(self, timeout: float) -> bool:
        return False
