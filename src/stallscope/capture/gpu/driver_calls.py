"""Calls into the GPU driver: registers the driver's devices with the kernel side and names processes outside the job.

    calls = DriverCalls(register=program.know_drivers, caller=program.caller)
    calls.refresh()                                  # once a second: UVM gets its number when it is first loaded
    labels = calls.new_labels(pids, traced, now_ns)       # names of untraced processes

Every process that calls into the driver is counted, including a monitor that queries the GPU once a second. Such a
monitor may be a new process each time and may have ended before its call is reported; so the kernel side keeps the
names.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from stallscope.capture.gpu.drivers import Driver, majors
from stallscope.capture.process.annotation_socket import Label

_NO_DRIVER = "no NVIDIA driver in /proc/devices: calls into it are counted once it is loaded"


@dataclass
class DriverCalls:
    """register: registers drivers by the major number of their devices. caller: name of a process that has called
    into the driver; empty if not known. majors: finds drivers. drivers: the drivers registered last.
    """

    register: Callable[[Mapping[int, int]], None]
    caller: Callable[[int], str]
    majors: Callable[[], Mapping[int, Driver]] = majors
    drivers: Mapping[int, Driver] = field(default_factory=dict)
    _labelled_pids: set[int] = field(default_factory=set)

    def refresh(self) -> str:
        """Register changes of the driver list. Returns a note for the user; empty where a driver is loaded."""
        drivers = self.majors()
        if drivers != self.drivers:
            self.register(dict.fromkeys(self.drivers, Driver.NONE) | dict(drivers))
            self.drivers = drivers
        return "" if drivers else _NO_DRIVER

    def new_labels(self, pids: Iterable[int], traced: Collection[int], now_ns: int) -> list[Label]:
        """Labels with the program names of the processes that are not traced, each process once."""
        new_pids = [
            pid for pid in dict.fromkeys(pids) if pid not in self._labelled_pids and pid not in traced
        ]
        self._labelled_pids.update(new_pids)
        self._labelled_pids.difference_update(traced)
        return [Label(now_ns, pid, "program", name) for pid in new_pids if (name := self.caller(pid))]

    def forget(self, pids: Iterable[int]) -> None:
        """These processes have ended; their numbers may be reused."""
        self._labelled_pids.difference_update(pids)
