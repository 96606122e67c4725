"""Calls into the GPU driver, where they are counted: which devices are its own now, and who calls beside the job.

    calls = DriverCalls(tell=program.know_drivers, caller=program.caller)
    calls.look()                                     # once a second: UVM gets its number when it is first loaded
    labels = calls.named(pids, traced, now_ns)       # what processes are called that are no traced ones

Whoever calls into the driver is counted: a monitor that asks it every second is worth to be seen. It may be a new
process each time, that has gone before its call is told; so the kernel side keeps the names.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from stallscope.capture.gpu.drivers import Driver, majors
from stallscope.capture.process.annotation_socket import Label

_NONE_YET = "no NVIDIA driver in /proc/devices: calls into it are counted once it is loaded"


@dataclass
class DriverCalls:
    """tell: takes drivers by the major number of their devices. caller: what a process is called that has called; empty
    if not known. majors: finds drivers. known: those told last.
    """

    tell: Callable[[Mapping[int, int]], None]
    caller: Callable[[int], str]
    majors: Callable[[], Mapping[int, Driver]] = majors
    known: Mapping[int, Driver] = field(default_factory=dict)
    _named: set[int] = field(default_factory=set)

    def look(self) -> str:
        """Tell what has changed. Returns a remark for the user; empty where there is a driver."""
        now = self.majors()
        if now != self.known:
            self.tell(dict.fromkeys(self.known, Driver.NONE) | dict(now))
            self.known = now
        return "" if now else _NONE_YET

    def named(self, pids: Iterable[int], traced: Collection[int], now_ns: int) -> list[Label]:
        """The programs of those processes that are not traced, each told once, as labels."""
        new = [pid for pid in dict.fromkeys(pids) if pid not in self._named and pid not in traced]
        self._named.update(new)
        self._named.difference_update(traced)
        return [Label(now_ns, pid, "program", name) for pid in new if (name := self.caller(pid))]

    def forget(self, pids: Iterable[int]) -> None:
        """These have ended; their numbers may be given again."""
        self._named.difference_update(pids)
