"""Both journals keep the same contract: after a restart, each committed row exists once, and no other row."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from tests.shared_servers import PostgresServer

from stallscope.errors import Overloaded
from stallscope.store.hub import round_lateness, schema
from stallscope.store.hub.duck_journal import DuckJournal
from stallscope.store.hub.journal import AlreadyStored, Entry, Journal, Segment
from stallscope.store.shared import leases, postgres_journal, postgres_schema
from stallscope.store.shared.leases import Leases, Member
from stallscope.store.shared.postgres import Postgres
from stallscope.store.shared.postgres_journal import Lease, PostgresJournal, SlotLost

MEMBER = Member(name="hub-a", peer="127.0.0.1:1", certificate="", ingest="", version="0")
OTHER = Member(name="hub-b", peer="127.0.0.1:2", certificate="", ingest="", version="0")


class Memory:
    """Objects in memory."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def is_quick(self) -> bool:
        return True

    def put(self, key: str, content: bytes, *, is_quick: bool = False) -> None:
        self.content[key] = content

    def get(self, key: str) -> bytes:
        return self.content[key]


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[Postgres]:
    with closing(Postgres(postgres_server.new_database(), name="hub-a", stopped_s=1.0)) as made:
        postgres_schema.prepare(made)
        yield made


Open = Callable[[], Journal]


@pytest.fixture(params=["file", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the journal; again after its close()."""
    if request.param == "file":
        return lambda: DuckJournal.open(tmp_path)
    postgres, objects = request.getfixturevalue("postgres"), Memory()
    leases = Leases(postgres, MEMBER, lease_s=60)
    leases.renew({})
    (lease,) = leases.take(1)
    return lambda: PostgresJournal(postgres, lease, objects, lost=lambda: None)


def rows(*names: str) -> pa.Table:
    return pa.table({"ts_ns": list(range(len(names))), "name": list(names)})


def entry(at_us: int, *names: str, table: str = "events") -> Entry:
    return Entry(at_us, "a", table, rows(*names))


def verdict(verdict_id: str, state: str = "open", **values: object) -> pa.Table:
    row = {
        "tenant": "a",
        "cluster_id": "c",
        "verdict_id": verdict_id,
        "state": state,
        "updated_at": 5,
        **values,
    }
    return pa.Table.from_pylist([row], schema=schema.arrow_schema(schema.VERDICTS))


def segment(path: str, n: int = 1) -> Segment:
    return Segment("a", "events", path, n, 10, 0, None, n)


def names(journal: Journal) -> list[str]:
    return [name for each in journal.entries() for name in each.rows["name"].to_pylist()]


def test_a_commit_is_there_after_a_restart_in_order(opened: Open):
    with closing(opened()) as journal:
        journal.commit(10, [entry(10, "x", "y"), entry(10, "z", table="losses")], batch_ids=[("a", "b1")])
        journal.commit(20, [entry(20, "w")], batch_ids=[("a", "b2"), ("b", "b1")])
    with closing(opened()) as journal:
        assert [(e.received_us, e.tenant, e.table, len(e.rows)) for e in journal.entries()] == [
            (10, "a", "events", 2),
            (10, "a", "losses", 1),
            (20, "a", "events", 1),
        ]
        assert names(journal) == ["x", "y", "z", "w"]
        assert sorted(journal.batch_ids()) == [("a", "b1", 10), ("a", "b2", 20), ("b", "b1", 20)]
        assert journal.latest_us() == 20
        assert [(n, reason) for _, n, reason in journal.checked_entries()] == [(2, ""), (1, ""), (1, "")]


def test_an_empty_journal_has_nothing(opened: Open):
    with closing(opened()) as journal:
        assert journal.latest_us() == 0
        assert not list(journal.entries()) and not journal.segments() and not journal.round_medians()
        assert all(not len(journal.kept(name)) for name in schema.KEPT)


def test_sealing_replaces_exactly_the_rows_up_to_the_commit(opened: Open):
    medians = pa.table(
        {"cluster_id": ["c"], "comm_hash": ["h"], "seq": [3], "median_ns": [7]}, schema=round_lateness.MEDIANS
    )
    with closing(opened()) as journal:
        for at_us, name in ((10, "old"), (20, "newer"), (30, "newest")):
            journal.commit(
                at_us, [entry(at_us, name), entry(at_us, f"{name}-lost", table="losses")], batch_ids=[]
            )
        journal.seal(segment("one", 20), 20, medians=medians)
    with closing(opened()) as journal:
        assert names(journal) == ["old-lost", "newer-lost", "newest", "newest-lost"]
        assert journal.segments() == [segment("one", 20)]
        assert journal.round_medians()["a"].to_pylist() == medians.to_pylist()
        journal.seal(segment("two", 30), 30, medians=round_lateness.MEDIANS.empty_table())
        journal.replace_segments(journal.segments(), [segment("merged", 30)])
        assert journal.segments() == [segment("merged", 30)]
        assert sum(map(len, journal.round_medians().values())) == 0


def test_maintained_rows_are_replaced_by_key_and_keep_their_types(opened: Open):
    with closing(opened()) as journal:
        journal.commit(10, [], batch_ids=[], kept={"verdicts": [verdict("v1", usd=1.5), verdict("v2")]})
        journal.commit(20, [], batch_ids=[], kept={"verdicts": [verdict("v1", "closed", usd=2.5)]})
    with closing(opened()) as journal:
        kept = journal.kept("verdicts")
        assert kept.schema == schema.arrow_schema(schema.VERDICTS)
        by_id = {row["verdict_id"]: row for row in kept.to_pylist()}
        assert (by_id["v1"]["state"], by_id["v1"]["usd"], by_id["v2"]["state"]) == ("closed", 2.5, "open")
        assert by_id["v1"]["updated_at"].timestamp() == 5e-6


def test_old_rows_are_forgotten_and_new_rows_stay(opened: Open):
    with closing(opened()) as journal:
        journal.commit(10, [], batch_ids=[("a", "old")])
        journal.commit(20, [], batch_ids=[("a", "new")])
        closed = [verdict("v1", "closed", closed_at=10), verdict("v2", "closed", closed_at=30), verdict("v3")]
        journal.commit(30, [], batch_ids=[], kept={"verdicts": closed})
        journal.forget_batches(15)
        assert journal.forget_verdicts(20) == 1
    with closing(opened()) as journal:
        assert journal.batch_ids() == [("a", "new", 20)]
        assert sorted(journal.kept("verdicts")["verdict_id"].to_pylist()) == ["v2", "v3"]


def test_owners_of_closed_incidents_are_deleted(opened: Open):
    held = verdict(
        "v1",
        "closed",
        closed_at=10,
        kind="idle",
        owner_user="u",
        summary="u holds GPUs",
        verdict='{"owner": "u"}',
    )
    with closing(opened()) as journal:
        journal.commit(10, [], batch_ids=[], kept={"verdicts": [held]})
        assert journal.forget_owners(20) == 1
        (row,) = journal.kept("verdicts").to_pylist()
        assert row["owner_user"] is None and "u holds" not in row["summary"] and '"u"' not in row["verdict"]


def test_a_damaged_entry_is_reported_and_can_be_removed(opened: Open):
    with closing(opened()) as journal:
        journal.commit(10, [Entry(10, "a", "events", rows("x"), b"not rows"), entry(10, "y")], batch_ids=[])
        (bad,) = [(key, reason) for key, _, reason in journal.checked_entries() if reason]
        assert "cannot be read" in bad[1]
        journal.remove_entry(bad[0])
        assert names(journal) == ["y"]


# Only PostgreSQL has other writers.


@pytest.fixture
def lease(postgres: Postgres) -> Lease:
    return Leases(postgres, MEMBER, lease_s=60).take(1)[0]


def test_a_batch_of_another_slot_is_refused_whole(postgres: Postgres):
    one, two = Leases(postgres, MEMBER, lease_s=60).take(2)
    first, second = (PostgresJournal(postgres, each, Memory(), lost=lambda: None) for each in (one, two))
    first.commit(10, [entry(10, "x")], batch_ids=[("a", "b1")])
    with pytest.raises(AlreadyStored) as refused:
        second.commit(20, [entry(20, "x"), entry(20, "y")], batch_ids=[("a", "b1"), ("a", "b2")])
    assert refused.value.keys == {("a", "b1"): 10}
    assert not names(second)
    second.commit(30, [entry(30, "y")], batch_ids=[("a", "b2")])
    assert names(second) == ["y"]


def test_the_previous_owner_cannot_commit(postgres: Postgres, lease: Lease):
    lost = []
    journal = PostgresJournal(postgres, lease, Memory(), lost=lambda: lost.append(1))
    journal.commit(10, [entry(10, "x")], batch_ids=[])
    Leases(postgres, MEMBER, lease_s=60).release(lease)
    (taken,) = [each for each in Leases(postgres, OTHER, lease_s=60).take(64) if each.slot == lease.slot]
    assert taken.epoch == lease.epoch + 1
    for change in (
        lambda: journal.commit(20, [entry(20, "late")], batch_ids=[]),
        lambda: journal.seal(segment("late"), 20, medians=None),
    ):
        with pytest.raises(SlotLost):
            change()
    assert lost == [1]
    after = PostgresJournal(postgres, taken, Memory(), lost=lambda: None)
    assert names(after) == ["x"] and not after.segments()


def test_a_commit_with_an_unknown_outcome_makes_the_slot_open_again(postgres: Postgres, lease: Lease):
    lost = []
    journal = PostgresJournal(postgres, lease, Memory(), lost=lambda: lost.append(1))
    zombie = PostgresJournal(postgres, lease, Memory(), lost=lambda: None)
    zombie.commit(10, [entry(10, "x")], batch_ids=[("a", "b1")])  # as a commit whose answer never arrived
    with pytest.raises(Overloaded):
        journal.seal(segment("without x"), 10, medians=None)
    assert lost == [1] and names(journal) == ["x"]


def test_large_commits_are_objects_and_leave_when_they_are_sealed(
    postgres: Postgres, lease: Lease, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(postgres_journal, "OBJECT_BYTES", 10)
    objects = Memory()
    journal = PostgresJournal(postgres, lease, objects, lost=lambda: None)
    journal.commit(10, [entry(10, "x"), entry(10, "y", table="losses")], batch_ids=[])
    assert len(objects.content) == 1 and names(journal) == ["x", "y"]
    with postgres.transaction() as db:
        assert db.execute("SELECT count(ipc) FROM journal").fetchone() == (0,)

    def dropped() -> int:
        with postgres.transaction() as db:
            (row,) = db.execute("SELECT count(*) FROM dropped WHERE path LIKE 'journal/%'").fetchall()
            return int(row[0])

    journal.seal(segment("one"), 10, medians=None)
    assert dropped() == 0  # the object also has the other table's rows
    journal.seal(Segment("a", "losses", "two", 1, 10, 0, None, 1), 10, medians=None)
    assert dropped() == 1


def test_texts_with_nul_are_stored(postgres: Postgres, lease: Lease):
    journal = PostgresJournal(postgres, lease, Memory(), lost=lambda: None)
    journal.commit(10, [], batch_ids=[("a", "b\0")], kept={"verdicts": [verdict("v", summary="a\0b")]})
    assert journal.kept("verdicts")["summary"].to_pylist() == ["a\ufffdb"]
    with pytest.raises(AlreadyStored) as refused:
        journal.commit(20, [], batch_ids=[("a", "b\0")])
    assert refused.value.keys == {("a", "b\0"): 10}


def test_a_stopped_owner_inside_a_transaction_does_not_hold_its_slot(
    postgres_server: PostgresServer, postgres: Postgres
):
    dsn = postgres_server.dsn(f"hub{postgres_server.n_databases}")
    with (
        closing(Postgres(dsn, name="hub-a", stopped_s=60)) as stopped,
        closing(Postgres(dsn, name="hub-b")) as other,
    ):
        (lease,) = Leases(stopped, MEMBER, lease_s=0.1).take(1)
        journal = PostgresJournal(stopped, lease, Memory(), lost=lambda: None)
        taken: set[int] = set()
        with pytest.raises(Overloaded), journal.transaction():
            until_s = time.monotonic() + 30
            while lease.slot not in taken and time.monotonic() < until_s:
                taken |= {each.slot for each in Leases(other, OTHER, lease_s=60).take(64)}
                time.sleep(0.1)
        assert lease.slot in taken


def test_shares_are_equal_and_each_slot_has_one_owner(postgres: Postgres):
    a, b = (Leases(postgres, member, lease_s=60) for member in (MEMBER, OTHER))
    a.renew({})
    taken = a.take(a.share())
    assert len(taken) == 64
    b.renew({})
    assert a.share() == b.share() == 32 and not b.take(32)
    for each in taken[:32]:
        a.release(each)
    assert {each.slot for each in b.take(32)} == {each.slot for each in taken[:32]}
    slots, members = leases.directory(postgres, lease_s=60)
    assert [slot.owner for slot in slots].count("hub-b") == 32
    assert [state.member.name for state in members] == ["hub-a", "hub-b"]
