"""Whether NTP or PTP keeps the wall clock. Times of several machines are comparable only to its accuracy."""

from collections.abc import Callable, Iterator

from stallscope.capture.probes import wall_clock
from stallscope.check.distribution import commands
from stallscope.check.finding import Finding, passed, warned
from stallscope.events.trace import WallClock

_MAX_ERROR_US = 100_000


def findings(read: Callable[[], WallClock] = wall_clock) -> Iterator[Finding]:
    """One line. read: returns the kernel's clock state; raises OSError if the call is forbidden."""
    try:
        clock = read()
    except OSError as error:
        yield warned(
            "clock", f"adjtimex: {error.strerror}", "run check outside the sandbox to see the clock's state"
        )
        return
    bounds = f"off by at most {clock.max_error_us / 1000:,.1f} ms by the kernel's estimate"
    advice = (
        f"not needed on one machine; to compare machines, start a time service: {commands().install} chrony"
    )
    if not clock.is_synchronised:
        yield warned("clock", "not synchronised", advice)
    elif clock.max_error_us > _MAX_ERROR_US:
        yield warned("clock", f"synchronised, {bounds}", "check the time source: `chronyc tracking`")
    else:
        yield passed("clock", f"synchronised, {bounds}")
