"""The cost of NCCL's profiler plugin for a collective, by alternating windows of jobs that differ only in the plugin.

Three jobs are on the GPUs, and one of them runs at a time: with the plugin, without it, and again without it. The two
jobs without the plugin differ by the error of a comparison of jobs (A/A), and two windows with the plugin off by the
error of a comparison within a job. The order of the windows of a turn is random. A job that its GPUs limit shows the
cost on the GPU. A job that its hosts limit shows the cost for the host, with more noise.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from comparing import Found, interval
from gpu_ranks import Ranks

from stallscope.capture.gpu.nccl_ring import KERNELS, Event, ring_of

_WINDOW_S = 0.2
_PULSE_S = 0.1 * _WINDOW_S  # the largest share of the time that the agent's default windows take
_SWITCH_S = 0.05  # the plugin follows within 20 ms
_FEWEST_TURNS = 10
_NARROW = 0.1  # points to which an interval is precise enough; then other sizes get the time


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

_NONE, _AGAIN, _OFF, _OFF_AGAIN, _SAMPLED, _ON = (
    "without the plugin",
    "without the plugin, again",
    "loaded, off",
    "loaded, off, again",
    "sampled",
    "on",
)
_COMPARED = ((_NONE, _AGAIN), (_OFF, _OFF_AGAIN), (_NONE, _OFF), (_NONE, _SAMPLED), (_NONE, _ON))
_COMPARED += ((_OFF, _SAMPLED), (_OFF, _ON))
_JOB_OF = {_NONE: "without", _AGAIN: "again"}

Windows = Mapping[tuple[str, str], Sequence[float]]
"""By size and mode: seconds of a round in each window."""


def costs(
    jobs: Mapping[str, Ranks],
    seconds: float,
    keep: Callable[[dict[str, Any]], None],
    *,
    sizes: Sequence[str] = tuple(SIZES),
) -> None:
    """Measure for a time. jobs: "plugin", "without", "again". keep: called with the results so far, after each turn.

    sampled: on for _PULSE_S of each window, the largest share of the time in which the agent records by default, at
    shorter intervals, so with more switches: the cost is an upper bound.
    """
    rings = [ring for pid in jobs["plugin"].pids if (ring := ring_of(pid))]
    if len(rings) < len(jobs["plugin"].pids):
        raise RuntimeError("a rank has not loaded the plugin")
    modes = (_NONE, _AGAIN, _OFF, _OFF_AGAIN, _SAMPLED, _ON)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    end_s, order = time.monotonic() + seconds, random.Random(1)

    def switch(lease_s: float) -> None:
        for ring in rings:
            ring.switch(KERNELS if lease_s else Event(0), seconds=lease_s)

    def window(size: str, mode: str, rounds: int) -> float:
        switch(30 if mode == _ON else 0)
        time.sleep(_SWITCH_S)
        ranks = jobs[_JOB_OF.get(mode, "plugin")]
        work = {"matmuls": 0, "spin_us": SIZES[size].spin_us}
        ranks.begin({"rounds": rounds, "bytes": SIZES[size].bytes} | work)
        if mode == _SAMPLED:
            time.sleep(0.3 * _WINDOW_S)
            switch(_PULSE_S)
        taken_s = ranks.end()
        for ring in rings:
            ring.drain()
        return taken_s / rounds

    n_rounds = {}
    for size in sizes:
        first_s = [window(size, mode, 20) for mode in modes]
        n_rounds[size] = max(int(_WINDOW_S / min(first_s)), 4)
    while time.monotonic() < end_s:
        for size in sizes:
            if not _is_narrow(times, size):
                for mode in order.sample(modes, len(modes)):
                    times[size, mode].append(window(size, mode, n_rounds[size]))
        keep(compared(times))


def compared(times: Windows) -> dict[str, Any]:
    """By size: each mode against its base, with the time of a round and the records of all windows in us."""
    out: dict[str, Any] = {}
    for size in SIZES:
        if (size, _ON) not in times:
            continue
        changes = {f"{mode}, against {base}": _change(times, size, base, mode) for base, mode in _COMPARED}
        windows_us = {
            mode: [round(1e6 * t, 2) for t in seconds]
            for (own, mode), seconds in times.items()
            if own == size
        }
        out[size] = {"changes": changes, "windows_us": windows_us}
    return out


def _change(times: Windows, size: str, base: str, mode: str) -> dict[str, float]:
    """Huber's mean of the changes over turns, in percent and us a round, with half the width of its 95 % interval."""
    base_s, own_s = np.array(times[size, base]), np.array(times[size, mode])
    percent = 100 * (own_s / base_s - 1)
    mean, half = interval(Found(percent, np.ones((len(percent), 0)), np.ones(0)), shares_windows=False)
    round_us = 1e6 * float(np.median(base_s))
    return {
        "round_us": round(round_us, 2),
        "percent": round(mean, 3),
        "half_95": round(half, 3),
        "us": round(mean / 100 * round_us, 3),
        "us_half_95": round(half / 100 * round_us, 3),
        "median_percent": round(float(np.median(percent)), 3),
        "n": len(percent),
    }


def _is_narrow(times: Windows, size: str) -> bool:
    if len(times.get((size, _ON), ())) < _FEWEST_TURNS:
        return False
    return all(_change(times, size, base, mode)["half_95"] < _NARROW for base, mode in _COMPARED)
