"""Hubs that share their data: each row is stored once, whichever hub gets it, and every hub gives the same answers."""

import errno
import os
import shutil
import socket
import subprocess
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests import shared_servers
from tests.shared_servers import PostgresServer, S3Server
from tests.store.hub.rows import maintained
from tests.store.shared.hubs import (
    CLUSTERS,
    LEASE_S,
    STILL,
    NoWork,
    Started,
    events,
    names,
    settled,
    slot_stores,
    store_a_row_of_each_cluster,
    stored,
    until,
)

from stallscope.errors import BadInput, Busy, NewerSchema, OverLimits, Overloaded, StorageFailed
from stallscope.store.hub.batches import Batch
from stallscope.store.hub.row_bounds import RowBounds
from stallscope.store.hub.store import HubStore
from stallscope.store.shared import cluster_status, leases, postgres_journal, postgres_schema, sweep
from stallscope.store.shared.bucket import Bucket
from stallscope.store.shared.leases import Member
from stallscope.store.shared.shared_store import SharedStore, Sharing
from stallscope.store.shared.slots import N_SLOTS, by_slot, slot_of


def test_the_slot_of_a_cluster_never_changes():
    # Computed once with zlib.crc32 by hand; a change would put the rows of a cluster into two slots.
    import zlib

    assert slot_of("a", "c") == zlib.crc32(b"a\x00c") % 64
    assert {slot_of("a", f"c{n}") for n in range(2000)} == set(range(64))


def test_a_batch_of_several_clusters_is_split_without_loss():
    rows = pa.concat_tables([events(cluster, f"of-{cluster}") for cluster in CLUSTERS])
    parts = by_slot(Batch("b", "a", {"events": rows}, 600))
    assert sorted(n for part in parts.values() for n in part.tables["events"]["name"].to_pylist()) == sorted(
        f"of-{cluster}" for cluster in CLUSTERS
    )
    assert all(
        slot_of("a", cluster) == slot
        for slot, part in parts.items()
        for cluster in part.tables["events"]["cluster_id"].to_pylist()
    )
    assert len({part.batch_id for part in parts.values()}) == len(parts) > 1


def test_any_hub_takes_any_batch_once_and_gives_the_same_answer(start: Started):
    one = start("hub-a")
    settled(one)
    two = start("hub-b")
    settled(one, two)
    for cluster in CLUSTERS:
        batch = Batch(f"of-{cluster}", "a", {"events": events(cluster, cluster)})
        assert [stored(store, batch) for store in (one, two, one)] == [False, True, True]
    everything = pa.concat_tables([events(cluster, f"both-{cluster}") for cluster in CLUSTERS])
    batch = Batch("mixed", "a", {"events": everything})
    assert [stored(store, batch) for store in (two, one)] == [False, True]
    wanted = sorted([*CLUSTERS, *(f"both-{cluster}" for cluster in CLUSTERS)])
    assert names(one) == names(two) == wanted
    assert one.n_forwarded and two.n_forwarded
    for store in (one, two):
        for each in slot_stores(store):
            each.seal_all()
    assert names(one) == names(two) == wanted
    assert one.tenants() == two.tenants() == ["a"]
    assert one.snapshot("b", tables=("events",)).hot == {}


def test_a_batch_that_two_hubs_get_at_the_same_moment_is_stored_once(start: Started):
    one, two = start("hub-a"), start("hub-b")
    settled(one, two)
    answers: list[bool] = []

    def send(store: SharedStore, n: int) -> None:
        answers.append(stored(store, Batch(f"b{n}", "a", {"events": events(CLUSTERS[n % 6], f"row-{n}")})))

    for n in range(12):
        threads = [threading.Thread(target=send, args=(store, n)) for store in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers.count(True) == answers.count(False) == 12
    assert names(one) == sorted(f"row-{n}" for n in range(12))


def test_another_hub_takes_over_when_a_hub_leaves(start: Started):
    one, two = start("hub-a"), start("hub-b")
    settled(one, two)
    store_a_row_of_each_cluster(one)
    two.close()
    settled(one)
    assert all(stored(one, Batch(c, "a", {"events": events(c, c)})) for c in CLUSTERS)
    assert names(one) == CLUSTERS


def test_another_hub_takes_over_when_leases_run_out(start: Started, monkeypatch: pytest.MonkeyPatch):
    one, two = start("hub-a"), start("hub-b")
    settled(one, two)
    store_a_row_of_each_cluster(one)

    renew, renewed_s, is_silent = two.membership._leases.renew, [], threading.Event()

    def until_silent(*arguments: Any, **options: Any) -> Any:
        if is_silent.is_set():
            raise Overloaded("as a process that stopped", 1.0)
        renewed_s.append(time.monotonic())
        return renew(*arguments, **options)

    monkeypatch.setattr(two.membership._leases, "renew", until_silent)
    until(lambda: renewed_s)
    is_silent.set()
    until(lambda: len(one.membership.owned_slots()) == N_SLOTS)
    assert time.monotonic() - renewed_s[-1] > LEASE_S / 2
    late = [
        store.append(Batch("late", "a", {"events": events(c, "late")}))
        for c in CLUSTERS[:1]
        for store in slot_stores(two)[:1]
    ]
    for future in late:
        with pytest.raises(Overloaded):
            future.result(30)
    assert all(stored(one, Batch(c, "a", {"events": events(c, c)})) for c in CLUSTERS)
    assert names(one) == CLUSTERS


def test_without_the_bucket_rows_are_stored_in_postgres(start: Started, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(postgres_journal, "OBJECT_BYTES", 10)
    store = start("hub-a")
    settled(store)

    n_asked = 0

    def away(*_: object) -> None:
        nonlocal n_asked
        n_asked += 1
        raise OSError("the server does not answer")

    monkeypatch.setattr(store.bucket, "_write", away)
    stored(store, Batch("b1", "a", {"events": events("c", "x")}))
    assert names(store) == ["x"] and n_asked == 1
    monkeypatch.setattr(store.bucket, "probe", lambda: None)  # in its own thread, at any time
    stored(store, Batch("b2", "a", {"events": events("c", "y")}))
    assert names(store) == ["x", "y"] and n_asked <= 2, "only the first commit waits for the bucket"
    (slot_store,) = slot_stores(store)
    with pytest.raises(Overloaded):
        slot_store.seal_all()
    assert not list(store.folder.rglob("*.parquet")), "no file is left behind by an attempt in vain"
    n_before = n_asked
    maintained(slot_store)
    assert n_asked == n_before and names(store) == ["x", "y"]
    monkeypatch.undo()
    until(lambda: not store.bucket.is_away())
    slot_store.seal_all()
    assert names(store) == ["x", "y"] and len(list(store.bucket.listed("segments"))) == 1


def test_a_slow_bucket_delays_only_one_commit(start: Started, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(postgres_journal, "OBJECT_BYTES", 10)
    monkeypatch.setattr("stallscope.store.shared.bucket._SLOW_S", 0.0)
    store = start("hub-a")
    settled(store)
    for name in ("x", "y", "z"):
        stored(store, Batch(name, "a", {"events": events("c", name)}))
    with store.postgres.transaction() as db:
        rows = db.execute("SELECT object IS NOT NULL FROM journal ORDER BY id").fetchall()
    assert [is_object for (is_object,) in rows] == [True, False, False]
    assert not store.bucket.is_away() and names(store) == ["x", "y", "z"]
    slot_stores(store)[0].seal_all()
    assert names(store) == ["x", "y", "z"], "files are sealed all the same"


def test_a_slot_opens_without_its_sealed_files_while_the_bucket_is_away(start: Started, monkeypatch):
    one = start("hub-a")
    settled(one)
    stored(one, Batch("b1", "a", {"events": events("c", "sealed")}))
    slot_stores(one)[0].seal_all()
    stored(one, Batch("b2", "a", {"events": events("c", "hot")}))
    one.close()
    two = start("hub-b")
    monkeypatch.setattr(two.bucket, "probe", lambda: None)
    two.bucket._failed_s = time.monotonic()
    settled(two)
    assert stored(two, Batch("b2", "a", {"events": events("c", "hot")}))
    (slot_store,) = slot_stores(two)
    assert slot_store.tail("a", "events", since_us=0)["name"].to_pylist() == ["hot"]
    with pytest.raises(Busy, match="the bucket does not answer"):
        names(two)
    monkeypatch.undo()
    until(lambda: not two.bucket.is_away())
    assert names(two) == ["hot", "sealed"]


def test_dropped_and_unlisted_objects_are_removed_and_listed_objects_stay(start: Started):
    store = start("hub-a")
    settled(store)
    (slot,) = by_slot(Batch("", "a", {"events": events("c", "x")}))
    for n in range(9):
        stored(store, Batch(f"b{n}", "a", {"events": events("c", f"x{n}")}))
        slot_stores(store)[0].seal_all()
    slot_stores(store)[0]._compactor._merge_small()
    store.bucket.put("segments/a/events/left-by-a-crash.parquet", b"x")
    store.bucket.put("journal/left-by-a-crash.ipc", b"x")
    found = sweep.check(store.postgres, store.bucket, store._cache)
    assert (found.problems, found.n_rows, found.n_unlisted) == ([], 9, 2)
    n_objects = len(list(store.bucket.listed("segments")))
    assert sweep.remove_dropped(store.postgres, store.bucket, [slot], grace_s=3600) == 0
    n_dropped = sweep.remove_dropped(store.postgres, store.bucket, [slot], grace_s=0)
    assert n_dropped >= 8
    assert sweep.remove_unlisted(store.postgres, store.bucket) == 0  # too young
    assert sweep.remove_unlisted(store.postgres, store.bucket, older_s=-5) == 2
    assert len(list(store.bucket.listed("segments"))) == n_objects - n_dropped - 1
    assert names(store) == [f"x{n}" for n in range(9)]
    (path,) = [each.key for each in store.bucket.listed("segments")]
    store.bucket.put(path, b"damaged")
    (problem,) = sweep.check(store.postgres, store.bucket, store._cache).problems
    assert path in problem


def test_files_are_fetched_as_needed_and_the_cache_is_bounded(start: Started):
    one = start("hub-a")
    settled(one)
    stored(one, Batch("b", "a", {"events": events("c", "x")}))
    slot_stores(one)[0].seal_all()
    two = start("hub-b")
    for bounds in (RowBounds(clusters=frozenset({"of-another-slot"})), RowBounds(from_ns=100)):
        assert not two.snapshot("a", tables=("events",), bounds={"events": bounds}).segments
    assert not list(two.folder.rglob("*.parquet"))
    assert names(two) == ["x"] and two._cache.n_fetched == 1
    assert names(two) == ["x"] and two._cache.n_fetched == 1
    (path,) = two.folder.rglob("*.parquet")
    two._cache._max_bytes = 0
    assert two._cache.trim() == 0  # in use
    os.utime(path, (1, 1))
    assert two._cache.trim() == 1
    two._cache._max_bytes = 1 << 20
    assert names(two) == ["x"]


def test_a_query_does_not_wait_for_all_files_of_a_slow_bucket(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    one = start("hub-a")
    settled(one)
    for name in ("x", "y", "z"):
        stored(one, Batch(name, "a", {"events": events("c", name)}))
        slot_stores(one)[0].seal_all()
    two = start("hub-b")
    get, may_end, asked = two.bucket.get, threading.Event(), list[str]()

    def slow(key: str) -> bytes:
        asked.append(key)
        assert may_end.wait(60)
        return get(key)

    with monkeypatch.context() as patch:
        patch.setattr(two.bucket, "get", slow)
        patch.setattr("stallscope.store.shared.shared_store._SQL_FETCH_S", 0.1)
        patch.setattr("stallscope.store.shared.segment_cache._AT_ONCE", 2)

        def are_under_way() -> bool:
            with pytest.raises(Busy, match=r"3 of the 3 sealed files .* have not arrived .* retry in a mo"):
                two.snapshot("a", tables=("events",))
            return len(asked) == 2

        until(are_under_way)
        assert are_under_way()
        may_end.set()
        until(lambda: two._cache.n_fetched == 2)
    assert len(asked) == 2  # no file was fetched for a query that had given up, except two under way
    assert names(two) == ["x", "y", "z"]
    two._cache._max_bytes = 1
    shutil.rmtree(two.folder / "segments")
    with pytest.raises(OverLimits, match=r"room for 0\.0 MB; select a shorter time"):
        names(two)


def test_a_full_disk_fails_queries_only_and_unused_files_make_room(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    one = start("hub-a")
    settled(one)
    for name in ("x", "y"):
        stored(one, Batch(name, "a", {"events": events("c", name)}))
        slot_stores(one)[0].seal_all()
    two = start("hub-b")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(StorageFailed, match="check free space"):
            names(two)
    assert names(two) == ["x", "y"]
    assert two._cache.trim() == 0
    older, newer = sorted(two.folder.rglob("*.parquet"))
    os.utime(older, (1, 1))
    usage = shutil.disk_usage(two.folder)._replace(free=0)
    with monkeypatch.context() as patch:
        patch.setattr("stallscope.store.shared.segment_cache.shutil.disk_usage", lambda _: usage)
        assert two._cache.trim() == 1 and newer.exists() and not older.exists()
        with pytest.raises(OverLimits, match=r"room for 0\.0 MB"):
            names(two)
    assert names(two) == ["x", "y"]
    monkeypatch.setattr("stallscope.store.shared.segment_cache.shutil.disk_usage", lambda _: usage)
    assert names(two) == ["x", "y"]  # nothing is fetched


def test_hubs_of_neighbouring_versions_run_together_and_an_older_hub_does_not_start(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    steps, latest = postgres_schema._STEPS, postgres_schema.SHARED_SCHEMA_VERSION
    with monkeypatch.context() as older:
        older.setattr(postgres_schema, "_STEPS", {n: steps[n] for n in range(1, latest)})
        older.setattr(postgres_schema, "SHARED_SCHEMA_VERSION", latest - 1)
        one = start("older")
        settled(one)
        for n in range(4):
            stored(one, Batch(f"b{n}", "a", {"events": events("c", f"x{n}")}))
            slot_stores(one)[0].seal_all()
    two = start("newer")  # migrates the tables under the running hub
    settled(one, two)
    for n in range(4, 8):
        stored(one if n % 2 else two, Batch(f"b{n}", "a", {"events": events("c", f"x{n}")}))
        for store in (one, two):
            for each in slot_stores(store):
                each.seal_all()
    assert names(one) == names(two) == [f"x{n}" for n in range(8)]
    with monkeypatch.context() as older:
        older.setattr(postgres_schema, "SHARED_SCHEMA_VERSION", latest - 1)
        with pytest.raises(
            NewerSchema, match=f"shared {latest}; this version supports {latest - 1}.*upgrade"
        ):
            start("older again")


def test_an_older_hub_neither_drops_nor_refuses_for_good_what_a_newer_hub_forwards(start: Started):
    one, two = start("older"), start("newer")
    settled(one, two)
    cluster = next(c for c in CLUSTERS if slot_of("a", c) in one.membership.owned_slots())
    rows = events(cluster, "x")
    newer = rows.append_column("of_a_later_version", pa.nulls(1, pa.int64()))
    assert not stored(two, Batch("b1", "a", {"events": newer}))
    filled = rows.append_column("of_a_later_version", pa.array([1], pa.int64()))
    for tables in ({"events": filled}, {"events": rows, "table_of_a_later_version": rows}):
        with pytest.raises(Overloaded, match="the hub that owns the cluster is of an older version"):
            two.append(Batch("b2", "a", tables)).result(30)
    assert names(one) == ["x"]


def test_a_hub_reports_that_postgres_or_the_bucket_is_away(start: Started, monkeypatch: pytest.MonkeyPatch):
    store = start("hub-a")
    settled(store)
    assert store.away() == {"postgres_away_s": 0.0, "bucket_away_s": 0.0}
    monkeypatch.setattr(store.bucket, "_write", _fails)
    with pytest.raises(Overloaded):
        store.bucket.put("journal/x", b"x")
    until(lambda: store.away()["bucket_away_s"] > 0 and store.numbers()["n_bucket_away"] == 1)
    until(lambda: cluster_status.status(store.postgres, lease_s=LEASE_S)["hubs"][0]["bucket_away_s"] > 0)
    monkeypatch.undo()
    until(lambda: store.away()["bucket_away_s"] == 0)

    def not_renewed(*_: object, **__: object) -> dict[int, int]:
        raise Overloaded("PostgreSQL does not answer", 1.0)

    monkeypatch.setattr(store.membership._leases, "renew", not_renewed)
    until(lambda: store.away()["postgres_away_s"] > 0 and store.numbers()["n_postgres_away"] == 1)
    with pytest.raises(Overloaded, match="PostgreSQL does not answer"):
        store.check_room()


def _fails(*_: object) -> None:
    raise OSError("as a bucket that does not answer")


def test_a_backup_of_database_and_bucket_is_restored(
    start: Started, postgres_server: PostgresServer, s3_server: S3Server, tmp_path: Path
):
    """The commands of docs/shared-hub.md, with pg_dump and pg_restore; a copy of objects is a copy of objects."""
    store = start("hub-a")
    settled(store)
    for n in range(3):
        stored(store, Batch(f"b{n}", "a", {"events": events("c", f"x{n}")}))
        if n < 2:
            slot_stores(store)[0].seal_all()
    dump = tmp_path / "hubs.dump"
    programs = shared_servers._postgres_programs()
    assert programs
    subprocess.run(
        [programs / "pg_dump", "--format=custom", f"--file={dump}", start.dsn],
        check=True,
        capture_output=True,
    )
    copies = {each.key: store.bucket.get(each.key) for each in store.bucket.listed("")}
    stored(store, Batch("later", "a", {"events": events("c", "later")}))
    slot_stores(store)[0].seal_all()
    slot_stores(store)[0]._compactor.expire()
    store.close()

    other = replace(
        start,
        dsn=postgres_server.new_database(),
        bucket=s3_server.bucket(f"restored{postgres_server.n_databases}"),
    )
    subprocess.run([programs / "pg_restore", f"--dbname={other.dsn}", dump], check=True, capture_output=True)
    for key, content in copies.items():
        Bucket(other.bucket).put(key, content)
    again = other("hub-b")
    settled(again)
    assert names(again) == ["x0", "x1", "x2"]
    assert sweep.check(again.postgres, again.bucket, again._cache).problems == []
    assert stored(again, Batch("b1", "a", {"events": events("c", "x1")}))  # the ids of batches are restored
    assert not stored(again, Batch("later", "a", {"events": events("c", "later")}))


@pytest.mark.parametrize(
    ("postgres", "bucket", "error", "words"),
    [
        ("postgresql://u@127.0.0.1:1/db", None, StorageFailed, "does not answer"),
        ("postgresql://u:sesame@127.0.0.1:1/db", None, BadInput, "contains a password"),
        ("not a dsn", None, BadInput, "--shared expects postgresql://"),
        ("postgresql://u:ses%ZZame@h/db", None, BadInput, "--shared expects"),
        (None, "https://sesame", BadInput, "--bucket expects s3://"),
        (None, "s3://key:sesame@hub/x", BadInput, "AWS_ACCESS_KEY_ID"),
        (None, "missing", BadInput, "does not exist"),
        (None, "wrong key", BadInput, "refuses the keys"),
        (None, "down", StorageFailed, "does not answer"),
    ],
)
def test_messages_name_the_mistake_and_no_secret(
    postgres: str | None,
    bucket: str | None,
    error: type[Exception],
    words: str,
    postgres_server: PostgresServer,
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    if bucket == "missing":
        bucket = s3_server.bucket(name="missing")
    elif bucket == "wrong key":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
        bucket = s3_server.bucket()
    elif bucket == "down":
        bucket = "s3://hub/x?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"
    sharing = Sharing(
        postgres=postgres or postgres_server.dsn("postgres"),
        bucket=bucket or s3_server.bucket(),
        cache=tmp_path,
        name="hub-a",
        version="0",
        peer_listen="127.0.0.1:0",
        peer_host="127.0.0.1",
    )
    with pytest.raises(error, match=words) as raised:
        SharedStore(sharing, STILL, work=lambda _: NoWork())
    assert "sesame" not in str(raised.value) and "ses%ZZame" not in str(raised.value)
    assert "test-key" not in str(raised.value)


def test_only_hubs_of_the_database_may_use_the_port_for_hubs(start: Started):
    import grpc

    from stallscope.store.shared import peer_port

    store = start("hub-a")
    stranger = peer_port.Peers("not the secret")
    with closing(stranger), pytest.raises(Overloaded):
        stranger.send(store.membership.member, 0, Batch("", "a", {"events": events("c", "x")})).result(30)
    assert grpc and store.tenants() == []


def test_rows_do_not_wait_for_a_hub_that_stopped_once_it_has_lost_the_slot():
    from stallscope.store.shared import peer_port

    with socket.create_server(("127.0.0.1", 0)) as silent, closing(peer_port.Peers("secret")) as peers:
        cert, _ = peer_port.certificate()
        port = silent.getsockname()[1]
        member = Member(
            name="stopped", peer=f"127.0.0.1:{port}", certificate=cert.decode(), ingest="", version="0"
        )
        waiting = [peers.send(member, slot, Batch("", "a", {"events": events("c", "x")})) for slot in (1, 2)]
        peers.cancel_moved(lambda slot: "stopped" if slot == 1 else "another")
        with pytest.raises(Overloaded, match="send again"):
            waiting[1].result(10)
        assert not waiting[0].done()
        peers.cancel_moved(lambda slot: "")
        with pytest.raises(Overloaded):
            waiting[0].result(10)


def test_a_database_and_a_prefix_of_a_bucket_belong_together(
    start: Started, postgres_server: PostgresServer, s3_server: S3Server
):
    start("hub-a").close()
    elsewhere = replace(start, bucket=s3_server.bucket(f"other{postgres_server.n_databases}"))
    with pytest.raises(BadInput, match="the object hubs-id is missing there"):
        elsewhere("hub-b")
    other = replace(start, dsn=postgres_server.new_database())
    with pytest.raises(BadInput, match="the hubs of another database use --bucket s3://hub/"):
        other("hub-c")
    replace(other, bucket=elsewhere.bucket)("hub-d").close()
    start("hub-e")


def test_slots_stay_with_their_hubs_when_the_database_was_away_for_longer_than_a_lease(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    one, two = (start(name, lease_s=30.0) for name in ("hub-a", "hub-b"))
    settled(one, two)
    before = {slot.slot: (slot.owner, slot.epoch) for slot in leases.slots(one.postgres)}
    renewed, n_failed, away = {one: 0, two: 0}, {one: 0, two: 0}, {one, two}
    for store in (one, two):

        def renew(*args, renew=store.membership._leases.renew, store=store, **named):
            if store in away:
                n_failed[store] += 1
                raise Overloaded("PostgreSQL does not answer", 2.0)
            renewed[store] += 1
            return renew(*args, **named)

        monkeypatch.setattr(store.membership._leases, "renew", renew)
    until(lambda: min(n_failed.values()) >= 2)  # no turn from before is under way
    with one.postgres.transaction() as db:
        db.execute("UPDATE leases SET expires = clock_timestamp() - interval '1 s'")
        db.execute("UPDATE hubs SET seen = clock_timestamp() - interval '60 s'")
    for store in (one, two):
        store.membership._last_renewed_s -= 60
    for store in (one, two):
        away.remove(store)
        until(lambda store=store: renewed[store] >= 2)
    assert {slot.slot: (slot.owner, slot.epoch) for slot in leases.slots(one.postgres)} == before


def test_a_missing_object_is_set_aside_and_neither_answers_nor_new_rows_need_it(start: Started):
    store = start("hub-a")
    settled(store)
    for n in range(9):
        stored(store, Batch(f"b{n}", "a", {"events": events("c", f"x{n}")}))
        slot_stores(store)[0].seal_all()
    path = sorted(each.key for each in store.bucket.listed("segments"))[0]
    content = store.bucket.get(path)
    store.bucket.remove(path)
    store.close()
    again = start("hub-b")
    settled(again)
    assert not stored(again, Batch("later", "a", {"events": events("c", "later")})), "the slot opens"
    assert names(again) == ["later", *(f"x{n}" for n in range(1, 9))]
    assert "1 damaged files with 1 rows are set aside" in again.damage.warning("a")
    for _ in range(2):  # the first time finds the missing file
        slot_stores(again)[0]._compactor._merge_small()
    assert len(slot_stores(again)[0].snapshot("a").segments["events"]) == 1, "the other files are merged"
    assert [
        path in problem for problem in sweep.check(again.postgres, again.bucket, again._cache).problems
    ] == [True]
    again.bucket.put(path, content)
    again._check_damaged()
    assert names(again) == ["later", *(f"x{n}" for n in range(9))] and not again.damage.unreadable()


def test_a_cache_folder_that_is_deleted_while_the_hub_runs_is_made_again(start: Started):
    store = start("hub-a")
    settled(store)
    for n in range(3):
        stored(store, Batch(f"b{n}", "a", {"events": events("c", f"x{n}")}))
        slot_stores(store)[0].seal_all()
        shutil.rmtree(store.folder)
        assert names(store) == [f"x{each}" for each in range(n + 1)]


def test_no_object_gets_the_name_of_an_earlier_object(start: Started):
    """A merged file has the time of its newest part; the name of a file that was merged before is free here again."""
    store = start("hub-a")
    settled(store)
    stored(store, Batch("b", "a", {"events": events("c", "x")}))
    (slot_store,) = slot_stores(store)
    slot_store.seal_all()
    sealer = slot_store._compactor._sealer
    first = slot_store.snapshot("a").segments["events"][0]
    paths = {first.path}
    for _ in range(3):
        shutil.rmtree(store.folder / "segments")
        store._cache.fetch([first])
        merged = sealer.merged([first])
        (store.folder / merged.path).unlink()
        paths.add(merged.path)
    assert len(paths) == 4


def test_a_wrong_clock_changes_neither_the_times_of_commits_nor_the_age_of_objects(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    right_ns, ahead_s = time.time_ns, 2 * 86_400
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() + ahead_s * 10**9)
    store = start("hub-a")
    settled(store)
    assert abs(store.clock_ahead_s() - ahead_s) < 60
    stored(store, Batch("b", "a", {"events": events("c", "x")}))
    with store.postgres.transaction() as db:
        ((age_s,),) = db.execute(
            "SELECT extract(epoch FROM clock_timestamp())::float8 - max(received_us) / 1e6 FROM journal"
        ).fetchall()
    assert abs(age_s) < 60
    store.bucket.put("segments/a/events/uploaded-just-now.parquet", b"x")
    assert sweep.remove_unlisted(store.postgres, store.bucket) == 0


def test_an_object_without_a_time_does_not_make_the_local_clock_the_clock_of_the_bucket(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    """As when another client deletes the object between its upload and the question for its time."""
    bucket = Bucket(start.bucket)
    put = bucket.put

    def put_and_deleted(key: str, content: bytes, *, is_quick: bool = False) -> None:
        put(key, content, is_quick=is_quick)
        bucket.remove(key)

    monkeypatch.setattr(bucket, "put", put_and_deleted)
    with pytest.raises(Overloaded, match="does not report the time"):
        bucket.now_ns()


def test_a_starting_hub_does_not_delete_the_object_by_which_another_hub_reads_the_time(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    bucket, starting = Bucket(start.bucket), Bucket(start.bucket)
    put, right_ns = bucket.put, time.time_ns

    def put_while_the_other_starts(key: str, content: bytes, *, is_quick: bool = False) -> None:
        put(key, content, is_quick=is_quick)
        starting.checked()

    monkeypatch.setattr(bucket, "put", put_while_the_other_starts)
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() + 86_400 * 10**9)
    assert abs(bucket.now_ns() - right_ns()) < 3600 * 10**9
    assert bucket.find(bucket._test_key) is None


def test_a_folder_has_one_hub_and_the_folder_of_a_single_hub_is_refused(start: Started):
    start("hub-a")
    with pytest.raises(StorageFailed, match="another stallscope hub uses"):
        start("hub-a")
    folder = start.folder / "single"
    HubStore.open(folder).close()
    with pytest.raises(BadInput, match=r"has the data of a single hub.*choose another path with --db"):
        start("single")
    start("hub-b").close()
    start("hub-b")
