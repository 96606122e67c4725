"""Readings of simulated clocks, whose true offset is known, and of the machine's own clock."""

import time

import pytest

from stallscope.capture.probes import clock


def test_the_narrowest_bracket_is_kept():
    """Three tries: interrupted for 900 ns before, after, and for 10 ns; wall time is monotonic + 5 s."""
    monotonic = iter([1000, 1910, 3000, 3910, 5000, 5020] + [9000, 9900] * 17)
    wall = iter([1905, 3005, 5010] + [9100] * 17)
    reading = clock.reading(3, lambda: next(monotonic), lambda: next(wall) + 5 * 10**9)
    assert reading.node == 3
    assert reading.wall_ns - reading.monotonic_ns == 5 * 10**9
    assert reading.error_ns == 10


def test_the_true_offset_lies_within_the_error():
    """A wall clock 700 ns ahead, read anywhere within the bracket."""
    for delay_ns in (0, 13, 40):
        times = iter(range(0, 10**6, 40))
        moment = [0]

        def monotonic(times=times, moment=moment):
            moment[0] = next(times)
            return moment[0]

        reading = clock.reading(
            0, monotonic, lambda delay_ns=delay_ns, moment=moment: moment[0] + delay_ns + 700
        )
        assert abs((reading.wall_ns - reading.monotonic_ns) - 700) <= reading.error_ns == 20


def test_the_machines_own_clocks_are_bracketed_closely():
    before = time.monotonic_ns()
    reading = clock.reading(0)
    assert before <= reading.monotonic_ns <= time.monotonic_ns()
    assert 0 <= reading.error_ns < 100_000


def test_the_kernel_reports_the_wall_clock_error_and_frequency():
    wall_clock = clock.wall_clock()
    assert wall_clock.max_error_us >= 0
    assert abs(wall_clock.frequency_ppm) <= 500


@pytest.mark.parametrize(("field", "offset"), [("maxerror", 24), ("esterror", 32), ("status", 40)])
def test_the_kernel_structure_has_the_kernels_layout(field, offset):
    """Offsets of struct timex in <linux/timex.h> on 64-bit machines."""
    assert getattr(clock._Timex, field).offset == offset
    assert clock.ctypes.sizeof(clock._Timex) == 208
