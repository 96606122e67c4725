"""A diagnosis that begins: it reads the stored rows again, each once, and ends soon if it is not needed any more."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from stallscope.continuous import shard
from stallscope.continuous.backlog import Key
from stallscope.continuous.shard import Shard, stored_tail
from stallscope.continuous.streams import AdvancedStream
from stallscope.store.hub.limits import Limits
from stallscope.store.hub.store import HubStore

from ..patience import until
from .test_continuous_diagnosis import TENANT, as_arrow, slow_job


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HubStore]:
    with closing(HubStore.open(tmp_path, Limits(maintenance_s=3600))) as made:
        yield made


class Recorded:
    """Streams that count the rows that they get, and wait until they may continue."""

    def __init__(self) -> None:
        self.fed: list[int] = []
        self.may_continue = threading.Event()

    def feed(self, key: Key, tables: Mapping[str, pa.Table], **_: object) -> list:
        self.fed.append(len(tables.get("collectives", ())))
        assert self.may_continue.wait(90)
        return []

    def tick(self, keys: object = None) -> dict[Key, AdvancedStream]:
        return {}

    def forget(self, keys: object) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


def test_rows_that_are_committed_while_stored_rows_are_read_are_examined_once(store: HubStore):
    batch = as_arrow(slow_job(), "b1")
    n_rows = len(batch.tables["collectives"])
    store.append(batch).result(30)
    tail = stored_tail(store, until_us=store.latest_us)
    store.append(as_arrow(slow_job(), "b2")).result(30)
    assert [len(each.tables["collectives"]) for each in tail] == [n_rows]
    streams = Recorded()
    tail = stored_tail(store, until_us=store.latest_us)
    with closing(Shard(store, streams, tail, owns=lambda key: True)) as made:
        store.subscribe(made.add)
        store.append(as_arrow(slow_job(), "b3")).result(30)  # accepted, while the stored rows wait
        streams.may_continue.set()
        until(made.is_idle)
        until(lambda: sum(streams.fed) >= 3 * n_rows)
        assert sum(streams.fed) == 3 * n_rows


def test_a_diagnosis_that_ends_does_not_read_the_rest_of_the_stored_rows(
    store: HubStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shard, "_RESUMED_ROWS", 100)
    store.append(as_arrow(slow_job(), "b1")).result(30)
    streams = Recorded()
    made = Shard(store, streams, stored_tail(store), owns=lambda key: key[0] == TENANT)
    until(lambda: streams.fed)
    made._backlog.end()
    streams.may_continue.set()
    made.close()
    assert len(streams.fed) == 1


def test_rows_that_a_stream_drops_are_counted_and_reported(store: HubStore):
    key, streams = (TENANT, "c1"), Recorded()
    dropped = [AdvancedStream(n_jobs=1, n_left_out=600, every=4)]
    streams.tick = lambda keys=None: {key: dropped.pop()} if dropped else {}  # type: ignore[method-assign]
    with closing(Shard(store, streams, iter(()), owns=lambda _: True)) as made:
        until(lambda: made.numbers.diagnosis_rows_left_out == 600)
        assert "every 4th round" in store.unexamined.reason(*key)
