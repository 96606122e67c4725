"""The late steps of each rank that the rank caused itself. See recurrence for whether they recur enough to name it.

Two conditions must hold. The rank arrives late (this needs aligned clocks). Its own self time exceeds its peers' by
enough to explain the lateness (this needs no other clock). A rank that is late without such an excess had to wait for
another rank: it is a victim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, medians, numbered
from stallscope.diagnose.arrays.row_ranges import rows_of
from stallscope.diagnose.lateness.launch_queue import held_in_launches
from stallscope.diagnose.lateness.pauses import is_usual_in_pauses, shared_pause_ns
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.rounds import Rounds
from stallscope.diagnose.timeline.step_table import Cells, kinds, lengths_ns, median_step_ns, touched
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.names import Category

_MOST = 0.5  # share of a delay
_TOGETHER = 0.25  # in healthy jobs whose ranks vary on their own, this ratio is 0.4 to 1
_OFF_CPU = (
    *(Category.LOCK, Category.OTHER_OFF, Category.SLEEP, Category.NET, Category.CHILD, Category.STOPPED),
    *(Category.PREEMPTED, Category.FAULT, Category.DRIVER, Category.IO),
)
_WIDE, _DEVIATIONS = (
    0.9,
    1.645,
)  # quantile of the distances from the median; its value for a normal distribution
_PASSED_ON_ERRORS = 3.0  # standard errors by which the steps with longer delays must be longer
_LATE_NODE = 3.0  # times the lateness of nodes in time from which all ranks of a late node are late ...
_LATE_NODE_SHARE = (
    0.1  # ... and share of a step: hosts of a node that runs other software are later by some per cent
)
_FAR = 2.0  # times the differences between all ranks
_WANDERING = 2.5  # 1.25 for a median, doubled since 60 % of a deviation persists in the next step


@dataclass(frozen=True)
class LateStep:
    """A step in which a rank was late because of its own time.

    first_row, peak_row: rows of the timeline between which the delay arose. late_ns: the lateness gained until the
    peak, against the median of the others (in jobs that run ahead lateness adds up over steps). excess_ns: its own self
    time beyond its peers'. n_rounds: the late rounds of the step. is_held: it arrived in time, but kept the others
    waiting in a round under way. is_usual: all ranks paused, and a difference of this size is normal in pauses.
    is_stopped: a signal stopped the process for most of the delay, which never happens by chance. is_blocked: it waited
    off the CPU for most of the delay, which does not depend on the speed of the host. threshold_ns: the delay from
    which such a step counts as late; None where it is the threshold of the job, see Pace.
    """

    process: int
    step: int
    first_row: int
    peak_row: int
    late_ns: float
    excess_ns: float
    n_rounds: int
    is_held: bool = False
    is_usual: bool = False
    is_stopped: bool = False
    is_blocked: bool = False
    threshold_ns: float | None = None

    @property
    def delay_ns(self) -> float:
        """The larger of the lateness and the own excess."""
        return max(self.late_ns, self.excess_ns)


def noise_ns(timeline: Timeline, table: Cells) -> float:
    """The variation of a quiet rank's self time from step to step (robust standard deviation).

    The variation of its excess over its peers counts instead where it is far smaller: the work of all ranks varies
    together. The median over the ranks; with few ranks the lower quartile, which one slow rank of two cannot raise.
    """
    own = _of_quiet_rank(timeline, table, table.self_ns, spread)
    apart = _of_quiet_rank(timeline, table, table.excess_ns, _wide_spread)
    return apart if apart < _TOGETHER * own else own


def _of_quiet_rank(
    timeline: Timeline, table: Cells, value: Array, statistic: Callable[[Array], Array]
) -> float:
    """A statistic of each rank's steps, (ranks, steps) to (ranks,), of a quiet rank."""
    spreads = by_group(table.process, value, timeline.n_processes, statistic)
    spreads = spreads[np.bincount(table.process, minlength=timeline.n_processes) >= 4]
    return float(np.quantile(spreads, 0.25 if len(spreads) < 8 else 0.5)) if len(spreads) else 0.0


def _wide_spread(values: Array) -> Array:
    """The standard deviation of each row by its ninth decile: an excess is near zero in most steps, and far in some."""
    apart, nth = np.abs(values - medians(values)[:, None]), int(_WIDE * (values.shape[1] - 1))
    return np.asarray(np.partition(apart, nth, axis=1)[:, nth] / _DEVIATIONS)


def spread(values: Array) -> Array:
    """The robust standard deviation of each row."""
    return 1.4826 * medians(np.abs(values - medians(values)[:, None]))


@dataclass(frozen=True)
class Pace:
    """The baseline of a job. step_ns: a step. noise_ns: see noise_ns(). min_ns: the lateness from which a single step
    counts as late; steady_ns: the same for a rank that is late in most steps; even_ns: the same for a rank that is late
    by a similar amount in nearly all steps.
    """

    step_ns: float
    noise_ns: float
    min_ns: float
    steady_ns: float
    even_ns: float


def pace(timeline: Timeline, table: Cells, limits: Thresholds) -> Pace:
    """The pace of a job, from its judged steps."""
    step_ns, noise = median_step_ns(timeline, table), noise_ns(timeline, table)
    in_all = min(noise, _steady_noise_ns(timeline, table, noise, limits))
    steady = max(limits.min_late_ns, limits.steady_step_share * step_ns)
    return Pace(
        step_ns=step_ns,
        noise_ns=noise,
        min_ns=max(limits.min_late_ns, limits.late_step_share * step_ns, limits.noise_factor * noise),
        steady_ns=max(steady, limits.steady_noise_factor * noise),
        even_ns=max(steady, limits.steady_noise_factor * in_all),
    )


def _steady_noise_ns(timeline: Timeline, table: Cells, noise: float, limits: Thresholds) -> float:
    """The difference between ranks over all steps: the second largest median lateness (or earliness) of a rank.

    At least the noise that remains in a median over this many steps. Successive steps are correlated, because the speed
    of hosts drifts.
    """
    n_cells = np.bincount(table.process, minlength=timeline.n_processes)
    known = n_cells >= limits.steady_steps
    if known.sum() < 3:
        return noise
    each = by_group(table.process, table.rise_ns, timeline.n_processes, medians)
    left = _WANDERING * noise / float(np.median(n_cells[known])) ** 0.5
    counted = known & ~_on_late_nodes(timeline, each, known, median_step_ns(timeline, table))
    return max(float(np.sort(np.abs(each[counted]))[-2]), left)


def _on_late_nodes(timeline: Timeline, late_ns: Array, known: Array, step_ns: float) -> Array:
    """The processes of nodes that are late together by much of a step: bool (p,); none unless half of the nodes or more
    are in time.

    late_ns: float64 (p,), the median lateness of each process. known: bool (p,).
    """
    nodes = np.unique(timeline.node[known])
    on_node = [known & (timeline.node == node) for node in nodes.tolist()]
    in_time_ns = np.sort([float(np.abs(late_ns[here]).max()) for here in on_node])[(len(nodes) - 1) // 2]
    least_ns = max(_LATE_NODE * in_time_ns, _LATE_NODE_SHARE * step_ns)
    out = np.zeros(len(late_ns), bool)
    for here in on_node:
        if np.count_nonzero(here) > 1 and float(late_ns[here].min()) >= least_ns:
            out |= here
    return out if np.count_nonzero(known & ~out) >= 2 else np.zeros(len(late_ns), bool)


def late_steps(
    timeline: Timeline, matched: Rounds, table: Cells, *, program: Array, usual: Pace, limits: Thresholds
) -> list[LateStep]:
    """The steps in which a rank was late because of its own time. program: int64 (p,), see Programs."""
    if not len(table.step):
        return []
    least = usual.min_ns
    needed = _needed_ns(table, usual, limits)[table.process]
    is_late = (table.rise_ns >= needed) & (table.excess_ns >= limits.source_share * table.rise_ns)
    is_late &= table.excess_ns >= limits.source_share * needed
    pause = shared_pause_ns(table, least, program)
    is_held = ~is_late & (table.held_ns >= np.maximum(least, limits.shared_factor * pause))
    is_late &= table.rise_ns >= limits.shared_factor * pause
    is_late &= ~_absorbed(timeline, table, is_late, has_pause=pause > 0, limits=limits)
    late = np.flatnonzero(is_late)
    late = late[~_queued(timeline, matched, table, late)]
    is_usual = is_usual_in_pauses(table, pause, late, limits=limits)
    result = _late(table, matched, late, needed_ns=needed[late], is_usual=is_usual)
    return result + [_held(table, i) for i in np.flatnonzero(is_held).tolist()]


def _queued(timeline: Timeline, matched: Rounds, table: Cells, late: Array) -> Array:
    """The late cells in launches that waited for another rank: bool (k,); False where the process synchronised."""
    out = np.zeros(len(late), bool)
    ahead = np.flatnonzero(table.wait_ns[late] == 0)
    cells = late[ahead]
    spans = list(zip(table.first_row[cells].tolist(), table.peak_row[cells].tolist(), strict=True))
    out[ahead] = held_in_launches(timeline, matched, spans)
    return out


def _absorbed(
    timeline: Timeline, table: Cells, is_late: Array, *, has_pause: Array, limits: Thresholds
) -> Array:
    """Late cells of ranks whose late steps last about as long as steps around which no rank is late: no rank had to
    wait. A queue that absorbs most of a delay still passes on the rest, which may be much of a step. It absorbs delays
    up to some length: the longer half is not absorbed where the steps become longer with the delays.

    Nothing is known where there are too few such steps to compare with. Steps are compared with steps of their kind,
    since kinds (two models that train in turn) differ by more than a delay. has_pause: bool by cell; steps in which all
    ranks paused are longer for that reason, so they are not compared.
    """
    out = np.zeros(len(is_late), bool)
    length = lengths_ns(timeline, table)
    late = np.flatnonzero(is_late)
    quiet = np.flatnonzero(~touched(table.step, np.unique(table.step[late])) & ~has_pause)
    if not len(late) or not len(quiet):
        return out
    kind, n_kinds = numbered(table.process, *kinds(table))
    of_kind = by_group(kind[quiet], length[quiet], n_kinds, medians)
    late = late[np.isfinite(of_kind[kind[late]])]
    quiet = quiet[np.isin(kind[quiet], kind[late])]

    def usual(value: Array, cells: Array) -> Array:
        return by_group(table.process[cells], value[cells], timeline.n_processes, medians)

    longer_ns = length - of_kind[kind]
    longer = usual(longer_ns, late)
    n_quiet = np.bincount(table.process[quiet], minlength=timeline.n_processes)
    is_absorbed = n_quiet >= limits.steady_steps
    is_absorbed &= longer < limits.elongation * usual(table.rise_ns, late)
    is_absorbed &= longer < limits.late_step_share * usual(length, quiet)
    out[late] = is_absorbed[table.process[late]]
    is_long = table.rise_ns[late] > usual(table.rise_ns, late)[table.process[late]]
    out[late[is_long]] &= ~_grow_with_delays(
        table, longer_ns, late[~is_long], late[is_long], timeline.n_processes, limits
    )[table.process[late[is_long]]]
    return out


def _grow_with_delays(
    table: Cells, length_ns: Array, short: Array, long: Array, n_processes: int, limits: Thresholds
) -> Array:
    """Whether the steps with the longer delays of a process are longer than the steps with its shorter delays, by a
    share of the difference of the delays: bool (n_processes,). short, long: cells.
    """

    def differ(value: Array) -> tuple[Array, Array]:
        """The difference of the medians, and its standard error."""
        both = [(table.process[cells], value[cells]) for cells in (short, long)]
        low, high = (by_group(process, own, n_processes, medians) for process, own in both)
        errors = [
            by_group(process, own, n_processes, spread)
            / np.sqrt(np.maximum(np.bincount(process, minlength=n_processes), 1))
            for process, own in both
        ]
        return high - low, np.hypot(*errors)

    (longer, error), (later, _) = differ(length_ns), differ(table.rise_ns)
    n_each = np.minimum(
        *(np.bincount(table.process[cells], minlength=n_processes) for cells in (short, long))
    )
    grows = (longer >= limits.elongation * later) & (longer >= _PASSED_ON_ERRORS * error)
    return np.asarray(grows & (n_each >= limits.steady_steps))


def _late(table: Cells, matched: Rounds, late: Array, *, needed_ns: Array, is_usual: Array) -> list[LateStep]:
    """The late steps of some cells. late: int64 (k,); needed_ns, is_usual: (k,)."""
    rows, of_cell = rows_of(table.first_row[late], table.end_row[late])
    is_late = np.nan_to_num(matched.late_ns[rows], nan=0.0) >= needed_ns[of_cell]
    columns = {
        "process": table.process[late],
        "step": table.step[late],
        "first_row": table.first_row[late],
        "peak_row": table.peak_row[late],
        "late_ns": table.rise_ns[late].astype(np.float64),
        "excess_ns": table.excess_ns[late].astype(np.float64),
        "n_rounds": np.bincount(of_cell[is_late], minlength=len(late)),
        "is_usual": is_usual,
    }
    values = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [LateStep(**dict(zip(columns, each, strict=True))) for each in values]


def _held(table: Cells, i: int) -> LateStep:
    """The late step of a rank that arrived in time and was held up afterwards. The lateness is the time it was held."""
    row = int(table.held_row[i])
    return LateStep(
        process=int(table.process[i]),
        step=int(table.step[i]),
        first_row=row,
        peak_row=row,
        late_ns=float(table.held_ns[i]),
        excess_ns=float(table.held_ns[i]),
        n_rounds=1,
        is_held=True,
    )


def spent_ns(timeline: Timeline, late: Sequence[LateStep], category: Category) -> Array:
    """Time in a category of the ledger from the start of each late step until its peak: float64 (len(late),)."""
    first = np.array([late_step.first_row for late_step in late], np.int64)
    peak = np.array([late_step.peak_row for late_step in late], np.int64)
    return _spent_ns(timeline, first, peak, (category,))


def _spent_ns(timeline: Timeline, first: Array, last: Array, categories: Sequence[Category]) -> Array:
    """Time in categories of the ledger before each first row (k,) until the last row: float64 (k,)."""
    before, spent = np.maximum(first - 1, 0), np.zeros(len(first))
    for category in categories:
        at_end, at_begin = (
            timeline.rows.column("ledger_ns", rows, category - 1).astype(np.float64)
            for rows in (last, before)
        )
        spent += at_end - at_begin
    return spent


def with_states(timeline: Timeline, table: Cells, late: list[LateStep]) -> list[LateStep]:
    """The late steps of a table's cells, with is_stopped and is_blocked from the time ledgers."""
    stopped_ns = spent_ns(timeline, late, Category.STOPPED)
    blocked_ns = _more_blocked_ns(timeline, table, late)
    return [
        replace(
            late_step,
            is_stopped=stopped >= _MOST * late_step.excess_ns > 0,
            is_blocked=blocked >= _MOST * late_step.excess_ns > 0,
        )
        for late_step, stopped, blocked in zip(late, stopped_ns.tolist(), blocked_ns.tolist(), strict=True)
    ]


def _more_blocked_ns(timeline: Timeline, table: Cells, late: list[LateStep]) -> Array:
    """By how much longer each process was off the CPU in its late steps than in its other steps: float64 (len(late),).

    A job may wait for its input or for the network in every step.
    """
    wanted = {(late_step.process, late_step.step): n for n, late_step in enumerate(late)}
    cells = np.flatnonzero(np.isin(table.process, [process for process, _ in wanted]))
    process = table.process[cells]
    spent = _spent_ns(timeline, table.first_row[cells], table.end_row[cells] - 1, _OFF_CPU)
    keys = zip(process.tolist(), table.step[cells].tolist(), strict=True)
    number = np.array([wanted.get(key, -1) for key in keys], np.int64)
    others = number < 0
    typical = by_group(process[others], spent[others], timeline.n_processes, medians)
    more = np.zeros(len(late))
    more[number[~others]] = spent[~others] - np.nan_to_num(typical)[process[~others]]
    return more


def _needed_ns(table: Cells, usual: Pace, limits: Thresholds) -> Array:
    """By process: the lateness from which its steps count as late.

    The threshold is lower for a rank that is late in most steps with an own excess that explains it. It is lowest for a
    rank that is late by a similar amount in nearly all steps, or by more than the differences of all ranks, or in most
    steps by several times these differences. A host whose speed drifts is late at times only.
    """
    n = int(table.process.max()) + 1
    n_cells = np.bincount(table.process, minlength=n)
    late, own = (by_group(table.process, each, n, medians) for each in (table.rise_ns, table.excess_ns))

    def is_late(min_ns: float | Array, share: float) -> Array:
        n_late = np.bincount(table.process[table.rise_ns >= min_ns], minlength=n)
        return np.asarray(n_late >= share * n_cells)

    is_own = (n_cells >= limits.steady_steps) & (own >= limits.source_share * late)
    is_steady, is_even = (
        is_own & is_late(least, limits.steady_share) for least in (usual.steady_ns, usual.even_ns)
    )
    is_similar = is_late(0.5 * late[table.process], limits.even_share)
    is_far = is_late(_FAR * usual.even_ns, limits.steady_share)
    is_even &= (late > 0) & (is_similar | is_far | is_late(usual.even_ns, limits.even_share))
    return np.where(is_even, usual.even_ns, np.where(is_steady, usual.steady_ns, usual.min_ns))
