"""The last minutes of a job in memory: cells, late arrivals, incomplete rounds, and jobs that are one job."""

import numpy as np
import pytest

from stallscope.page.cell_ring import PATIENCE_S, Arrivals, Ring
from stallscope.page.cells import NO_DATA, codes

from .jobs import code_ms

S, MS = 10**9, 10**6
BEGIN_S = 1_800_000_000


def rows(seq: int, late_ms: dict[int, float], *, at_s: float = BEGIN_S, wait_ms: float = 0.0) -> Arrivals:
    """One round: lateness by rank."""
    ranks = np.array(sorted(late_ms))
    late_ns = np.array([int(late_ms[rank] * MS) for rank in sorted(late_ms)])
    return Arrivals(
        ranks,
        np.full(len(ranks), seq),
        int(at_s * S) + late_ns,
        np.full(len(ranks), wait_ms * MS),
    )


def on_time(n: int, **late: float) -> dict[int, float]:
    return dict.fromkeys(range(n), 0.0) | {int(name[1:]): value for name, value in late.items()}


def late_ms(ring: Ring, rank: int, at_s: int = BEGIN_S) -> float | None:
    code = int(ring.window(at_s, 1).late[rank, 0])
    return None if code == NO_DATA else code_ms(code)


def test_codes_keep_durations_within_half_a_step():
    ns = np.array([50_000.0, 100_000.0, 3.3e6, 60e6, 4e9, np.nan, 1e12])
    got = codes(ns)
    assert got[0] == got[1] == 0 and got[5] == NO_DATA and got[6] == NO_DATA - 1
    for value, code in zip(ns[1:5], got[1:5], strict=True):
        assert code_ms(int(code)) == pytest.approx(value / 1e6, rel=2 ** (1 / 32) - 1 + 1e-9)


def test_a_late_rank_is_in_the_second_of_its_round_with_its_lateness():
    ring = Ring()
    ring.add("a", rows(7, on_time(8, r3=60)), n_ranks=8, now_s=0.0)
    ring.settle(0.0)
    assert late_ms(ring, 3) == pytest.approx(60, rel=0.03)
    assert late_ms(ring, 0) == pytest.approx(0.1) and late_ms(ring, 3, BEGIN_S + 1) is None
    window = ring.window(BEGIN_S, 1)
    assert window.seq.tolist() == [7] and ring.comms[window.comm[0]] == "a"


def test_a_second_shows_its_worst_round():
    ring = Ring()
    for seq, late in enumerate((5, 80, 20)):
        ring.add("a", rows(seq, on_time(4, r1=late), at_s=BEGIN_S + seq / 4), n_ranks=4, now_s=0.0)
    ring.settle(0.0)
    assert late_ms(ring, 1) == pytest.approx(80, rel=0.03) and ring.window(BEGIN_S, 1).seq[0] == 1


def test_a_round_waits_for_all_ranks_and_then_for_its_patience():
    ring = Ring()
    ring.add("a", rows(1, {0: 0.0, 1: 0.0}), n_ranks=3, now_s=0.0)
    ring.settle(1.0)
    assert ring.head < 0
    ring.settle(PATIENCE_S + 0.1)
    assert late_ms(ring, 0) is not None and ring.n_ranks == 2


def test_a_rank_that_arrives_after_its_round_was_entered_is_late_against_it():
    ring = Ring()
    ring.add("a", rows(1, {0: 0.0, 1: 0.0}), n_ranks=3, now_s=0.0)
    ring.settle(PATIENCE_S + 0.1)
    ring.add("a", rows(1, {2: 3000.0}), n_ranks=3, now_s=9.0)
    ring.settle(9.0)
    assert late_ms(ring, 2) == pytest.approx(3000, rel=0.03)


def test_an_incomplete_round_does_not_wait_while_other_rounds_complete():
    ring = Ring()
    ring.add("a", rows(0, {0: 0.0, 1: 0.0}), n_ranks=3, now_s=0.0)
    for second in range(1, 9):
        ring.add("a", rows(second, on_time(3), at_s=BEGIN_S + second), n_ranks=3, now_s=float(second))
        ring.settle(float(second))
    assert late_ms(ring, 0) is not None


def test_old_seconds_leave_and_a_clock_that_was_set_forward_begins_again():
    ring = Ring(n_seconds=10)
    ring.add("a", rows(0, on_time(2)), n_ranks=2, now_s=0.0)
    ring.add("a", rows(1, on_time(2), at_s=BEGIN_S + 10), n_ranks=2, now_s=0.0)
    ring.settle(0.0)
    assert late_ms(ring, 0) is None and late_ms(ring, 0, BEGIN_S + 10) is not None
    ring.add("a", rows(2, on_time(2), at_s=BEGIN_S + 10**6), n_ranks=2, now_s=0.0)
    ring.settle(0.0)
    assert late_ms(ring, 0, BEGIN_S + 10) is None and late_ms(ring, 0, BEGIN_S + 10**6) is not None


def test_absorbing_a_ring_keeps_the_later_cell_and_its_communicator():
    ring, two = Ring(), Ring()
    ring.add("a", rows(4, on_time(2, r1=10)), n_ranks=2, now_s=0.0)
    two.add("b", rows(9, on_time(4, r1=40)), n_ranks=4, now_s=0.0)
    ring.settle(0.0)
    two.settle(0.0)
    ring.absorb(two)
    window = ring.window(BEGIN_S, 1)
    assert late_ms(ring, 1) == pytest.approx(40, rel=0.03) and ring.n_ranks == 4
    assert (ring.comms[window.comm[0]], window.seq[0]) == ("b", 9)
