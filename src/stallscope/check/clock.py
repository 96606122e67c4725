"""Is the wall clock kept by NTP or PTP? Times of several machines can be compared only as well as that."""

from collections.abc import Callable, Iterator

from stallscope.capture.probes.clock import wall_clock
from stallscope.check.finding import Finding, passed, warned
from stallscope.events.trace import WallClock

_MOST_ERROR_US = 100_000


def findings(read: Callable[[], WallClock] = wall_clock) -> Iterator[Finding]:
    """One line. read: what the kernel says of its clock; raises OSError where it may not be asked."""
    try:
        clock = read()
    except OSError as error:
        yield warned(
            "clock", f"adjtimex: {error.strerror}", "run check outside the sandbox to see the clock's state"
        )
        return
    bounds = f"off by at most {clock.max_error_us / 1000:,.1f} ms by its own account"
    advice = "start chrony, systemd-timesyncd or PTP; on one machine it does not matter"
    if not clock.is_synchronised:
        yield warned("clock", "not synchronised", advice)
    elif clock.max_error_us > _MOST_ERROR_US:
        yield warned("clock", f"synchronised, {bounds}", "look at the time source: `chronyc tracking`")
    else:
        yield passed("clock", f"synchronised, {bounds}")
