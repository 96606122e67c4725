"""The cost of NCCL's profiler plugin for a collective, by alternating windows of jobs that differ only in the plugin.

Several jobs with the plugin and as many without it are on the GPUs, and one of them runs at a time. Two jobs of the
same program differ by 0.02 %, for example in the addresses of their buffers. So a change between the two kinds of jobs
is compared with the differences of the jobs of a kind. A change between two modes of the plugin is measured within each
job. The order of the windows of a turn is random. A job that its GPUs limit shows the cost on the GPU. A job that its
hosts limit shows the cost for the host, with more noise.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from comparing import Interval, difference_of_groups, mean_of_group
from gpu_ranks import Ranks
from numpy.typing import NDArray

from stallscope.capture.gpu.nccl_ring import KERNELS, Event, NcclRing, ring_of

_WINDOW_S = 0.2
_PULSE_S = 0.1 * _WINDOW_S  # the largest share of the time that the agent's default windows take
_SWITCH_S = 0.05  # the plugin's thread follows at once
_MIN_TURNS = 4
_NARROW = 0.03  # points to which an interval is precise enough; then other sizes get the time


class Collective(NamedTuple):
    """A size of collectives, and the GPU's work between two of them: a kernel that spins, so that power does not limit
    the clock, and the host stays ahead.
    """

    bytes: int
    spin_us: int


SIZES = {
    "1 KB": Collective(1 << 10, 400),
    "4 MB": Collective(4 << 20, 400),
    "256 MB": Collective(256 << 20, 50),
    "1 KB, limited by hosts": Collective(1 << 10, 0),
}

NONE, OFF, SAMPLED, ON = "without the plugin", "loaded, off", "sampled", "on"
_COMPARED = ((NONE, OFF), (NONE, SAMPLED), (NONE, ON), (OFF, SAMPLED), (OFF, ON))

Windows = Mapping[str, Sequence[Sequence[float]]]
"""By mode: seconds of a round in each window, one list for each job."""


class _Measured(NamedTuple):
    """A job in one mode. rings: of the plugin, where it is loaded."""

    mode: str
    number: int
    ranks: Ranks
    rings: list[NcclRing]


def costs(
    with_plugin: Sequence[Ranks],
    without: Sequence[Ranks],
    seconds: float,
    keep: Callable[[dict[str, Any]], None],
    *,
    sizes: Sequence[str] = tuple(SIZES),
) -> None:
    """Measure for a time. keep: called with the results so far, after each turn.

    sampled: on for _PULSE_S of each window, the largest share of the time in which the agent records by default, at
    shorter intervals, so with more switches: the cost is an upper bound.
    """
    measured = [_Measured(NONE, number, ranks, []) for number, ranks in enumerate(without)]
    for number, ranks in enumerate(with_plugin):
        rings = [ring for pid in ranks.pids if (ring := ring_of(pid))]
        if len(rings) < len(ranks.pids):
            raise RuntimeError("a rank has not loaded the plugin")
        measured += [_Measured(mode, number, ranks, rings) for mode in (OFF, SAMPLED, ON)]
    times: dict[str, dict[str, list[list[float]]]] = {size: {} for size in sizes}
    for size in sizes:
        for own in measured:
            times[size].setdefault(own.mode, []).append([])
    end_s, order = time.monotonic() + seconds, random.Random(1)
    n_rounds = {}
    for size in sizes:
        first_s = [_window(size, own, 20) for own in measured]
        n_rounds[size] = max(int(_WINDOW_S / min(first_s)), 4)
    while time.monotonic() < end_s:
        for size in sizes:
            if not _is_narrow(times[size]):
                for own in order.sample(measured, len(measured)):
                    times[size][own.mode][own.number].append(_window(size, own, n_rounds[size]))
        keep({size: result(windows) for size, windows in times.items()})
        if all(_is_narrow(times[size]) for size in sizes):
            return


def _window(size: str, own: _Measured, rounds: int) -> float:
    """Seconds of a round."""
    _switch(own.rings, 30 if own.mode == ON else 0)
    time.sleep(_SWITCH_S)
    work = {"matmuls": 0, "spin_us": SIZES[size].spin_us}
    own.ranks.begin({"rounds": rounds, "bytes": SIZES[size].bytes} | work)
    if own.mode == SAMPLED:
        time.sleep(0.3 * _WINDOW_S)
        _switch(own.rings, _PULSE_S)
    taken_s = own.ranks.end()
    _switch(own.rings, 0)
    for ring in own.rings:
        ring.drain()
    return taken_s / rounds


def _switch(rings: Sequence[NcclRing], lease_s: float) -> None:
    for ring in rings:
        ring.switch(KERNELS if lease_s else Event(0), seconds=lease_s)


def result(windows: Windows) -> dict[str, Any]:
    """Each mode against its base, with the time of a round and the records of all windows in us."""
    windows_us = {
        mode: [[round(1e6 * t, 2) for t in times] for times in jobs] for mode, jobs in windows.items()
    }
    changes = {f"{mode}, against {base}": _described(windows, base, mode) for base, mode in _COMPARED}
    return {"changes": changes, "jobs_differ_percent": _differences(windows), "windows_us": windows_us}


def change(windows: Windows, base: str, mode: str) -> Interval:
    """The change from one mode to another in per cent, with its 95 % interval."""
    own, other = (_of_jobs(windows, name) for name in (mode, base))
    if base == NONE:
        return difference_of_groups(own, other)
    return mean_of_group(own - other)


def _of_jobs(windows: Windows, mode: str) -> NDArray[np.float64]:
    """The time of a round in each job: the median over turns, in per cent relative to all jobs in the same turn."""
    level = np.mean([np.log(windows[name]).mean(axis=0) for name in (NONE, OFF)], axis=0)
    return np.asarray(100 * np.median(np.log(windows[mode]) - level, axis=1))


def _described(windows: Windows, base: str, mode: str) -> dict[str, float]:
    mean, half = change(windows, base, mode)
    round_us = 1e6 * float(np.median(windows[base]))
    return {
        "round_us": round(round_us, 2),
        "percent": round(mean, 3),
        "half_95": round(half, 3),
        "us": round(mean / 100 * round_us, 3),
        "us_half_95": round(half / 100 * round_us, 3),
    }


def _differences(windows: Windows) -> dict[str, float]:
    """The standard deviation of the jobs of a kind."""
    return {mode: round(float(np.std(_of_jobs(windows, mode), ddof=1)), 4) for mode in (NONE, OFF)}


def _is_narrow(windows: Windows) -> bool:
    if min(len(times) for jobs in windows.values() for times in jobs) < _MIN_TURNS:
        return False
    return all(change(windows, base, mode).half < _NARROW for base, mode in _COMPARED)
