"""Counters grow; each loss is reported once."""

import numpy as np

from stallscope.capture.rows.lost_records import Losses
from stallscope.events.kernel import Counter


def counters(**by_name: list[int]) -> np.ndarray:
    values = np.zeros((len(Counter), 2), np.int64)
    for name, per_cpu in by_name.items():
        values[Counter[name]] = per_cpu
    return values


def test_new_losses_are_reported_by_kind_and_cpu():
    losses = Losses()
    assert losses.new_losses(counters(LOST_ARRIVAL=[5, 0])) == [("arrival", 0, 5)]
    assert losses.new_losses(counters(LOST_ARRIVAL=[5, 2], LOST_CALL=[1, 0])) == [
        ("arrival", 1, 2),
        ("call", 0, 1),
    ]
    assert losses.new_losses(counters(LOST_ARRIVAL=[5, 2], LOST_CALL=[1, 0])) == []
    assert losses.n_lost == 8


def test_corrected_records_are_not_losses():
    losses = Losses()
    assert losses.new_losses(counters(MISSED_ON=[3, 3], TORN_SNAPSHOT=[1, 0], MISSED_WAKEUP=[1, 1])) == []
    assert losses.n_lost == 0


def test_records_dropped_by_the_agent_are_losses():
    losses = Losses()
    assert losses.new_losses(counters(), n_dropped=10) == [("dropped", None, 10)]
    assert losses.new_losses(counters(), n_dropped=10) == []
    assert losses.n_lost == 10
