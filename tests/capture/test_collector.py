"""A source that gives numbered records: nothing may be lost, doubled or out of order."""

import threading
import time

import numpy as np
import pytest

from stallscope.capture.collector import Collector


class Source:
    """Gives `per_drain` records, numbered on, each time it is asked."""

    def __init__(self, per_drain: int = 10):
        self.n = 0
        self.per_drain = per_drain
        self.n_drains = 0

    def __call__(self) -> np.ndarray:
        first, self.n = self.n, self.n + self.per_drain
        self.n_drains += 1
        return np.arange(first, self.n)


def test_all_records_come_in_order_also_those_of_the_last_moment():
    one, other = Source(), Source(per_drain=3)
    collector = Collector(one, other)
    collector.start()
    taken = []
    while one.n_drains < 6:
        taken.append(collector.taken())
        time.sleep(0.005)
    collector.stop()
    taken.append(collector.taken())
    assert np.concatenate([records for records, _ in taken]).tolist() == list(range(one.n))
    assert np.concatenate([records for _, records in taken]).tolist() == list(range(other.n))
    assert collector.n_dropped == 0
    assert [len(records) for records in collector.taken()] == [0, 0]


def test_what_nobody_takes_is_dropped_and_counted():
    source = Source()
    collector = Collector(source, max_waiting_bytes=10 * 8 * 2)
    collector.start()
    while source.n_drains < 5:
        time.sleep(0.005)
    collector.stop()
    (kept,) = collector.taken()
    assert kept.tolist() == list(range(20))
    assert collector.n_dropped == source.n - 20


def test_a_failure_of_the_thread_is_told():
    source = Source()

    def drain() -> np.ndarray:
        if source.n_drains == 2:
            raise OSError("the ring is gone")
        return source()

    collector = Collector(drain)
    collector.start()
    collector._thread.join()
    with pytest.raises(OSError, match="the ring is gone"):
        collector.taken()
    collector.stop()


def test_a_collector_that_never_started_stops():
    source = Source()
    collector = Collector(source)
    collector.stop()
    assert collector.taken()[0].tolist() == list(range(10))
    assert "drain" not in {thread.name for thread in threading.enumerate()}
