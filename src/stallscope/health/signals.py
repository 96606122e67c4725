"""The signals of a machine's health: each is larger when the machine is faster."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Signal:
    """floor: a signal below its cohort's median by a smaller share is never below the threshold."""

    name: str
    unit: str
    floor: float
    meaning: str


SIGNALS: Mapping[str, Signal] = {
    signal.name: signal
    for signal in (
        Signal(
            "throughput",
            "1/s",
            0.10,
            "collectives per second of the processes' own time, which excludes their waits for the GPU and for peers",
        ),
        Signal(
            "compute",
            "1",
            0.07,
            "clock of the multiprocessors as a share of their maximum, over GPUs that are busy for half of the time",
        ),
        Signal(
            "memory",
            "1",
            0.30,
            "available memory of the machine as a share of all memory, times 10; at most 1: more than 10 % is enough",
        ),
        Signal("cpu", "1", 0.05, "share of the processes' own time in which they did not wait for a CPU"),
    )
}
"""In the order in which equal deviations are named. The floors are above the spread of healthy machines of one kind:
steps repeat within a few percent, and boost clocks differ by up to 5 % between chips."""
