"""Requests stored as one batch are acknowledged, recognised and refused one by one."""

import pyarrow as pa
import pytest

from stallscope.errors import StorageFailed
from stallscope.store.hub.batches import Batch, BatchMember, separated
from stallscope.store.hub.store import HubStore


@pytest.fixture
def store(tmp_path):
    opened = HubStore.open(tmp_path)
    yield opened
    opened.close()


def batch_of(*n_rows: int, ids: list[str] | None = None) -> tuple[Batch, list[BatchMember]]:
    """Members with these numbers of events; the rows state their member."""
    texts = [str(number) for number, n in enumerate(n_rows) for _ in range(n)]
    rows = pa.table({"ts_ns": range(len(texts)), "value_text": texts})
    names = ids or [f"id-{number}" for number in range(len(n_rows))]
    members = [BatchMember(name, {"events": n}) for name, n in zip(names, n_rows, strict=True)]
    return Batch("", "t", {"events": rows}), members


def texts_of(store: HubStore) -> list[str]:
    return sorted(store.snapshot("t").hot["events"]["value_text"].to_pylist())


def test_each_member_gets_a_receipt_for_its_own_rows(store):
    batch, members = batch_of(2, 1, 3)
    store.append_together(batch, members)
    receipts = [member.stored.result(20) for member in members]
    assert [(each.n_rows, each.is_duplicate) for each in receipts] == [(2, False), (1, False), (3, False)]
    assert texts_of(store) == ["0", "0", "1", "2", "2", "2"]
    assert store.counters.batches == 3


def test_a_repeated_member_is_not_stored_again(store):
    batch, members = batch_of(1, 2)
    store.append_together(batch, members)
    [member.stored.result(20) for member in members]
    batch, members = batch_of(1, 2, 1, ids=["new", "id-1", "newer"])
    store.append_together(batch, members)
    assert [member.stored.result(20).is_duplicate for member in members] == [False, True, False]
    assert texts_of(store) == ["0", "0", "1", "1", "2"]


def test_a_member_that_is_there_twice_is_stored_once(store):
    batch, members = batch_of(1, 1, ids=["same", "same"])
    store.append_together(batch, members)
    assert [member.stored.result(20).is_duplicate for member in members] == [False, True]
    assert texts_of(store) == ["0"]


def test_members_without_an_id_are_all_stored(store):
    for _ in range(2):
        batch, members = batch_of(1, 1, ids=["", ""])
        store.append_together(batch, members)
        assert not any(member.stored.result(20).is_duplicate for member in members)
    assert texts_of(store) == ["0", "0", "1", "1"]


def test_a_failed_commit_is_repeated_for_each_member(store, monkeypatch):
    journal = store._journal
    whole = journal.commit

    def commit(received_us, entries, *, batch_ids, kept=None):
        if "id-1" in [batch_id for _, batch_id in batch_ids]:
            raise StorageFailed("no")
        whole(received_us, entries, batch_ids=batch_ids, kept=kept)

    monkeypatch.setattr(journal, "commit", commit)
    batch, members = batch_of(1, 2, 1)
    store.append_together(batch, members)
    assert members[0].stored.result(20).n_rows == 1 and members[2].stored.result(20).n_rows == 1
    assert isinstance(members[1].stored.exception(20), StorageFailed)
    assert texts_of(store) == ["0", "2"]


def test_separated_members_share_the_size():
    batch, members = batch_of(3, 1)
    parts = separated(Batch("", "t", batch.tables, 400), members)
    assert [(part.batch_id, part.n_rows, part.n_bytes) for part, _ in parts] == [
        ("id-0", 3, 300),
        ("id-1", 1, 100),
    ]
