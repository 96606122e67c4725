"""Processes of streams that several diagnoses share: each sees its own clusters only, and each learns of their end."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from stallscope.continuous.stream_pool import StreamPool
from stallscope.continuous.stream_process import ProcessEnded
from stallscope.diagnose import Stream

from .test_continuous_diagnosis import TENANT, as_arrow, slow_job

TABLES = as_arrow(slow_job(), "b1").tables
C1, C2 = (TENANT, "c1"), (TENANT, "c2")


@pytest.fixture(scope="module")
def pool() -> Iterator[StreamPool]:
    with closing(StreamPool(Stream, 1)) as made:
        yield made


def test_a_diagnosis_sees_and_ends_only_its_own_clusters(pool: StreamPool):
    one, two = pool.streams(), pool.streams()
    assert one.tick() == {}
    assert [change.kind for change in one.feed(C1, TABLES) or ()] == ["opened"]
    assert [change.kind for change in two.feed(C2, TABLES) or ()] == ["opened"]
    assert (set(one.tick()), set(two.tick())) == ({C1}, {C2})
    one.forget([C2])
    assert set(two.tick()) == {C2}
    one.close()
    assert set(two.tick()) == {C2}
    with closing(
        pool.streams()
    ) as again:  # the same cluster with a new diagnosis: nothing of the old one is left
        assert [change.kind for change in again.feed(C1, TABLES) or ()] == ["opened"]
    two.close()


def test_each_diagnosis_learns_once_that_the_process_ended(pool: StreamPool):
    with closing(pool.streams()) as one, closing(pool.streams()) as two, closing(pool.streams()) as idle:
        one.feed(C1, TABLES)
        two.feed(C2, TABLES)
        (shared,) = pool._processes
        os.kill(shared.process.pid or 0, signal.SIGKILL)
        with pytest.raises(ProcessEnded, match="SIGKILL"):
            one.feed(C1, TABLES)
        with pytest.raises(ProcessEnded, match="another cluster"):
            two.tick()
        for streams, key in ((one, C1), (two, C2)):
            assert streams.tick() == {}
            assert [change.kind for change in streams.feed(key, TABLES) or ()] == ["opened"]
            assert set(streams.tick()) == {key}
        assert idle.tick() == {}


def test_new_diagnoses_get_the_process_with_the_fewest():
    with closing(StreamPool(Stream, 2)) as pool:  # no process starts without rows
        first, second, third = (pool.streams() for _ in range(3))
        assert first._shared is third._shared is not second._shared
        first.close()
        first.close()
        third.close()
        assert pool.streams()._shared is first._shared
