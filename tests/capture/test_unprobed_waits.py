"""Waits for the GPU while the probes on synchronise calls are off are estimated from the time with probes."""

from collections.abc import Mapping

import numpy as np
import pytest

from stallscope.capture.probes.program import State
from stallscope.capture.rows.snapshots import snapshots
from stallscope.capture.rows.unprobed_waits import UnprobedWaits
from stallscope.events import kernel
from stallscope.events.names import N_CATEGORIES, Category

MS = 1_000_000
PROBED = {Category.DEVICE: 0.6, Category.ON_CPU: 0.3, Category.IO: 0.1}


class Ledger:
    """A process whose ledger grows by shares of the time."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.sums = np.zeros(N_CATEGORIES)

    def goes_on(self, shares: Mapping[Category, float], ms: int) -> None:
        self.now_ns += ms * MS
        for category, share in shares.items():
            self.sums[category - 1] += share * ms * MS

    def state(self, *, born_ns: int = 1) -> State:
        row = np.zeros(1, kernel.PROCESS)
        row["born_ns"] = born_ns
        row["ns"][0, 1:] = self.sums
        return State(np.array([7]), row, np.array([self.now_ns]))


def unprobed() -> tuple[Ledger, UnprobedWaits]:
    """A process whose probes are off after 0.4 s with them."""
    ledger = Ledger()
    waits = UnprobedWaits(ledger.state)
    waits.switch(are_probed=True)
    ledger.goes_on(PROBED, 400)
    waits.switch(are_probed=False)
    return ledger, waits


@pytest.mark.parametrize(
    "disguise",
    [
        {Category.ON_CPU: 0.9},
        {Category.ON_CPU: 0.3, Category.NET: 0.6},
        {Category.ON_CPU: 0.3, Category.DRIVER: 0.6},
    ],
)
def test_time_that_grows_without_probes_is_moved_to_the_waits(disguise: dict[Category, float]):
    ledger, waits = unprobed()
    for _ in range(3):
        ledger.goes_on(disguise | {Category.IO: 0.1}, 200)
        waits.moved_ns(ledger.state())
    waits.switch(are_probed=True)
    (row,) = snapshots(ledger.state(), node=0, moved_ns=waits.moved_ns(ledger.state()))
    assert row["estimated_ns"] == pytest.approx(360 * MS, abs=10)
    for category, share in PROBED.items():
        assert row["ledger_ns"][category - 1] == pytest.approx(share * 1000 * MS, abs=10)
    assert row["ledger_ns"].sum() == pytest.approx(1000 * MS, abs=10)


def test_a_process_that_does_something_else_without_probes_does_not_wait_for_its_gpu():
    ledger, waits = unprobed()
    ledger.goes_on({Category.IO: 0.7, Category.ON_CPU: 0.3}, 600)
    assert not waits.moved_ns(ledger.state()).any()


def test_nothing_is_moved_while_the_probes_are_on_or_before_a_process_is_known():
    ledger = Ledger()
    waits = UnprobedWaits(ledger.state)
    ledger.goes_on(PROBED, 400)
    assert not waits.moved_ns(ledger.state()).any()
    waits.switch(are_probed=False)
    ledger.goes_on({Category.ON_CPU: 1.0}, 600)
    assert not waits.moved_ns(ledger.state()).any()


def test_another_process_with_the_same_number_begins_anew():
    ledger, waits = unprobed()
    ledger.goes_on({Category.ON_CPU: 0.9, Category.IO: 0.1}, 400)
    assert waits.moved_ns(ledger.state()).any()
    assert not waits.moved_ns(ledger.state(born_ns=2)).any()


def test_a_process_that_one_reading_lacks_keeps_its_estimate():
    ledger, waits = unprobed()
    ledger.goes_on({Category.ON_CPU: 0.9, Category.IO: 0.1}, 400)
    moved_ns = waits.moved_ns(ledger.state())
    empty = State(np.zeros(0, np.int64), np.zeros(0, kernel.PROCESS), np.zeros(0, np.int64))
    assert waits.moved_ns(empty).shape == (0, N_CATEGORIES)
    assert (waits.moved_ns(ledger.state()) == moved_ns).all() and moved_ns.any()
