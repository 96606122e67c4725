"""Slots on their way from one hub to another: rows are accepted for as long as possible, and totals never fall."""

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from tests.store.shared.hubs import (
    CLUSTERS,
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

from stallscope.errors import Overloaded
from stallscope.store.hub.batches import Batch
from stallscope.store.shared import leases
from stallscope.store.shared.leases import Leases, Member
from stallscope.store.shared.postgres_journal import Lease
from stallscope.store.shared.shared_store import SharedStore
from stallscope.store.shared.slots import N_SLOTS


def test_totals_do_not_fall_when_a_slot_moves_to_another_hub(start: Started):
    one = start("hub-a")
    settled(one)
    store_a_row_of_each_cluster(one)
    for each in slot_stores(one):
        each.seal_all()
    seen: list[tuple[int, int]] = []

    def totals() -> tuple[int, int]:
        seen.append((one.counters.rows, one.kept.sealed_rows))
        return seen[-1]

    assert totals() == (len(CLUSTERS), len(CLUSTERS))
    two = start("hub-b")
    until(
        lambda: (
            totals()
            and len(one.membership.owned_slots()) == len(two.membership.owned_slots()) == N_SLOTS // 2
        )
    )
    settled(one, two)
    assert len(slot_stores(one)) < len(CLUSTERS)
    two.close()
    settled(one)
    until(lambda: totals() and len(slot_stores(one)) == len(CLUSTERS))
    assert set(seen) == {(len(CLUSTERS), len(CLUSTERS))}


def test_a_slot_that_is_handed_over_accepts_rows_while_its_maintenance_waits_for_the_bucket(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    one = start("hub-a")
    settled(one)
    for cluster in CLUSTERS:
        stored(one, Batch(f"1-{cluster}", "a", {"events": events(cluster, "x")}))
    is_waiting, may_end = threading.Event(), threading.Event()
    for each in slot_stores(one):

        def end_maintenance(end=each.end_maintenance) -> None:
            is_waiting.set()
            assert may_end.wait(90)
            end()

        monkeypatch.setattr(each, "end_maintenance", end_maintenance)
    two = start("hub-b")
    try:
        assert is_waiting.wait(90)
        for cluster in CLUSTERS:
            one.append(Batch(f"2-{cluster}", "a", {"events": events(cluster, "y")})).result(30)
    finally:
        may_end.set()
    settled(one, two)
    assert names(two) == sorted(["x", "y"] * len(CLUSTERS))


def test_a_slot_is_released_although_its_diagnosis_could_not_be_ended(start: Started):
    class Broken(NoWork):
        def close(self) -> None:
            raise ZeroDivisionError

    one = start("hub-a", work=Broken)
    settled(one)
    store_a_row_of_each_cluster(one)
    two = start("hub-b", lease_s=60.0)  # far longer than the patience of settled() for a lease that runs out
    settled(one, two)
    assert names(two) == CLUSTERS


def test_a_hub_uses_a_slot_whose_lease_it_has_without_knowing(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    """As when PostgreSQL ends before it answers a take: the hub renews the lease, so no other hub can use the slot."""
    one = start("hub-a", lease_s=60.0)
    settled(one)
    take, n_lost = one.membership._leases.take, 0

    def lost(n: int) -> list[Lease]:
        nonlocal n_lost
        n_lost += len(take(n))
        raise Overloaded("PostgreSQL does not answer", 1.0)

    monkeypatch.setattr(one.membership._leases, "take", lost)
    for lease in [each.lease for each in one.membership._owned.values()][:8]:
        one.membership._leases.release(lease)
    until(lambda: n_lost == 8 and len(one.membership.owned_slots()) == N_SLOTS)
    store_a_row_of_each_cluster(one)
    assert names(one) == CLUSTERS


def test_a_slot_whose_release_failed_is_used_again_or_released_later(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    one = start("hub-a", lease_s=60.0)
    settled(one)
    release, n_failed = one.membership._leases.release, 0

    def fails_first(lease: Lease) -> None:
        nonlocal n_failed
        if n_failed < N_SLOTS // 2:
            n_failed += 1
            raise Overloaded("PostgreSQL does not answer", 1.0)
        release(lease)

    monkeypatch.setattr(one.membership._leases, "release", fails_first)
    two = start("hub-b", lease_s=60.0)
    settled(one, two)
    assert n_failed == N_SLOTS // 2


def test_rows_that_are_sent_while_hubs_die_join_and_leave_are_stored_once(
    start: Started, monkeypatch: pytest.MonkeyPatch
):
    one, two = start("hub-a"), start("hub-b")
    settled(one, two)
    receiving, sent, ended = (one, two), set[str](), threading.Event()

    def send(cluster: str) -> None:
        for n in itertools.count():
            if ended.is_set():
                return
            batch = Batch(f"{cluster}-{n}", "a", {"events": events(cluster, f"{cluster}-{n}")})

            def is_acknowledged(batch: Batch = batch, n: int = n) -> bool:
                hubs = receiving
                return is_stored(hubs[n % len(hubs)], batch)

            until(is_acknowledged)
            sent.add(batch.batch_id)

    with ThreadPoolExecutor(len(CLUSTERS)) as threads:
        senders = [threads.submit(send, cluster) for cluster in CLUSTERS]
        try:
            until(lambda: len(sent) > 20)
            receiving = (one,)  # it dies: no renewal, and no row reaches it
            monkeypatch.setattr(two.membership._leases, "renew", _fails)
            three = start("hub-c")  # joins while the slots of the dead hub wait for its leases to run out
            receiving = (one, three)
            settled(one, three)
            n_before = len(sent)
            until(lambda: len(sent) > n_before + 20)
            one.drain()  # it forwards the rows that it still receives
            until(lambda: len(three.membership.owned_slots()) == N_SLOTS)
            n_before = len(sent)
            until(lambda: len(sent) > n_before + 20)
        finally:
            ended.set()
        for sender in senders:
            sender.result(90)
    assert names(three) == sorted(sent)


def is_stored(store: SharedStore, batch: Batch) -> bool:
    """Whether the hub has acknowledged the batch, now or before."""
    try:
        store.append(batch).result(30)
    except Overloaded:
        return False
    return True


def _fails(*_: object, **__: object) -> None:
    raise Overloaded("as a process that has ended", 1.0)


class _SlowServer:
    """A PostgreSQL server with the right time; the clock of this machine is ahead_s ahead.

    query_s: the time that a query takes before and after it reads the clock. row_lock_s: the wait of other statements.
    """

    def __init__(self, *, ahead_s: float):
        self.now_s, self.ahead_s = 1e9, ahead_s
        self.query_s, self.row_lock_s = (0.0, 0.0), 0.0

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return int((self.now_s + self.ahead_s) * 1e9)

    @contextmanager
    def transaction(self) -> Iterator["_SlowServer"]:
        yield self

    def execute(self, statement: str, values: object = None) -> SimpleNamespace:
        before_s, after_s = self.query_s if statement.startswith("SELECT") else (0.0, self.row_lock_s)
        self.now_s += before_s
        rows = [] if statement.startswith("UPDATE") else [(self.now_s,)]
        self.now_s += after_s
        return SimpleNamespace(fetchall=lambda: rows)


def test_neither_a_wait_for_a_row_nor_a_slow_answer_changes_the_difference_of_the_clocks(
    monkeypatch: pytest.MonkeyPatch,
):
    server = _SlowServer(ahead_s=3.0)
    monkeypatch.setattr(leases, "time", server)
    member = Member(name="hub-a", peer="", certificate="", ingest="", version="0")
    mine = Leases(server, member, lease_s=3.0)  # type: ignore[arg-type]
    server.query_s, server.row_lock_s = (0.1, 0.1), 20.0
    mine.renew({})
    assert mine.clock_ahead_ns / 1e9 == pytest.approx(3.0, abs=0.01)
    server.query_s = (0.0, 60.0)  # as when this process is stopped before it reads the answer
    mine.renew({})
    assert mine.clock_ahead_ns / 1e9 == pytest.approx(3.0, abs=0.01)
