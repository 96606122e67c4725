"""The whole job becomes slower at some moment: no rank arrives late, so no rank differs from the others.

A lasting change of the step time, found by a robust change-point test: the median over the ranks of each step, cut
where the two parts lie closest to their medians. The change counts if it exceeds the differences between blocks of
steps within each part, and if no block before it was as slow. Evaluations, checkpoints and recurring phases do not
count. The time ledger shows which part of the step grew. Accuracy of the moment: a few steps if noise is small.

Steps of several kinds (two models that train in turn) are compared with their own kind. Where the work of the steps
varies more than the change (batches of several lengths), the time on the hosts and the transfers vary less: they are
examined as well, and count unless the steps did not become longer with them. A few typical lengths are compared as
such, see step_levels.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, medians, numbered
from stallscope.diagnose.arrays.subsample import spread_out
from stallscope.diagnose.lateness.slow_link import transfers
from stallscope.diagnose.lateness.step_levels import shifted_levels
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.step_table import Cells, n_steps_of_job, part_of
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.names import CATEGORY_NAMES, N_CATEGORIES

_MAX_PROCESSES = 64  # ranks whose ledgers are examined: all ranks changed
_STEPS_AHEAD = 64  # steps per sum if hosts run ahead: single steps show only the hosts
_STEPS_BETWEEN_WAITS = 32  # steps without a wait in which hosts fill their launch queues
_BLOCK_STEPS, _FEWEST_BLOCKS, _MAX_BLOCKS = 5, 4, 40
_MAX_ODD_SHARE = 0.05  # share of the blocks before that may be as slow as the later blocks, and vice versa
_SPREADS = 4.0  # robust deviations of blocks that a change must exceed
_FEW_SPREADS = 8.0  # the same where fewer than six steps are before the change
_ERRORS = (
    4.5  # standard errors that a shift of random steps must exceed: one healthy job in 3,000 at its best cut
)
_UNCLEAR_ERRORS = 3.0  # ... from which it may be a change: one healthy job in 40
_SURE_ERRORS = 8.0  # ... from which a small change of short steps counts, beyond the drift of hosts
_MIN_SHARE = 0.15  # of a shift of short steps: hosts drift by 12 % in a recording of a healthy job
_MEMORY_STEPS = 4  # steps after which a step is taken not to resemble it
_MAX_MEMORY = 0.25  # correlation of successive steps up to which they vary at random
_OUTLIER_SPREADS = 3.0  # robust deviations beyond which a random step is clipped
_COARSE_CUTS = 32  # cuts tried in a first pass; the second pass tries all cuts near the best
_FEWEST_BEFORE = (
    6  # steps before a change, of which each must be faster than each later step if the change is early
)
_OUTLIERS = 0.05  # share of the steps at either end that does not count in a mean
_FEWEST_OF_KIND = (
    4  # steps of a kind in each half of the job from which they are compared with their kind only
)
_OF_PART = 0.5  # share of a part's additional time by which the steps must have become longer
_GREW_SHARE = 0.1  # of the growth, from which a part of the step is listed
_CHANGES = (0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3, 0.5)  # shares of a step that min_visible_share() tries


@dataclass(frozen=True)
class Slowdown:
    """Steps take after_ns instead of before_ns (medians).

    growth_ns: of the mean step, without outliers; steps of several kinds grow by several amounts.
    host_share: share of the growth that is host time of the ranks themselves. at_ns: the moment on the clock of the
    first process; step: its number. n_steps: steps since. grew_ns: by ledger category, the parts of a step that grew.
    """

    before_ns: float
    after_ns: float
    growth_ns: float
    host_share: float
    at_ns: int
    step: int
    n_steps: int
    grew_ns: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTimes:
    """The steps of a job, (k,) each, without a last step that the end of the trace cut off; table: their cells.

    duration_ns, host_ns: median over the ranks. kind: see _kinds(). like_ns: durations as if all steps were of one
    kind. quiet_host_ns: host time of the faster half of the ranks, which late ranks do not change. n_least: the number
    of steps that a change needs on either side.
    """

    table: Cells
    number: Array
    duration_ns: Array
    kind: Array
    like_ns: Array
    host_ns: Array
    quiet_host_ns: Array
    runs_ahead: bool
    n_least: int

    @staticmethod
    def of(timeline: Timeline, table: Cells, limits: Thresholds) -> "StepTimes":
        """The steps of a table."""
        number, calls_of_cell = np.unique(table.step), table.end_row - table.first_row
        n_calls = by_group(np.searchsorted(number, table.step), calls_of_cell, len(number), medians)
        if len(number) > 1 and n_calls[-1] < n_calls[:-1].min():  # a step that is cut off has fewer calls
            table, number, n_calls = part_of(table, table.step < number[-1]), number[:-1], n_calls[:-1]
        duration = _per_step(table, timeline.interval_ns, number)
        kind = _kinds(n_calls.astype(np.int64))
        return StepTimes(
            table=table,
            number=number,
            duration_ns=duration,
            kind=kind,
            like_ns=_of_one_kind(duration, kind),
            host_ns=_per_step(table, timeline.host_ns, number),
            quiet_host_ns=_per_step(table, timeline.host_ns, number, statistic=_lower_medians),
            runs_ahead=_runs_ahead(_per_step(table, timeline.wait_ns, number)[: limits.run_ahead_steps]),
            n_least=max(-(-limits.slowdown_steps // n_steps_of_job(table, timeline)), _FEWEST_BEFORE),
        )


def _runs_ahead(wait_ns: Array) -> bool:
    """Whether hosts are fast for many steps, until their launch queues are full: a wait empties the queues again."""
    return bool(np.count_nonzero(wait_ns) * _STEPS_BETWEEN_WAITS <= len(wait_ns))


def slowdown(
    timeline: Timeline, steps: StepTimes, limits: Thresholds, *, is_whole: bool = True
) -> Slowdown | None:
    """The lasting change of the step time, if there is one; the median over the ranks is examined.

    is_whole: the steps are all steps. Steps between the late steps of a slow GPU may be slow as well, so random steps
    are examined in all steps only.
    """
    if len(steps.number) < 2 * steps.n_least:
        return None
    together = _STEPS_AHEAD if steps.runs_ahead else 1
    found = _cut_of_steps(steps, together, limits, may_vary=is_whole)
    if found is None:
        return _of_levels(timeline, steps, limits) if is_whole and together == 1 else None
    cut, summed = found
    before, after = _medians_ns(cut, summed, together)
    if not _is_enough(before, after, limits) and not _is_sure(steps, together, limits):
        return None
    whole = _summed(steps.duration_ns, together)
    kind = steps.kind if together == 1 else np.zeros(len(whole), np.int64)
    growth = _growth(whole, kind, cut) / together
    of_all_kinds = float(np.median(whole[:cut])) / together
    before, after = of_all_kinds, of_all_kinds * after / before
    cut *= together
    grown = float(np.median(steps.host_ns[cut:]) - np.median(steps.host_ns[:cut]))
    share = min(max(grown / (after - before), 0.0), 1.0)
    return _slowdown(
        timeline,
        steps,
        cut,
        before_ns=before,
        after_ns=after,
        growth_ns=growth,
        host_share=share,
    )


def min_visible_share(steps: StepTimes, limits: Thresholds) -> float:
    """The smallest share by which all steps may become longer, from the middle of the job on, so that it is reported.

    The changes are simulated on the steps of the job. They replace the difference between its halves, which may be a
    change that was not reported. 1 if only a larger change than all simulated ones shows. Shifted levels do not count:
    a factor by which one typical length becomes another hides a change.
    """
    if len(steps.number) < 2 * steps.n_least:
        return 1.0
    smallest, *others = _CHANGES
    if _is_visible(steps, smallest, limits):
        return smallest
    first = bisect_left(others, True, key=lambda share: _is_visible(steps, share, limits))
    return others[first] if first < len(others) else 1.0


def _is_visible(steps: StepTimes, share: float, limits: Thresholds) -> bool:
    """Whether slowdown() reports that all steps of the second half of the job are longer by a share."""
    together = _STEPS_AHEAD if steps.runs_ahead else 1
    half = len(steps.number) // 2
    before, after = (_trimmed_mean(part) for part in (steps.like_ns[:half], steps.like_ns[half:]))
    factor = np.ones(len(steps.number))
    factor[half:] = (1.0 + share) * min(before / max(after, 1.0), 1.0)
    slower = replace(steps, duration_ns=steps.duration_ns * factor, like_ns=steps.like_ns * factor)
    found = _cut_of_steps(slower, together, limits, may_vary=True)
    return found is not None and _is_enough(*_medians_ns(*found, together), limits)


def _medians_ns(cut: int, summed: Array, together: int) -> tuple[float, float]:
    """The median steps before and after a cut. summed: the sums of `together` steps each."""
    before, after = (float(np.median(part)) / together for part in (summed[:cut], summed[cut:]))
    return before, after


def _of_levels(timeline: Timeline, steps: StepTimes, limits: Thresholds) -> Slowdown | None:
    """The change of steps that have a few typical lengths, as with batches of several lengths; see step_levels."""
    shift = shifted_levels(steps.duration_ns, limits)
    if shift is None:
        return None
    before = float(np.median(steps.duration_ns[: shift.cut]))
    growth = (shift.factor - 1) * float(steps.duration_ns[shift.cut :].mean()) / shift.factor
    if not _is_enough(before, before * shift.factor, limits):
        return None
    grown = float(np.median(steps.host_ns[shift.cut :]) - np.median(steps.host_ns[: shift.cut]))
    return _slowdown(
        timeline,
        steps,
        shift.cut,
        before_ns=before,
        after_ns=before * shift.factor,
        growth_ns=growth,
        host_share=min(max(grown / growth, 0.0), 1.0),
    )


def part_slowdown(timeline: Timeline, steps: StepTimes, limits: Thresholds) -> Slowdown | None:
    """The lasting change of a part of each step: of the hosts' time, otherwise of the transfers."""
    return _host_slowdown(timeline, steps, limits) or _fabric_slowdown(timeline, steps, limits)


def _host_slowdown(timeline: Timeline, steps: StepTimes, limits: Thresholds) -> Slowdown | None:
    """The lasting change of the hosts' time in each step by which the steps became longer, if there is one.

    Late ranks do not change the host time of the faster half of the ranks, so their steps count as well.
    """
    return _of_part(timeline, steps, steps.quiet_host_ns, limits, host_share=1.0)


def _fabric_slowdown(timeline: Timeline, steps: StepTimes, limits: Thresholds) -> Slowdown | None:
    """The lasting change of the collectives' transfers in each step by which the steps became longer, if there is one.

    Requires GPU times. The transfers do not depend on the ranks' work, which may vary by more than the change.
    """
    first_row, transfer_ns = transfers(timeline)
    if not (transfer_ns >= 0).any():
        return None
    fabric_ns = _fabric_ns(timeline, steps, first_row=first_row, transfer_ns=transfer_ns)
    if not (fabric_ns > 0).all():
        return None
    fabric_ns = _of_one_kind(fabric_ns, steps.kind)
    return _of_part(timeline, steps, fabric_ns, limits, host_share=0.0)


def _fabric_ns(timeline: Timeline, steps: StepTimes, *, first_row: Array, transfer_ns: Array) -> Array:
    """The transfers of a rank in each step, in the mean over the ranks: float64 (k,); 0 where none is known.

    first_row, transfer_ns: by round, see transfers(). Steps in which some are unknown are taken to have as many calls
    as the typical step of the job.
    """
    table, number = steps.table, steps.number
    cell = np.maximum(np.searchsorted(table.first_row, first_row, side="right") - 1, 0)
    known = np.flatnonzero(
        (transfer_ns >= 0) & (first_row >= table.first_row[cell]) & (first_row < table.end_row[cell])
    )
    members = timeline.n_members[timeline.comm_of_round[known]] / timeline.n_processes
    step = np.searchsorted(number, table.step[cell[known]])
    spent, n_calls = (
        np.bincount(step, weights=weights, minlength=len(number))
        for weights in (members * transfer_ns[known], members)
    )
    return np.asarray(spent / np.maximum(n_calls, 1e-9) * np.median(n_calls))


def _of_part(
    timeline: Timeline, steps: StepTimes, part_ns: Array, limits: Thresholds, *, host_share: float
) -> Slowdown | None:
    """The lasting change of a part of each step by which the steps became longer, if there is one.

    part_ns: float64 (k,), by step.
    """
    if len(steps.number) < 2 * steps.n_least or steps.runs_ahead:
        return None
    cut = _change(part_ns, steps.n_least)
    before = _trimmed_mean(steps.duration_ns[:cut])
    if not _is_lasting(part_ns, cut, limits, of_ns=before):
        return None
    more = float(np.median(part_ns[cut:]) - np.median(part_ns[:cut]))
    growth, error = _growth(steps.duration_ns, steps.kind, cut), _error_of_means(steps.duration_ns, cut)
    if growth < _OF_PART * more - error or not _is_enough(before, before + more, limits):
        return None
    growth = min(growth + error, more)
    return _slowdown(
        timeline,
        steps,
        cut,
        before_ns=before,
        after_ns=before + growth,
        growth_ns=growth,
        host_share=host_share,
    )


def _cut_of_steps(
    steps: StepTimes, together: int, limits: Thresholds, *, may_vary: bool
) -> tuple[int, Array] | None:
    """The number of sums of `together` steps before the change, and the sums; None without a lasting change.

    may_vary: whether a shift of steps that vary at random counts.
    """
    summed = _summed(steps.like_ns, together)
    least = steps.n_least if together == 1 else _FEWEST_BLOCKS
    if len(summed) < 2 * least:
        return None
    cut = _change(summed, least)
    if together > 1:
        return (cut, summed) if _is_lasting(summed, cut, limits) else None
    like = _of_one_kind(steps.duration_ns, steps.kind, until=cut)
    if _is_lasting(like, cut, limits):
        return cut, like
    shift = _shift(steps.like_ns, limits) if may_vary else None
    if shift is not None and shift.n_errors >= _ERRORS:
        return shift.cut, steps.like_ns
    is_long = least > _FEWEST_BEFORE
    cut = _change(summed, _FEWEST_BEFORE if is_long else _FEWEST_BLOCKS)
    is_early = cut < least and _is_lasting(summed, cut, limits, spreads=_SPREADS if is_long else _FEW_SPREADS)
    return (cut, summed) if is_early and summed[:cut].max() < summed[cut:].min() else None


def _summed(values: Array, together: int) -> Array:
    """The sums of `together` successive values; of several, the first is the median, since the launch queue fills."""
    n = len(values) // together
    summed: Array = values[: n * together].reshape(n, together).sum(axis=1)
    if together > 1 and n:
        summed[0] = np.median(summed)
    return summed


def _kinds(n_calls: Array) -> Array:
    """The number of the kind of each step: int64 (k,). n_calls: by step.

    Steps are of one kind if they have equal numbers of calls, and the steps before them as well, since a wait for the
    GPU may end in the next step.
    """
    return np.asarray(numbered(n_calls, np.append(n_calls[:1], n_calls[:-1]))[0])


def _of_one_kind(duration_ns: Array, kind_of: Array, *, until: int | None = None) -> Array:
    """Durations of steps, as if all steps took as long as the median step of the job: float64 (k,).

    Only kinds that occur in the whole job are compared: a job whose steps get more calls at some moment has become
    slower. kind_of: by step. until: steps after it do not count in the medians, since kinds may grow by other shares.
    """
    out, middle = duration_ns.astype(np.float64), len(duration_ns) // 2
    n_kinds = int(kind_of.max(initial=-1)) + 1
    for kind in range(n_kinds) if n_kinds > 1 else ():
        here = kind_of == kind
        if min(np.count_nonzero(here[:middle]), np.count_nonzero(here[middle:])) >= _FEWEST_OF_KIND:
            counted = np.flatnonzero(here[:until])
            counted = counted if len(counted) >= _FEWEST_OF_KIND else np.flatnonzero(here)
            out[here] *= np.median(duration_ns[:until]) / max(float(np.median(duration_ns[counted])), 1.0)
    return out


def _is_enough(before_ns: float, after_ns: float, limits: Thresholds) -> bool:
    """Whether the growth is worth a report; the median over ranks and steps varies by less than a step of one rank."""
    return after_ns - before_ns >= limits.min_late_ns / 2 or after_ns >= limits.slowdown_factor * before_ns


def _is_sure(steps: StepTimes, together: int, limits: Thresholds) -> bool:
    """Whether steps that vary at random have become longer by many standard errors."""
    shift = _shift(steps.like_ns, limits) if together == 1 else None
    return shift is not None and shift.n_errors >= _SURE_ERRORS


def _slowdown(
    timeline: Timeline,
    steps: StepTimes,
    cut: int,
    *,
    before_ns: float,
    after_ns: float,
    growth_ns: float,
    host_share: float,
) -> Slowdown:
    """The slowdown from a cut of the steps on, with its moment and the parts of the steps that grew."""
    first = steps.table.first_row[steps.table.step == steps.number[cut]][0]
    return Slowdown(
        before_ns=before_ns,
        after_ns=after_ns,
        growth_ns=growth_ns,
        host_share=host_share,
        at_ns=int(timeline.ts_ns[first]),
        step=int(steps.number[cut]),
        n_steps=len(steps.number) - cut,
        grew_ns=_grown_ns(timeline, steps, cut, min_ns=_GREW_SHARE * (after_ns - before_ns)),
    )


def _growth(duration_ns: Array, kind_of: Array, cut: int) -> float:
    """By how much the mean step after a cut is longer than before, step for step of one kind.

    Kinds with few steps on either side, such as saves, are taken to grow by as much as the others.
    """
    parts = []
    for kind in np.unique(kind_of).tolist():
        before, after = (duration_ns[here][kind_of[here] == kind] for here in (slice(cut), slice(cut, None)))
        if min(len(before), len(after)) >= _FEWEST_OF_KIND:
            parts.append((len(after), _trimmed_mean(after) - _trimmed_mean(before)))
    if not parts:
        return _trimmed_mean(duration_ns[cut:]) - _trimmed_mean(duration_ns[:cut])
    return sum(n * more for n, more in parts) / sum(n for n, _ in parts)


def _trimmed_mean(values: Array) -> float:
    """The mean without the lowest and the highest values: checkpoints, evaluations."""
    low, high = np.quantile(values, (_OUTLIERS, 1 - _OUTLIERS))
    return float(values[(values >= low) & (values <= high)].mean())


def _error_of_means(values: Array, cut: int) -> float:
    """Two standard errors of the difference of the means before and after a cut."""
    return 2.0 * sum(float(part.var()) / len(part) for part in (values[:cut], values[cut:])) ** 0.5


def _is_lasting(
    values: Array, cut: int, limits: Thresholds, *, of_ns: float | None = None, spreads: float = _SPREADS
) -> bool:
    """Whether the values after the cut are larger by more than the variation of blocks, and for the first time.

    They must be larger by a share of of_ns, by default of the values before the cut.
    """
    parts = values[:cut], values[cut:]
    size = max(min(_BLOCK_STEPS, min(map(len, parts)) // _FEWEST_BLOCKS), len(values) // _MAX_BLOCKS, 1)
    before, after = (_block_medians(part, size) for part in parts)
    low, high = float(np.median(before)), float(np.median(after))
    if min(len(before), len(after)) < 2 or high - low < limits.change_share * (
        low if of_ns is None else of_ns
    ):
        return False
    middle = (low + high) / 2
    odd = (before >= middle).mean(), (after <= middle).mean()
    deviations = np.concatenate([before - low, after - high])
    spread = 1.4826 * float(np.median(np.abs(deviations)))
    return max(odd) <= _MAX_ODD_SHARE and high - low >= spreads * spread


@dataclass(frozen=True)
class Shift:
    """Steps that vary at random are longer from a cut on by a share, which is n_errors standard errors."""

    cut: int
    share: float
    n_errors: float


def unclear_shift(steps: StepTimes, limits: Thresholds) -> Shift | None:
    """A shift of steps that vary at random, which chance explains in one of 40 healthy jobs; None without one."""
    if steps.runs_ahead or len(steps.number) < 2 * steps.n_least:
        return None
    shift = _shift(steps.like_ns, limits)
    return shift if shift is not None and shift.n_errors >= _UNCLEAR_ERRORS else None


def n_steps_to_decide(shift: Shift, n_steps: int) -> int:
    """How many steps show whether a shift is a change, if it remains as large."""
    return int(np.ceil(n_steps * (_ERRORS / shift.n_errors) ** 2))


def _shift(values: Array, limits: Thresholds) -> Shift | None:
    """The cut after which steps that vary at random, as with batches of random lengths, are longer by the most errors.

    Blocks of such steps overlap with the blocks before the cut, but their means differ. Steps that resemble the step
    before (phases, drift) are not random. None where the steps do not become longer by a share that counts.
    """
    n, n_least = len(values), limits.slowdown_steps
    if n < 2 * n_least:  # too few steps for a standard error
        return None
    logs = np.log(np.maximum(values, 1.0))
    middle, spread = np.median(logs), 1.4826 * np.median(np.abs(logs - np.median(logs)))
    logs = np.clip(logs, middle - _OUTLIER_SPREADS * spread, middle + _OUTLIER_SPREADS * spread)
    cuts = np.arange(n_least, n - n_least + 1)
    total = np.cumsum(logs)
    before = total[cuts - 1] / cuts
    after = (total[-1] - total[cuts - 1]) / (n - cuts)
    squares = float((logs * logs).sum()) - cuts * before**2 - (n - cuts) * after**2
    variance = np.maximum(squares, 1e-12) / (n - 2)
    n_errors = (after - before) / np.sqrt(variance * (1 / cuts + 1 / (n - cuts)))
    best = int(np.argmax(n_errors))
    cut, more = int(cuts[best]), float(after[best] - before[best])
    left = np.concatenate([logs[:cut] - before[best], logs[cut:] - after[best]])
    if more < np.log1p(limits.change_share) or _memory(left, 1) > _MAX_MEMORY:
        return None
    weights = 1 - np.arange(1, _MEMORY_STEPS + 1) / (_MEMORY_STEPS + 1)
    longer = sum(w * _memory(left, k) for k, w in enumerate(weights.tolist(), 1))
    shift = Shift(cut, float(np.expm1(more)), float(n_errors[best]) / max(1 + 2 * longer, 1.0) ** 0.5)
    growth_ns = shift.share * float(np.median(values[:cut]))
    is_enough = growth_ns >= limits.min_late_ns / 2 or shift.share >= _MIN_SHARE
    return shift if is_enough or shift.n_errors >= _SURE_ERRORS else None


def _memory(values: Array, n_steps: int) -> float:
    """The correlation of values, whose mean is 0, with the values n_steps before."""
    return float((values[n_steps:] * values[:-n_steps]).mean()) / max(float((values * values).mean()), 1e-12)


def _block_medians(values: Array, size: int) -> Array:
    """Medians of blocks of successive values; the last block may be larger."""
    n = max(len(values) // size, 1)
    return np.array([np.median(part) for part in np.array_split(values, n)])


def _grown_ns(timeline: Timeline, steps: StepTimes, cut: int, *, min_ns: float) -> dict[str, float]:
    """By ledger category, the growth of the median rank's time per step after the cut; the largest first."""
    table, number = steps.table, steps.number
    examined = np.unique(table.process)
    examined = examined[spread_out(len(examined), _MAX_PROCESSES)]
    here = np.flatnonzero(np.isin(table.process, examined) & (table.first_row > 0))
    first, last = table.first_row[here], table.end_row[here] - 1
    here_step = np.searchsorted(number, table.step[here])
    grown = {}
    for k in range(N_CATEGORIES):
        spent = timeline.rows.column("ledger_ns", last, k).astype(np.float64)
        spent -= timeline.rows.column("ledger_ns", first - 1, k)
        each = by_group(here_step, spent, len(number), medians)
        before, after = (np.nanmedian(part) if len(part) else np.nan for part in (each[:cut], each[cut:]))
        if after - before >= min_ns:
            grown[CATEGORY_NAMES[k]] = float(after - before)
    return dict(sorted(grown.items(), key=lambda item: -item[1]))


def _per_step(
    table: Cells, value: Array, steps: Array, *, statistic: Callable[[Array], Array] = medians
) -> Array:
    """Median over the processes of a value's sum in each step: float64 (steps,)."""
    return by_group(np.searchsorted(steps, table.step), table.sums(value), len(steps), statistic)


def _lower_medians(values: Array) -> Array:
    """The median of each row, of an even number the lower of the two in the middle."""
    index = (values.shape[1] - 1) // 2
    return np.asarray(np.partition(values, index, axis=1)[:, index])


def _change(values: Array, n_least: int) -> int:
    """The cut of a sequence at which the values lie closest to the medians of the two parts."""
    ranked = np.log(np.maximum(values, 1.0))
    cuts = np.arange(n_least, len(values) - n_least + 1)

    def apart(cut: int) -> float:
        return sum(float(np.abs(part - np.median(part)).sum()) for part in (ranked[:cut], ranked[cut:]))

    stride = max(len(cuts) // _COARSE_CUTS, 1)
    best = min(cuts[::stride].tolist(), key=apart)
    return min(cuts[np.abs(cuts - best) <= stride].tolist(), key=apart)
