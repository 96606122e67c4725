"""Slowness on the GPU, which the host does not see: from the times collectives start and end there.

Between the end of one collective and the start of the next a GPU does its own work. Both are times of its own
clock, so no other clock is needed. Time it only waited for the host to enqueue is taken off; for that the host's
arrivals are put on the GPU's clock by the shortest delay seen nearby between enqueue and start.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.blame import Cells, LateStep, Pace
from stallscope.diagnose.clocks import Clocks, releases
from stallscope.diagnose.groups import median_of_others
from stallscope.diagnose.programs import Programs
from stallscope.diagnose.rounds import Rounds
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CollectiveFlag

_NEARBY_ROWS = 32  # GPU clocks drift by milliseconds in minutes: the mapping is made anew all along
_IRREGULAR = 0.3  # coefficient of variation from which slowness looks like shared time, not like a slow clock


@dataclass(frozen=True)
class SlowDevice:
    """A GPU that works longer than its peers between the same calls. is_irregular: by varying amounts.
    seen_by: what told it.
    """

    late: list[LateStep]
    is_irregular: bool
    seen_by: str


def device_excess_ns(line: Timeline, plan: Programs) -> Array:
    """Own device time before each collective beyond the peers' median: float64 (n,), 0 where unknown."""
    rows = line.rows
    known = (rows["gpu_start_ns"] != UNKNOWN) & (rows["gpu_end_ns"] != UNKNOWN)
    usable = line.is_whole & known & np.concatenate([[False], known[:-1]])[: len(known)]
    out = np.zeros(len(rows))
    picked = np.flatnonzero(usable)
    if not len(picked):
        return out
    enqueued = rows["ts_ns"] + _host_to_gpu_ns(line, known)
    began = np.maximum(rows["gpu_end_ns"][picked - 1], enqueued[picked])
    own = np.maximum(rows["gpu_start_ns"][picked] - began, 0)
    out[picked] = own - median_of_others(plan.key[picked], own, plan.member[line.process[picked]])
    return np.nan_to_num(out, nan=0.0)


def _host_to_gpu_ns(line: Timeline, known: Array) -> Array:
    """What to add to a host time to get the GPU's, near each row: the least delay from enqueue to start."""
    delay = np.where(known, line.rows["gpu_start_ns"] - line.rows["ts_ns"], np.iinfo(np.int64).max)
    out = delay.copy()
    for process in range(line.n_processes):
        mine = np.flatnonzero(line.process == process)
        blocks = np.arange(len(mine)) // _NEARBY_ROWS
        least = np.full(int(blocks.max(initial=0)) + 3, np.iinfo(np.int64).max)
        np.minimum.at(least, blocks + 1, delay[mine])
        out[mine] = np.minimum(np.minimum(least[blocks], least[blocks + 1]), least[blocks + 2])
    return out


def slow_devices(
    table: Cells, excess: Array, *, usual: Pace, limits: Thresholds, found: list[LateStep]
) -> dict[int, SlowDevice]:
    """Processes whose GPU is slower than its peers' in most steps; steps the host explains are left out."""
    if not excess.any() or not len(table.step):
        return {}
    total = np.concatenate([[0], np.cumsum(excess)])
    sums = total[table.end_row] - total[table.first_row]
    least = max(limits.min_late_ns / 2, limits.steady_step_share * usual.step_ns, usual.noise_ns)
    explained = {(late.process, late.step) for late in found}
    slow: dict[int, SlowDevice] = {}
    for process in np.unique(table.process).tolist():
        cells = np.flatnonzero(table.process == process)
        cells = cells[[(process, int(step)) not in explained for step in table.step[cells]]]
        over = cells[sums[cells] >= least]
        run = _longest_slow_run(sums[cells] >= least)
        if len(over) < limits.min_late_steps or run is None:
            continue
        during = cells[run[0] : run[1]]
        if np.mean(sums[during] >= least) < limits.steady_share or len(during) < 2 * limits.min_late_steps:
            continue
        late = [_late(table, int(i), float(sums[i])) for i in during[sums[during] >= least]]
        values = sums[during]
        is_irregular = bool(np.std(values) >= _IRREGULAR * np.mean(values))
        slow[process] = SlowDevice(late, is_irregular, "start and end of collectives on the GPUs")
    return slow


def released_late(
    line: Timeline, table: Cells, met: Rounds, *, clocks: Clocks, step_ns: float, limits: Thresholds
) -> dict[int, SlowDevice]:
    """Processes that are released from their waits later than the others from the same round, step after step.

    A collective ends for all its ranks at once; what one GPU still has to do after it takes longer where the GPU
    is slow. Only that part of its slowness is seen, and only where a wait follows the round on all ranks. Where
    ranks also send to each other, a wait can be for those too, and where ranks were captured late, a round can be
    another one: then nothing is said.
    """
    if line.is_p2p.any() or (line.rows["flags"] & CollectiveFlag.LATE_ATTACH).any():
        return {}
    release, is_last = releases(line)
    rows = np.flatnonzero(is_last & ~line.is_p2p)
    common = release[rows] - (line.rows["ts_ns"][rows] - clocks.arrival_ns[rows])
    late = common - median_of_others(met.round[rows], common, line.member[rows])
    late = np.where(
        np.abs(late) < limits.clock_error_factor * clocks.error_ns[line.node[line.process[rows]]], 0, late
    )
    cell = np.searchsorted(table.first_row, rows, side="right") - 1
    inside = (cell >= 0) & np.isfinite(late)
    inside &= rows < table.end_row[np.maximum(cell, 0)] if len(table.end_row) else False
    least = max(limits.released_late_ns, limits.released_late_share * step_ns)
    owner = line.process[rows]
    n_seen = np.bincount(owner[inside], minlength=line.n_processes)
    n_late = np.bincount(owner[inside & (late >= least)], minlength=line.n_processes)
    slow: dict[int, SlowDevice] = {}
    for process in np.flatnonzero((n_seen >= 2 * limits.steady_steps) & (n_late >= 0.8 * n_seen)).tolist():
        mine = inside & (owner == process) & (late >= least)
        steps = [
            _late(table, i, excess)
            for i, excess in zip(cell[mine].tolist(), late[mine].tolist(), strict=True)
        ]
        slow[process] = SlowDevice(steps, False, "when the rank is released after the same round")
    return slow


def _longest_slow_run(is_over: Array) -> tuple[int, int] | None:
    """Where slow steps are dense: the stretch with the largest count of slow beyond quiet steps."""
    score = np.where(is_over, 1.0, -1.0)
    best, best_range, current, start = 0.0, None, 0.0, 0
    for i, value in enumerate(score.tolist()):
        if current <= 0:
            current, start = 0.0, i
        current += value
        if current > best:
            best, best_range = current, (start, i + 1)
    return best_range


def _late(table: Cells, i: int, excess_ns: float) -> LateStep:
    return LateStep(
        process=int(table.process[i]),
        step=int(table.step[i]),
        first_row=int(table.first_row[i]),
        peak_row=int(table.end_row[i]) - 1,
        late_ns=excess_ns,
        excess_ns=excess_ns,
        n_rounds=int(table.end_row[i] - table.first_row[i]),
    )
