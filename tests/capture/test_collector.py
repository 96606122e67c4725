"""A source of numbered records: no record may be lost, duplicated or out of order."""

import os
import threading
import time

import numpy as np
import pytest

from stallscope.capture.probes.collector import Collector


class Source:
    """Returns `per_drain` records with consecutive numbers at each call."""

    def __init__(self, per_drain: int = 10, *, is_full: bool = True):
        self.n = 0
        self.per_drain = per_drain
        self.is_full = is_full
        self.n_drains = 0
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)

    def __del__(self) -> None:
        os.close(self.fd)

    def tells(self) -> None:
        """As the kernel side does when a quarter of the ring is in use."""
        self.is_full = True
        os.eventfd_write(self.fd, 1)

    def fill(self) -> float:
        return float(self.is_full)

    def drain(self) -> np.ndarray:
        first, self.n = self.n, self.n + self.per_drain
        self.n_drains += 1
        return np.arange(first, self.n)


def test_all_records_come_in_order_also_those_of_the_last_moment():
    source, other = Source(), Source(per_drain=3)
    collector = Collector(source, other)
    collector.start()
    taken = []
    while source.n_drains < 6:
        taken.append(collector.take())
        time.sleep(0.005)
    collector.stop()
    taken.append(collector.take())
    assert np.concatenate([records for records, _ in taken]).tolist() == list(range(source.n))
    assert np.concatenate([records for _, records in taken]).tolist() == list(range(other.n))
    assert collector.n_dropped == 0
    assert [len(records) for records in collector.take()] == [0, 0]


def test_a_ring_that_has_room_is_emptied_when_its_records_are_asked_for():
    source = Source(is_full=False)
    collector = Collector(source)
    collector.start()
    assert collector.take()[0].tolist() == list(range(20))
    collector.stop()
    assert source.n_drains == 3


def test_a_ring_that_signals_is_drained():
    source = Source(is_full=False)
    collector = Collector(source)
    collector.start()
    source.tells()
    while source.n_drains < 3:
        time.sleep(0.005)
    collector.stop()


def test_one_ring_that_fills_has_all_of_them_emptied():
    full, other = Source(), Source(is_full=False)
    collector = Collector(other, full)
    collector.start()
    while other.n_drains < 3:
        time.sleep(0.005)
    collector.stop()
    assert other.n_drains == full.n_drains


def test_records_that_are_not_consumed_are_dropped_and_counted():
    source = Source()
    collector = Collector(source, max_waiting_bytes=10 * 8 * 2)
    collector.start()
    while source.n_drains < 5:
        time.sleep(0.005)
    collector.stop()
    (kept,) = collector.take()
    assert kept.tolist() == list(range(20))
    assert collector.n_dropped == source.n - 20


def test_a_failure_of_the_collector_thread_is_raised():
    class Failing(Source):
        def drain(self) -> np.ndarray:
            if self.n_drains == 2:
                raise OSError("the ring is gone")
            return super().drain()

    collector = Collector(Failing())
    collector.start()
    collector._thread.join()
    with pytest.raises(OSError, match="the ring is gone"):
        collector.take()
    collector.stop()


def test_a_collector_that_never_started_stops():
    source = Source()
    collector = Collector(source)
    collector.stop()
    assert collector.take()[0].tolist() == list(range(10))
    assert "drain" not in {thread.name for thread in threading.enumerate()}
