"""Slow GPUs, from the start and end times of collectives on the GPU (see gpu_clock).

The excess of a rank's host time over its peers within the calls also delays the starts. The host causes this part, so
it is subtracted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, median_of_others, medians, numbered
from stallscope.diagnose.arrays.row_order import flagged
from stallscope.diagnose.gpu.gpu_clock import GpuTime
from stallscope.diagnose.gpu.overlap import OverlappedWork, overlapped_work
from stallscope.diagnose.gpu.slowest_gpu import slow_since
from stallscope.diagnose.lateness.late_steps import LateStep, Pace
from stallscope.diagnose.lateness.recurrence import beyond_chance
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.clocks import Clocks
from stallscope.diagnose.timeline.programs import Programs
from stallscope.diagnose.timeline.rounds import clock_error_ns
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import CollectiveFlag

_ALONE = 4  # times as many slow steps as any other GPU
_HIDDEN = 2.0  # work of a GPU, as a multiple of its work between calls: the host may wait for the rest before a call
_OFTEN, _OFTEN_IN_RUNS = 0.3, 0.15
"""Shares of the steps; the second of a GPU whose slow steps follow each other."""
_IN_RUNS = 0.5  # share of the slow steps that follow or precede a slow step; work of every k-th step is rarely in runs
_FEW_AT_TIMES = 5  # slow steps in runs that make the answer inconclusive
_FEWEST_PEERS = 3  # other GPUs of a node that suffice for the node's median
_FEW = 0.25  # share of the steps in which a small excess must occur, since small excesses drift
_KIND = 0.15  # share of the steps from which a kind of step is examined by itself
_LIKE = 0.5  # share of a GPU's median excess from which slow steps are similar
_BY_HOST = 0.5  # share of a host's own delay that shows in the release of a rank held by its host
_WITH_HOST = (
    0.25  # share of the steps with longer even work in which the GPU is also late with its host's time
)
_FEWEST_ROUNDS = 8
_QUARTILES = 1.35  # distance of the quartiles in standard deviations
_IRREGULAR = 0.55  # see _is_irregular(); a slow clock has at most 0.44, shared time 0.67 and more


@dataclass(frozen=True)
class SlowDevice:
    """A GPU that works longer than its peers between the same calls. is_irregular: by varying amounts.
    seen_by: the evidence, as text. is_kind_of_step: its late steps have another number of calls than the steps between.
    is_at_times: in a few runs of steps, which additional work of its rank would explain as well.
    """

    late: list[LateStep]
    is_irregular: bool
    seen_by: str
    is_kind_of_step: bool = False
    is_at_times: bool = False

    @property
    def typical_ns(self) -> float:
        """The median of its excess in the late steps."""
        return float(np.median([step.excess_ns for step in self.late]))


@dataclass(frozen=True)
class DeviceExcess:
    """by_cell_ns, max_ns: float64 (c,), device time of a process in a step beyond its peers', at least and at most.
    by_row_ns: float64 (n,), the same before each call, at least, without regard to the host. error_ns: float64 (p,).
    own_ns, likely_ns: float64 (c,), by cell, the likely work of a GPU, and the part beyond its peers' work (below 0 for
    less work).
    noise_ns: the variation of a quiet GPU's excess from step to step. overlapped: the work of GPUs that work during
    collectives, of which by_cell_ns also counts the part that peers did while they waited.
    """

    by_cell_ns: Array
    max_ns: Array
    by_row_ns: Array
    error_ns: Array
    own_ns: Array
    likely_ns: Array
    overlapped: OverlappedWork
    noise_ns: float = 0.0


def device_excess(
    timeline: Timeline, programs: Programs, table: Cells, times: GpuTime, *, host_excess_ns: Array
) -> DeviceExcess:
    """The device time in each step beyond the peers' median, minus the part that the host explains.

    Computed from bounds: the minimum device time minus the peers' maximum device time. A GPU behind its host shows all
    its work. Its peers' work then includes the work before they enqueued the call: a GPU that keeps up with the hosts'
    pace delays no rank.

    host_excess_ns: float64 (n,), see excess.excess_ns() of host time.
    """

    def beyond_peers(own_ns: Array, peers_ns: Array) -> Array:
        beyond = programs.calls.beyond_others(own_ns, times.known, held_against=peers_ns)
        return np.asarray(np.nan_to_num(beyond, nan=0.0))

    paced_ns = np.maximum(times.max_ns, times.paced_ns)
    least = np.where(
        times.is_behind,
        beyond_peers(times.min_ns, paced_ns),
        beyond_peers(times.min_ns, times.max_ns),
    )

    # A call's own host time lies in the interval after its arrival.
    of_host = np.append(np.where(timeline.is_first[1:], 0.0, host_excess_ns[1:]), 0.0)[: len(times.known)]
    by_host = np.maximum(table.sums(of_host), 0.0)
    by_cell = table.sums(least) - by_host
    by_cell -= _of_node(timeline, table, by_cell)
    most = table.sums(beyond_peers(times.max_ns, times.min_ns)) - by_host
    likely = table.sums(beyond_peers(times.own_ns, times.own_ns)) - by_host
    return DeviceExcess(
        by_cell_ns=np.maximum(by_cell, 0.0),
        max_ns=np.maximum(np.maximum(by_cell, most), 0.0),
        by_row_ns=least,
        error_ns=times.error_ns,
        own_ns=table.sums(np.where(times.known, times.own_ns, 0.0)),
        likely_ns=likely - _of_node(timeline, table, likely),
        overlapped=overlapped_work(timeline, programs, table, times),
        noise_ns=_noise_ns(table, by_cell, timeline.n_processes),
    )


def _of_node(timeline: Timeline, table: Cells, by_cell_ns: Array) -> Array:
    """By cell, the median excess of the node's other GPUs in that step: float64 (c,).

    Nodes may run other kernels (drivers, libraries, GPU models), which makes no single GPU slow. 0 on small nodes.
    """
    if timeline.node.min(initial=0) == timeline.node.max(initial=0):
        return np.zeros(len(by_cell_ns))
    group, n_groups = numbered(timeline.node[table.process], table.step)
    typical = np.maximum(median_of_others(group, by_cell_ns), 0.0)
    is_large = np.bincount(group, minlength=n_groups)[group] > _FEWEST_PEERS
    return np.where(is_large, np.nan_to_num(typical), 0.0)


def late_devices(
    table: Cells, more: DeviceExcess, *, usual: Pace, limits: Thresholds, host_late_steps: list[LateStep]
) -> list[LateStep]:
    """The steps in which a GPU worked longer than its peers' GPUs, without the steps that the host explains."""
    least = min_device_ns(usual, limits)
    needed = np.maximum(least, limits.clock_error_factor * more.error_ns)[table.process]
    explained = {(late.process, late.step) for late in host_late_steps}
    return [
        _late(table, i, float(more.by_cell_ns[i]), max_ns=float(more.max_ns[i]))
        for i in np.flatnonzero(more.by_cell_ns >= needed).tolist()
        if (int(table.process[i]), int(table.step[i])) not in explained
    ]


def without_overlap(
    table: Cells, more: DeviceExcess, late: list[LateStep], *, usual: Pace, limits: Thresholds
) -> list[LateStep]:
    """Late steps of GPUs, without the time in which their peers worked as well; none that are then too short.

    A GPU that works during collectives and is a little behind starts each collective of a step later than its peers,
    which wait in it. Its excess before each collective then contains its whole delay since the step began.
    """
    if not late:
        return late
    rows = np.array([late_step.first_row for late_step in late], np.int64)
    net_ns = more.overlapped.late_in_step_ns[np.searchsorted(table.first_row, rows)]
    least = min_device_ns(usual, limits)
    return [
        replace(late_step, late_ns=min(late_step.late_ns, late_step.excess_ns))
        for late_step in _without_overlap(late, net_ns)
        if late_step.excess_ns >= least
    ]


def min_device_ns(usual: Pace, limits: Thresholds) -> float:
    """The excess from which a GPU is late in a step."""
    return max(limits.min_late_ns / 2, limits.steady_step_share * usual.step_ns, usual.noise_ns)


def slow_devices(
    table: Cells,
    more: DeviceExcess,
    late: list[LateStep],
    *,
    usual: Pace,
    limits: Thresholds,
    host_late_steps: list[LateStep],
) -> dict[int, SlowDevice]:
    """Processes whose GPU is slower than its peers' in most steps of a stretch, or at times, beyond what chance gives.

    late: see late_devices(). host_late_steps: late steps of the hosts, which are not evidence about the GPU.
    """
    explained = {(late_step.process, late_step.step) for late_step in host_late_steps}
    min_ns = min_device_ns(usual, limits)
    least = limits.steady_noise_factor * more.noise_ns
    late = [late_step for late_step in late if late_step.excess_ns >= least]
    process_of = np.array([late_step.process for late_step in late], np.int64)
    sizes = np.array([late_step.excess_ns for late_step in late])
    slow: dict[int, SlowDevice] = {}
    for process in np.flatnonzero(np.bincount(process_of) >= limits.min_late_steps).tolist():
        cells = np.flatnonzero(table.process == process)
        cells = cells[[(process, int(step)) not in explained for step in table.step[cells]]]
        own = sizes[process_of == process]
        for typical in dict.fromkeys((float(np.median(own)), _of_most_time(own))):
            is_like = sizes >= _LIKE * typical
            counts = np.bincount(process_of[is_like], minlength=len(more.error_ns))
            of_process = np.flatnonzero(is_like & (process_of == process))
            by_step = {late[i].step: late[i] for i in of_process.tolist()}
            is_clear = typical >= limits.clear_factor * max(min_ns, least)
            device = _slow_device(
                table,
                more,
                by_step,
                cells=cells,
                counts=counts,
                process=process,
                is_clear=is_clear,
                limits=limits,
            )
            if device is not None and (not device.is_at_times or process not in slow):
                slow[process] = device
            if device is not None and not device.is_at_times:
                break
    return slow


def steadily_slow_devices(
    table: Cells, more: DeviceExcess, *, usual: Pace, limits: Thresholds, host_late_steps: list[LateStep]
) -> dict[int, SlowDevice]:
    """Processes whose GPU is among the slowest of a step again and again, although the work differs: see slowest_gpu.

    A GPU that is slower by a small share of a step is left out.
    """
    explained = {(late_step.process, late_step.step) for late_step in host_late_steps}
    least = max(limits.min_late_ns / 2, limits.steady_step_share * usual.step_ns)
    is_overlapped = more.overlapped.own_ns > 0
    own_ns = np.where(is_overlapped, more.overlapped.own_ns, more.own_ns)
    net_ns = np.nan_to_num(more.overlapped.late_in_step_ns, nan=np.inf)
    excess_ns = np.where(is_overlapped, np.minimum(more.likely_ns, net_ns), more.likely_ns)
    slow: dict[int, SlowDevice] = {}
    for process, since in slow_since(
        table, own_ns, excess_ns, order_by=more.likely_ns, explained=explained
    ).items():
        late_ns = since.share * own_ns[since.cells]
        late = [
            _late(table, i, ns, max_ns=min(float(more.max_ns[i]), _HIDDEN * ns))
            for i, ns in zip(since.cells.tolist(), late_ns.tolist(), strict=True)
        ]
        late = _without_overlap(late, more.overlapped.late_ns(since.cells))
        device = SlowDevice(late, False, "its order among the GPUs in each step")
        if device.typical_ns >= least:
            slow[process] = device
    return slow


def slow_at_even_work(
    table: Cells,
    more: DeviceExcess,
    longer_ns: Array,
    *,
    limits: Thresholds,
    host_late_steps: list[LateStep],
) -> dict[int, SlowDevice]:
    """Processes whose GPU takes longer for even work in most steps of a stretch. longer_ns: see even_work.

    The host's pace must not explain it, see device_excess(). The time of the host outside of this work does not count,
    but in some of the steps the GPU must be later than its peers with it as well: a host that is slow to launch makes
    the work between two collectives longer too.
    """
    explained = {(late_step.process, late_step.step) for late_step in host_late_steps}
    least_ns = table.sums(more.by_row_ns)
    is_late = (longer_ns > 0) & (least_ns >= _LIKE * longer_ns)
    is_late &= np.array(
        [key not in explained for key in zip(table.process.tolist(), table.step.tolist(), strict=True)], bool
    )
    counts = np.bincount(table.process[is_late], minlength=len(more.error_ns))
    with_host = is_late & (more.max_ns >= _LIKE * longer_ns)
    n_with_host = np.bincount(table.process[with_host], minlength=len(counts))
    is_candidate = (counts >= _FEW_AT_TIMES) & (n_with_host >= _WITH_HOST * counts)
    slow: dict[int, SlowDevice] = {}
    for process in np.flatnonzero(is_candidate).tolist():
        cells = np.flatnonzero(table.process == process)
        by_step = {
            int(table.step[i]): _late(table, i, min(float(longer_ns[i]), float(least_ns[i])))
            for i in cells[is_late[cells]].tolist()
        }
        device = _slow_device(
            table, more, by_step, cells=cells, counts=counts, process=process, is_clear=False, limits=limits
        )
        if device is not None:
            slow[process] = device
    return slow


def _slow_device(
    table: Cells,
    more: DeviceExcess,
    by_step: Mapping[int, LateStep],
    *,
    cells: Array,
    counts: Array,
    process: int,
    is_clear: bool,
    limits: Thresholds,
) -> SlowDevice | None:
    """A GPU that is late in most steps of a stretch, and more often than chance allows; otherwise None.

    by_step: its late steps of similar size. counts: by process, the late steps of that size. cells: its steps.
    """
    is_late = np.array([int(step) in by_step for step in table.step[cells]])
    of_kind = _of_late_kinds(table, cells, is_late)
    is_part = not of_kind.all()
    cells, is_late = cells[of_kind], is_late[of_kind]
    others = np.delete(counts, process)
    during = _steadily(is_late, limits, n_least=0 if is_clear else int(_FEW * len(cells)))
    is_at_times = False
    if counts[process] >= _ALONE * max(int(others.max(initial=0)), 1):
        during = _with_more(is_late, during, _now_and_then(is_late, limits))
        is_at_times = during is None and _is_in_runs(is_late)
        during = slice(0, len(cells)) if is_at_times else during
    if during is None or not beyond_chance(int(counts[process]), others, limits.chance):
        return None
    values = more.by_cell_ns[cells[during]]
    kept, between = cells[during][is_late[during]], cells[during][~is_late[during]]
    return SlowDevice(
        _without_overlap(
            [by_step[step] for step in table.step[kept].tolist()], more.overlapped.late_ns(kept)
        ),
        _is_irregular(values),
        "start and end of collectives on the GPUs",
        is_part or _n_calls(table, kept) != _n_calls(table, between),
        is_at_times,
    )


def _is_irregular(values_ns: Array) -> bool:
    """Whether slowness looks like shared time rather than a slow clock: it varies in the middle half of the steps.

    Single steps do not count, such as a pause of all ranks.
    """
    low, middle, high = np.quantile(values_ns, (0.25, 0.5, 0.75)).tolist()
    return bool((high - low) / _QUARTILES >= _IRREGULAR * middle)


def _of_most_time(sizes_ns: Array) -> float:
    """The size of late steps at which half of their time lies in larger ones: steps of a longer kind decide."""
    ordered = np.sort(sizes_ns)
    return float(ordered[np.searchsorted(np.cumsum(ordered), 0.5 * ordered.sum())])


def _of_late_kinds(table: Cells, cells: Array, is_late: Array) -> Array:
    """Whether each of some cells is of a kind of step in which the process is late at all: bool (k,).

    In a job that trains two models in turn, a slow GPU may be late in the steps of one model only. Rare kinds of steps,
    as with an evaluation, do not count by themselves.
    """
    n_calls = table.end_row[cells] - table.first_row[cells]
    kinds, kind, n_cells = np.unique(n_calls, return_inverse=True, return_counts=True)
    n_late = np.bincount(kind[is_late], minlength=len(kinds))
    is_kind = (n_late > 0) & (n_cells >= _KIND * len(cells))
    if n_late[is_kind].sum() < n_late.sum():
        return np.ones(len(cells), bool)
    return np.asarray(is_kind[kind])


def _n_calls(table: Cells, cells: Array) -> float:
    """The median number of calls in some cells; 0 for none."""
    return float(np.median(table.end_row[cells] - table.first_row[cells])) if len(cells) else 0.0


def _without_overlap(late: list[LateStep], late_ns: Array) -> list[LateStep]:
    """Late steps of a GPU; the excess lacks the time in which its peers worked as well. late_ns: NaN unknown."""
    return [
        late_step if np.isnan(ns) else replace(late_step, excess_ns=min(late_step.excess_ns, ns))
        for late_step, ns in zip(late, late_ns.tolist(), strict=True)
    ]


def _noise_ns(table: Cells, by_cell_ns: Array, n_processes: int) -> float:
    """The variation of a quiet GPU's excess from step to step (robust standard deviation).

    The median over the GPUs; with few GPUs the lower quartile, which a single slow GPU cannot raise. With two GPUs each
    is compared with the other only, and varies with the other, so the noise is unknown (0).
    """
    if n_processes <= 2 or not len(by_cell_ns):
        return 0.0
    spreads = by_group(table.process, by_cell_ns, n_processes, _spread)
    spreads = spreads[np.isfinite(spreads)]
    return float(np.quantile(spreads, 0.25 if len(spreads) < 8 else 0.5))


def _spread(values: Array) -> Array:
    return 1.4826 * medians(np.abs(values - medians(values)[:, None]))


def released_late(
    timeline: Timeline, table: Cells, *, clocks: Clocks, step_ns: float, limits: Thresholds
) -> dict[int, SlowDevice]:
    """Processes that are released from their waits later than the others after the same round, in most steps.

    A collective ends on all its ranks at the same time. The remaining work of a slow GPU after it takes longer. Only
    this part of its slowness shows, and only if a wait follows the round on all ranks. A rank is held by its host if
    the host begins to wait after the others were released, or if its release is late by as much as its host. If ranks
    also send to each other, a wait may be for a transfer. If ranks attached late, rounds may be wrong. In both cases no
    GPU is named.
    """
    if timeline.is_p2p.any() or flagged(timeline.rows["flags"], CollectiveFlag.LATE_ATTACH).any():
        return {}
    release, is_last = timeline.releases
    rows = np.flatnonzero(is_last)
    common = release - (timeline.ts_ns - clocks.arrival_ns)
    late = timeline.meetings.beyond_others(common, is_last)[rows]
    enter = timeline.rows.column("wait_enter_ns", np.minimum(rows + 1, len(timeline.rows) - 1)).astype(
        np.int64
    )
    waited = release[rows] - enter
    came = np.zeros(len(release), np.int64)
    came[rows] = common[rows] - waited
    came_late = timeline.meetings.beyond_others(came, is_last)[rows]
    late = np.where((enter != UNKNOWN) & (late >= waited), 0.0, late)
    error_ns = clock_error_ns(timeline, clocks)
    if error_ns is not None:
        late = np.where(np.abs(late) < limits.clock_error_factor * error_ns[timeline.round[rows]], 0, late)
    cell = np.searchsorted(table.first_row, rows, side="right") - 1
    inside = (cell >= 0) & np.isfinite(late)
    inside &= rows < table.end_row[np.maximum(cell, 0)] if len(table.end_row) else False
    least = max(limits.released_late_ns, limits.released_late_share * step_ns)
    owner = timeline.process[rows]
    n_seen = np.bincount(owner[inside], minlength=timeline.n_processes)
    n_late = np.bincount(owner[inside & (late >= least)], minlength=timeline.n_processes)
    slow: dict[int, SlowDevice] = {}
    for process in np.flatnonzero((n_seen >= 2 * limits.steady_steps) & (n_late >= 0.8 * n_seen)).tolist():
        late_steps = inside & (owner == process) & (late >= least)
        own = inside & (owner == process)
        if _follows_host(late[own], came_late[own]):
            continue
        steps = [
            _late(table, i, excess)
            for i, excess in zip(cell[late_steps].tolist(), late[late_steps].tolist(), strict=True)
        ]
        slow[process] = SlowDevice(steps, False, "when the rank is released after the same round")
    return slow


def _follows_host(late_ns: Array, came_late_ns: Array) -> bool:
    """Whether a rank's release is late by as much as its host took longer since the previous release.

    late_ns, came_late_ns: by round, how much later than its peers the rank was released, and began to wait.
    """
    grew, host = late_ns[1:] - late_ns[:-1], came_late_ns[1:] - late_ns[:-1]
    known = np.isfinite(grew) & np.isfinite(host)
    if np.count_nonzero(known) < _FEWEST_ROUNDS:
        return False
    grew, host = (each[known] - each[known].mean() for each in (grew, host))
    return bool((grew * host).sum() >= _BY_HOST * max(float((host * host).sum()), 1.0))


def _steadily(is_late: Array, limits: Thresholds, *, n_least: int) -> slice | None:
    """The stretch of a process's steps in which most are slow; None without a long one, of at least n_least steps."""
    run = _longest_slow_run(is_late)
    if run is None or run[1] - run[0] < max(2 * limits.min_late_steps, n_least):
        return None
    return slice(*run) if is_late[slice(*run)].mean() >= limits.steady_share else None


def _now_and_then(is_late: Array, limits: Thresholds) -> slice | None:
    """From the first slow step to the last, if steps in between are often slow, as on a GPU that is shared at times."""
    slow = np.flatnonzero(is_late)
    if len(slow) < 3 * limits.min_late_steps:
        return None
    least = _OFTEN_IN_RUNS if _is_in_runs(is_late) else _OFTEN
    return slice(slow[0], slow[-1] + 1) if len(slow) >= least * (slow[-1] + 1 - slow[0]) else None


def _is_in_runs(is_late: Array) -> bool:
    """Whether several slow steps follow each other, as most of them do."""
    has_late_neighbour = np.zeros(len(is_late), bool)
    has_late_neighbour[1:] |= is_late[:-1]
    has_late_neighbour[:-1] |= is_late[1:]
    n = int(np.count_nonzero(is_late))
    return n >= _FEW_AT_TIMES and int(np.count_nonzero(is_late & has_late_neighbour)) >= _IN_RUNS * n


def _with_more(is_late: Array, *stretches: slice | None) -> slice | None:
    """The stretch with the most slow steps; None without any."""
    known = [each for each in stretches if each is not None]
    return max(known, key=lambda each: int(is_late[each].sum()), default=None)


def _longest_slow_run(is_over: Array) -> tuple[int, int] | None:
    """The stretch with the largest number of slow steps minus quiet steps."""
    score = np.where(is_over, 1.0, -1.0)
    best, best_range, current, start = 0.0, None, 0.0, 0
    for i, value in enumerate(score.tolist()):
        if current <= 0:
            current, start = 0.0, i
        current += value
        if current > best:
            best, best_range = current, (start, i + 1)
    return best_range


def _late(table: Cells, i: int, excess_ns: float, *, max_ns: float = 0.0) -> LateStep:
    """max_ns: the largest possible lateness of the GPU, by the bounds on its clock."""
    return LateStep(
        process=int(table.process[i]),
        step=int(table.step[i]),
        first_row=int(table.first_row[i]),
        peak_row=int(table.end_row[i]) - 1,
        late_ns=max(excess_ns, max_ns),
        excess_ns=excess_ns,
        n_rounds=int(table.end_row[i] - table.first_row[i]),
    )
