"""The growth of a job's steps because of the delays of some ranks: the cost, measured on the whole job.

Steps without such delays are the baseline. Slack, in a pipeline or in the queue of a GPU, is in both kinds of steps. If
hosts run ahead of their GPUs, the stretch between two releases replaces the step.

Without a baseline, three facts remain. Steps last longer by at most the delay. Steps with a longer delay last longer
only if delays are passed on. A step without delays lasts no longer than the shortest known step.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.pauses import is_usual_in_pauses, shared_pause_ns
from stallscope.diagnose.lateness.period import period_steps
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.events.layout import Array

_FEWEST_QUIET = 2
_MANY_QUIET = 10  # quiet stretches from which their own variation is known
_ERRORS = 2.0  # standard errors on either side; more where few steps show how much they vary
_OUTLIER = 3.0  # spreads beyond which a length is clipped
_COMMON = 0.1  # share of the steps from which a kind of step is common
_OTHER = 0.5  # share of a step beyond the delay from which a step is another kind of step
_MOSTLY = 0.5  # share of the stretches with delays above which they are not another kind of step
_LIKE = 2.0  # times the median up to which a delay in a step of another kind counts as similar
_SMALL = 0.1  # share of the median delay up to which a rank's own excess leaves a step quiet
_ALSO_LATE = 0.5  # share of the median delay from which a step of a named rank also counts as late
_SURE_SLOPE = 0.3  # largest error of a usable slope
_KNOWN = 0.4  # the growth over the shortest step is a measurement from this share of the delays on
_THRESHOLDS = np.arange(14) / 10  # parts of the median delay that may cost nothing
_FEWEST_FREE = 3  # degrees of freedom of a slope
_FEWEST_STEPS = 5  # steps before a release that bound the length of a step
_FAR = 5.0  # times the median delay from which a delay alone would determine a slope
_TOGETHER = 0.5  # correlation of the delays of ranks that share a reason
_MAX_QUIET = 256
_FEWEST_GAPS = 4
_FEWEST_DELAYS = 3  # delays that show what a delay costs where a part of the last delay is cut off
_REGULAR = 0.75  # share of the distances between delays that must be about multiples of a period
_STEADY = 1.02  # ratio of the lengths of steps up to which a job has not become slower
_BY_DELAYS = 0.5  # share of a change of all steps by which delays must grow to be its cause
_NORMAL = 1.1  # times the median self time up to which a warm-up step is like the others


@dataclass(frozen=True)
class Growth:
    """GPU time that ranks lost to a group of late ranks: from min_ns to max_ns.

    delay_ns: the same time if every delay had been passed on in full. is_measured: steps with and without delays, or
    with shorter and longer delays, were compared.
    """

    min_ns: float
    max_ns: float
    delay_ns: float
    is_measured: bool


@dataclass(frozen=True)
class Stretches:
    """Parts of a job in order of time, (k,) each: steps, or the time between releases if hosts run ahead of their GPUs.

    begin_ns: float64, on the common clock. n_steps: steps in it. kind: int64, equal for steps with as many calls and
    the same pauses of all ranks, before or after a change of all ranks; 0 where that is unknown.
    length_ns: float64, mean over the ranks that wait. delay_ns: float64, by named process. excess_ns: float64, by named
    process, late or not.
    is_warm: part of the warm-up. is_step: each is one step. step_at_most_ns: a step without delays lasts no longer.
    n_waiting: ranks that are not named. in_all_ns: the delays of each named process, also those outside of all
    stretches. others_ns: float64, the excess of all ranks that are not named, NaN where unknown.
    most_ns: float64, the growth by delays is at most this, inf where unknown. unhidden_ns: the longest delay where the
    start of the job may lie outside of the stretches.
    """

    begin_ns: Array
    n_steps: Array
    kind: Array
    length_ns: Array
    delay_ns: Mapping[int, Array]
    excess_ns: Mapping[int, Array]
    is_warm: Array
    is_step: bool
    step_at_most_ns: float
    n_waiting: int
    in_all_ns: Mapping[int, float]
    others_ns: Array
    most_ns: Array
    unhidden_ns: float = 0.0

    def delay_of(self, processes: Collection[int]) -> Array:
        """The longest delay of some processes in each stretch: float64 (k,)."""
        return self._largest(self.delay_ns, processes)

    def excess_of(self, processes: Collection[int]) -> Array:
        """The largest excess of some processes in each stretch: float64 (k,)."""
        return self._largest(self.excess_ns, processes)

    def _largest(self, by_process: Mapping[int, Array], processes: Collection[int]) -> Array:
        own = [by_process[process] for process in processes if process in by_process]
        return np.asarray(np.max([np.zeros(len(self.n_steps)), *own], axis=0))

    def after(self, value: Array) -> Array:
        """The larger of a value in the stretch and, for steps, in the previous step, since delays carry over."""
        return np.maximum(value, np.append(0.0, value[:-1])) if self.is_step else value

    def beyond_steps(self, process: int) -> float:
        """The share of a process's delays that exceeds its stretches without delays.

        No queue can have absorbed this share, also where a longer delay of another process hides its cost.
        """
        delay = self.delay_ns[process]
        beyond = np.maximum(delay - self.step_at_most_ns * np.maximum(self.n_steps, 1), 0.0)
        return float(beyond.sum()) / max(float(delay.sum()), 1.0)

    @property
    def by_others_ns(self) -> Array:
        """The excess of unnamed ranks beyond a typical stretch: each may be longer by that much. float64 (k,)"""
        if np.isnan(self.others_ns).all():
            return np.zeros(len(self.others_ns))
        return np.nan_to_num(np.maximum(self.others_ns - np.nanmedian(self.others_ns), 0.0), nan=0.0)

    @property
    def is_usual(self) -> Array:
        """Whether a stretch is outside the warm-up and not much shorter than the median: bool (k,)."""
        return np.asarray(~self.is_warm & (self.n_steps >= 0.5 * np.median(self.n_steps)))


@dataclass(frozen=True)
class _Estimate:
    """Growth of each stretch, float64 (k,), and the error of the sum. is_measured: see Growth."""

    min_ns: Array
    max_ns: Array
    error_ns: float
    is_measured: bool


@dataclass(frozen=True)
class Baseline:
    """Stretches without delays from rows that have been dropped, (k,) each, and the bound of a step: see Stretches."""

    n_steps: Array
    kind: Array
    length_ns: Array
    is_step: bool
    step_at_most_ns: float


def stretches(
    case: Case,
    late: Sequence[LateStep],
    baseline: Baseline | None = None,
    *,
    slow_gpus: Collection[int] = (),
) -> Stretches | None:
    """The stretches of a job. late: late steps of all named ranks. baseline: of the same job, before the rows.
    slow_gpus: processes whose late steps are of their GPUs.

    None without comparable stretches: the steps of a host that never waits do not show the time on its GPU.
    """
    parts = _stretches(case, late, slow_gpus) if late else None
    if parts is None or baseline is None or baseline.is_step != parts.is_step:
        return parts
    nothing = np.zeros(len(baseline.n_steps))
    delay, excess = (
        {process: np.append(nothing, by_step) for process, by_step in of.items()}
        for of in (parts.delay_ns, parts.excess_ns)
    )
    return replace(
        parts,
        begin_ns=np.append(nothing, parts.begin_ns),
        n_steps=np.append(baseline.n_steps, parts.n_steps),
        kind=np.append(baseline.kind, parts.kind),
        length_ns=np.append(baseline.length_ns, parts.length_ns),
        delay_ns=delay,
        excess_ns=excess,
        is_warm=np.append(nothing > 0, parts.is_warm),
        others_ns=np.append(nothing * np.nan, parts.others_ns),
        most_ns=np.append(nothing + np.inf, parts.most_ns),
        step_at_most_ns=min(parts.step_at_most_ns, baseline.step_at_most_ns),
    )


def baseline_before(
    case: Case, late: Sequence[LateStep], until_ns: float, known: Baseline | None
) -> Baseline | None:
    """The baseline with the quiet stretches before a time on the common clock, whose rows are about to be dropped.

    late: all late steps. known: the baseline before these rows.
    """
    parts = _stretches(case, late, ())
    if parts is None or (known is not None and known.is_step != parts.is_step):
        return known
    in_all = parts.delay_of(parts.delay_ns.keys())
    quiet = (in_all == 0) & (parts.after(in_all) == 0) & parts.is_usual & (parts.begin_ns < until_ns)
    new = Baseline(
        parts.n_steps[quiet], parts.kind[quiet], parts.length_ns[quiet], parts.is_step, parts.step_at_most_ns
    )
    if known is None:
        return new
    return Baseline(
        n_steps=np.append(known.n_steps, new.n_steps)[-_MAX_QUIET:],
        kind=np.append(known.kind, new.kind)[-_MAX_QUIET:],
        length_ns=np.append(known.length_ns, new.length_ns)[-_MAX_QUIET:],
        is_step=parts.is_step,
        step_at_most_ns=min(known.step_at_most_ns, new.step_at_most_ns),
    )


def _stretches(case: Case, late: Sequence[LateStep], slow_gpus: Collection[int]) -> Stretches | None:
    if len(case.table.step) < 2 or not case.waits.in_each_step:
        return None
    n_releases = len(case.waits.released_ns)
    if n_releases == 1 or (case.hosts_run_ahead and not n_releases):
        return None
    return _releases(case, late, slow_gpus) if n_releases else _steps(case, late)


def growth(
    parts: Stretches, group: Collection[int], *, is_exact: bool = True, is_linear: bool = False
) -> Growth | None:
    """The GPU time that the other ranks lost because the stretches grew by the delays of a group of ranks.

    is_exact: the sizes of the delays are exact, so that longer and shorter delays can be compared. Delays of GPUs have
    an error, and a call that empties the GPU's queue varies with the queue. is_linear: the first part of a delay is
    taken to cost as much as the rest, which shows whether delays cost anything.

    Named ranks share the growth of a stretch in which they are late together. A rank that is late for its own reason
    loses the difference to the group's delay. None if no delay of the group lies in a stretch.
    """
    own, whole = parts.delay_of(group), parts.delay_of(parts.delay_ns.keys())
    if not own.any():
        return None
    compared = _compared(parts, whole)
    if compared is None:
        compared = _bounded(parts, whole, _slope(parts, whole) if is_exact else None)
    elif is_exact:
        thresholds = _THRESHOLDS[:1] if is_linear else _THRESHOLDS
        compared = _narrowed(parts, compared, whole, thresholds)
    share, n_waiting = _shares(parts, group, compared)
    least, most, delay = (
        float((each * share * n_waiting).sum()) for each in (compared.min_ns, compared.max_ns, whole)
    )
    error = compared.error_ns * float((share * n_waiting)[own > 0].mean())
    in_all = max(parts.in_all_ns[process] for process in group if process in parts.in_all_ns)
    known_share = min(float(own.sum()) / in_all, 1.0)
    most, least = min(max(most + error, 0.0), delay), max(least - error, 0.0)
    limit = float((np.minimum(whole, parts.most_ns) * share * n_waiting).sum())
    # Delays outside of the stretches: while the launch queue fills at the start, nothing hides a delay.
    outside = min(max(in_all - float(own.sum()), 0.0), parts.unhidden_ns) * float(n_waiting[own > 0].mean())
    most = min(min(most, limit) / known_share + outside, delay / known_share)
    return Growth(min(least / known_share, most), most, delay / known_share, compared.is_measured)


def with_longer_delays(parts: Stretches, group: Collection[int], factor: float) -> Stretches:
    """The stretches with the delays of a group multiplied: the limit of the growth that they may cause."""
    return replace(
        parts,
        delay_ns={
            process: by_step * (factor if process in group else 1.0)
            for process, by_step in parts.delay_ns.items()
        },
        in_all_ns={
            process: ns * (factor if process in group else 1.0) for process, ns in parts.in_all_ns.items()
        },
    )


def without_others(parts: Stretches, process: int, *, n_least: int) -> Stretches:
    """The stretches without those in which another named process is late for a reason of its own.

    Where the process is late in fewer than n_least of the rest, all stretches, less their growth by the delays
    of the other processes.
    """
    own, length = parts.delay_ns[process], parts.length_ns
    others = [other for other, delay in parts.delay_ns.items() if not _is_together(own, delay)]
    if not others:
        return parts
    kept = parts.delay_of(others) == 0
    if np.count_nonzero(own[kept]) < n_least:
        kept, length = np.ones(len(own), bool), length - _grown_with(parts, others, own)
    delay, excess = (
        {each: by_step[kept] for each, by_step in of.items() if each not in others}
        for of in (parts.delay_ns, parts.excess_ns)
    )
    return replace(
        parts,
        begin_ns=parts.begin_ns[kept],
        n_steps=parts.n_steps[kept],
        kind=parts.kind[kept],
        length_ns=length[kept],
        delay_ns=delay,
        excess_ns=excess,
        is_warm=parts.is_warm[kept],
        others_ns=parts.others_ns[kept],
        most_ns=parts.most_ns[kept],
        in_all_ns={each: float(by_step.sum()) for each, by_step in delay.items()},
    )


def _is_together(one_ns: Array, other_ns: Array) -> bool:
    """Whether two processes are late in the same stretches by similar amounts, like the ranks of a node."""
    late_step, other = one_ns - one_ns.mean(), other_ns - other_ns.mean()
    spread = float((late_step * late_step).sum() * (other * other).sum()) ** 0.5
    return spread == 0 or float((late_step * other).sum()) >= _TOGETHER * spread


def _grown_with(parts: Stretches, others: Sequence[int], own_ns: Array) -> Array:
    """The growth of each stretch by the delays of other processes, by a linear fit: float64 (k,)."""
    delays = [own_ns, *(parts.delay_ns[process] for process in others)]
    if parts.is_step:
        delays = [column for each in delays for column in (each, np.append(0.0, each[:-1]))]
    x, n_own = np.column_stack([parts.n_steps, *delays]).astype(np.float64), 3 if parts.is_step else 2
    known = parts.is_usual & np.append(False, parts.is_usual[:-1])
    known &= parts.by_others_ns <= _FAR * max(
        float(np.median(each[each > 0])) for each in delays if each.any()
    )
    if np.count_nonzero(known) < x.shape[1] + _FEWEST_FREE:
        return np.zeros(len(own_ns))
    by, *_ = np.linalg.lstsq(x[known], parts.length_ns[known], rcond=None)
    return np.asarray(x[:, n_own:] @ np.clip(by[n_own:], 0.0, 1.0))


def _shares(parts: Stretches, group: Collection[int], estimate: _Estimate) -> tuple[Array, Array]:
    """The group's share of the delays in each stretch, and the number of ranks that waited in it: float64 (k,) each."""
    others = [process for process in parts.delay_ns if process not in group]
    own, other_delay = (parts.delay_of(each) for each in (group, others))
    if parts.is_step:  # if no rank is late, the delay is left from the step before
        is_left = own + other_delay == 0
        own, other_delay = (np.where(is_left, np.append(0.0, each[:-1]), each) for each in (own, other_delay))
    share = np.divide(own, own + other_delay, out=np.zeros_like(own), where=own > 0)
    grown = np.maximum(estimate.max_ns, 1.0)
    waited = [np.clip(1.0 - parts.delay_ns[process] / grown, 0.0, 1.0) for process in others]
    return share, parts.n_waiting + np.sum([np.zeros_like(own), *waited], axis=0)


def _compared(parts: Stretches, delay_ns: Array) -> _Estimate | None:
    """The growth compared with stretches without delays; None with too few of them."""
    quiet = _quiet(parts, float(np.median(delay_ns[delay_ns > 0])))
    n_quiet = np.count_nonzero(quiet)
    if n_quiet < _FEWEST_QUIET:
        return None
    usual, spread, is_comparable = _usual(parts, quiet, float(np.median(delay_ns[delay_ns > 0])))
    if is_comparable.any():  # a kind of step that varies by more than the delays does not show them
        is_comparable &= spread <= max(spread[is_comparable].min(), np.median(delay_ns[delay_ns > 0]))
    if n_quiet < _MANY_QUIET:  # a few steps do not show how much steps vary
        spread = np.maximum(spread, _spread_of_others(parts, np.median(delay_ns[delay_ns > 0])))
    spread_ns, is_hit = spread * parts.n_steps, (parts.after(delay_ns) > 0) & ~quiet
    grown = parts.length_ns - usual * parts.n_steps
    is_other = grown > parts.after(delay_ns) + _OTHER * usual * parts.n_steps
    compared = is_hit & is_comparable
    if not compared.any():
        return None
    if (
        is_other[compared].mean() > _MOSTLY
    ):  # delays that show only a part of themselves on the host, as a slow GPU's
        is_other[:] = False
    is_other |= ~is_comparable
    grown = np.clip(grown, -_OUTLIER * spread_ns, parts.after(delay_ns) + _OUTLIER * spread_ns)
    grown[~is_hit] = 0.0
    least, most = _without_other_kinds(grown, delay_ns, is_hit & is_other)
    is_alike = is_hit & ~is_other
    more_ns = _more_of_others(parts, is_alike, quiet, max_ns=parts.after(delay_ns) + _OUTLIER * spread_ns)
    least, most = least - is_alike * max(more_ns, 0.0), most + is_alike * max(-more_ns, 0.0)
    n = float(parts.n_steps[is_hit].sum()) / max(float(parts.n_steps[quiet].mean()), 1.0)
    error = float((spread_ns[is_hit] ** 2).mean()) ** 0.5 if is_hit.any() else 0.0
    error *= (n + n * n / n_quiet) ** 0.5 * (_ERRORS + 5.0 / (n_quiet - 1))
    return _Estimate(least, most, error, True)


def _spread_of_others(parts: Stretches, max_ns: float) -> float:
    """How much steps vary because of ranks that are not named. max_ns: the part of their excess that counts."""
    known = parts.others_ns[~np.isnan(parts.others_ns) & parts.is_usual]
    return float(np.minimum(known, max_ns).std()) if len(known) else 0.0


def _narrowed(parts: Stretches, compared: _Estimate, delay_ns: Array, thresholds: Array) -> _Estimate:
    """The comparison with quiet stretches, together with fits of the delays where these are less uncertain.

    The range that both allow; where they contradict each other, the range from the lower to the higher.
    """
    near = _is_near(delay_ns)
    whole_ns, n_hit = float(delay_ns[near].sum()), np.count_nonzero(delay_ns)
    error_ns = compared.error_ns * np.count_nonzero(delay_ns[near]) / n_hit
    fitted = _by_fits(parts, delay_ns, thresholds)
    if fitted is None or fitted[1] - fitted[0] >= 2 * error_ns:
        return compared
    least = max(float(compared.min_ns[near].sum()) - error_ns, 0.0)
    most = min(float(compared.max_ns[near].sum()) + error_ns, whole_ns)
    ends = [max(least, fitted[0]), min(most, fitted[1])]
    if ends[0] > ends[1]:
        ends = [min(least, fitted[0]), max(most, fitted[1])]
    least_ns, most_ns = (
        np.where(near, delay_ns * (end / whole_ns), by_step)
        for end, by_step in zip(ends, (compared.min_ns, compared.max_ns), strict=True)
    )
    return _Estimate(least_ns, most_ns, compared.error_ns - error_ns, True)


def _by_fits(parts: Stretches, delay_ns: Array, thresholds: Array) -> tuple[float, float] | None:
    """The growth of all stretches by delays that are not far longer than the median delay, at least and at most, by
    fits in which each delay costs its part beyond a threshold.

    A queue, or other ranks with more work, absorb the first part of a delay. Thresholds that fit about as well as the
    best threshold count, and so does the lowest threshold: a few steps do not show which part is absorbed.
    """
    median_ns, near = float(np.median(delay_ns[delay_ns > 0])), _is_near(delay_ns)
    fits = []
    for threshold_ns in (thresholds * median_ns).tolist():
        beyond = np.where(near, np.maximum(delay_ns - threshold_ns, 0.0), 0.0)
        fit = _fit(parts, delay_ns, beyond) if beyond.any() else None
        if fit is not None and fit.is_possible:
            whole = float(beyond.sum())
            slopes = (min(max(fit.slope + sign * fit.error, 0.0), 1.0) for sign in (-1, 1))
            fits.append((fit.squares, fit.n_free, *(slope * whole for slope in slopes)))
    if not fits:
        return None
    squares, n_free, *_ = min(fits)
    good = [ends for each, _, *ends in fits if each <= squares * (1 + _ERRORS**2 / n_free)]
    good.append(list(fits[0][2:]))
    return min(low for low, _ in good), max(high for _, high in good)


def _more_of_others(parts: Stretches, is_hit: Array, quiet: Array, *, max_ns: Array) -> float:
    """By how much later unnamed ranks are in a stretch with delays than in a quiet stretch, on average.

    Each stretch may have become longer by all of it. max_ns: float64 (k,), the part of a stretch's length that counts.
    """
    typical_ns = float(np.median(max_ns[is_hit])) if is_hit.any() else 0.0
    others = np.minimum(parts.others_ns, np.where(is_hit, max_ns, typical_ns))
    with_delay, without = (others[each & ~np.isnan(others)] for each in (is_hit, quiet))
    return float(with_delay.mean() - without.mean()) if len(with_delay) and len(without) else 0.0


def _usual(parts: Stretches, quiet: Array, typical_ns: float) -> tuple[Array, Array, Array]:
    """How long a step of each stretch lasts without delays, and how much that varies: float64 (k,) each; and whether
    there are enough quiet stretches of its kind: bool (k,). typical_ns: a delay.
    """
    step = parts.length_ns / np.maximum(parts.n_steps, 1)
    usual, spread = np.empty((2, len(step)))
    is_comparable = np.zeros(len(step), bool)
    for kind in np.unique(parts.kind).tolist():
        here = parts.kind == kind
        is_comparable[here] = np.count_nonzero(quiet & here) >= _FEWEST_QUIET
        of_kind = quiet & here if is_comparable[here].all() else quiet
        usual[here], spread[here] = _typical(
            step[of_kind], typical_ns / max(float(parts.n_steps[of_kind].mean()), 1.0)
        )
    return usual, spread, is_comparable


def _typical(values: Array, more_ns: float) -> tuple[float, float]:
    """The mean of values without outliers, and their spread.

    more_ns: values above the median are outliers from this excess, as in stretches with delays. A step that is longer
    by less is as frequent with a delay as without.
    """
    usual = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - usual)))
    cut_off = np.clip(values, usual - _OUTLIER * spread, usual + _OUTLIER * spread + more_ns)
    return float(cut_off.mean()), max(spread, float(cut_off.std()))


def _without_other_kinds(grown: Array, delay_ns: Array, is_other: Array) -> tuple[Array, Array]:
    """The growth at least and at most: of a save or a validation nothing, and the whole delay if it is like the others.

    The pause may hide the delay, or last longer by all of it.
    """
    alike = (delay_ns > 0) & ~is_other
    if not is_other.any() or not alike.any():
        return grown, grown
    is_like = (delay_ns > 0) & (delay_ns <= _LIKE * np.median(delay_ns[alike]))
    return np.where(is_other, 0.0, grown), np.where(is_other, np.where(is_like, delay_ns, 0.0), grown)


def _quiet(parts: Stretches, typical_ns: float) -> Array:
    """Stretches without delays of named ranks: bool (k,). Stretches next to delays are included only without others."""
    named = parts.delay_ns.keys()
    in_all = parts.delay_of(named)
    free = (in_all == 0) & parts.is_usual
    apart = free & (parts.after(in_all) == 0)
    even = apart & (parts.excess_of(named) <= _SMALL * typical_ns)
    return next((each for each in (even, apart) if np.count_nonzero(each) >= _FEWEST_QUIET), free)


def _bounded(parts: Stretches, delay_ns: Array, slope: tuple[float, float] | None) -> _Estimate:
    """Without stretches to compare with: at most the delays, and at least what steps last beyond the shortest, or what
    longer delays make steps last beyond those with a typical delay.
    """
    most, near = delay_ns.copy(), _is_near(delay_ns)
    length_ns = parts.length_ns - parts.by_others_ns
    least = np.clip(length_ns - parts.step_at_most_ns * parts.n_steps, 0.0, most)
    least = np.maximum(least, np.clip(_beyond_near(parts, near, length_ns), 0.0, most))
    if slope is not None and least[near].sum() > sum(slope) * most[near].sum():
        slope = None  # the steps grew by more than the slope allows: another time varies with the delays
    if slope is not None:
        most[near] *= min(max(sum(slope), 0.0), 1.0)
        sure = max(slope[0] - slope[1], 0.0) * (delay_ns - np.median(delay_ns[delay_ns > 0]))
        least = np.minimum(np.maximum(least, np.where(near, sure, 0.0)), most)
    is_measured = slope is not None and slope[1] <= _SURE_SLOPE
    return _Estimate(least, most, 0.0, is_measured or least.sum() >= _KNOWN * most.sum())


def _is_near(delay_ns: Array) -> Array:
    """Whether a delay is not far longer than the median delay: bool (k,). Fits hold for these delays only."""
    return np.asarray(delay_ns <= _FAR * np.median(delay_ns[delay_ns > 0]))


def _beyond_near(parts: Stretches, near: Array, length_ns: Array) -> Array:
    """How much longer stretches with far longer delays last than other stretches of their kind: float64 (k,), 0 for
    these others and where there are too few. A step without delays lasts no longer than a step with a short delay.
    """
    step = length_ns / np.maximum(parts.n_steps, 1)
    out, usual = np.zeros(len(step)), near & parts.is_usual
    for kind in np.unique(parts.kind[~near]).tolist():
        others = step[usual & (parts.kind == kind)]
        if len(others) >= _FEWEST_QUIET:
            here = ~near & (parts.kind == kind)
            out[here] = length_ns[here] - float(np.median(others)) * parts.n_steps[here]
    return out


@dataclass(frozen=True)
class _Fit:
    """A linear fit of the stretches' lengths to delays: the growth for each ns, its error, the sum of the squares of
    the deviations, and the degrees of freedom.
    """

    slope: float
    error: float
    squares: float
    n_free: int

    @property
    def is_possible(self) -> bool:
        """Whether a ns of delay may cost at most a ns."""
        return self.slope - self.error <= 1.0


def _slope(parts: Stretches, delay_ns: Array) -> tuple[float, float] | None:
    """The growth of stretches for each ns of delay, and its error.

    A queue absorbs the first part of a delay. So the mean cost of a ns is at most the cost of the last ns.
    """
    fit = _fit(parts, delay_ns, delay_ns)
    return (fit.slope, fit.error) if fit is not None and fit.is_possible else None


def _fit(parts: Stretches, delay_ns: Array, beyond_ns: Array) -> _Fit | None:
    """The fit of the lengths of typical stretches to beyond_ns, the part of each delay that may cost time."""
    known = parts.is_usual & np.append(False, parts.is_usual[:-1])
    far_ns = _FAR * np.median(delay_ns[delay_ns > 0])
    known &= (parts.after(delay_ns) <= far_ns) & (parts.by_others_ns <= far_ns)
    delays = [beyond_ns, np.append(0.0, beyond_ns[:-1])] if parts.is_step else [beyond_ns]
    kinds = [parts.n_steps * (parts.kind == kind) for kind in np.unique(parts.kind[known])]
    x, y = np.column_stack([*kinds, *delays])[known].astype(np.float64), parts.length_ns[known]
    n_free = len(y) - x.shape[1]
    if n_free < _FEWEST_FREE or np.linalg.matrix_rank(x) < x.shape[1]:
        return None
    by, *_ = np.linalg.lstsq(x, y, rcond=None)
    of_delay = np.array([0.0] * len(kinds) + [1.0] * len(delays))
    squares = float(((y - x @ by) ** 2).sum())
    variance = squares / n_free * float(of_delay @ np.linalg.inv(x.T @ x) @ of_delay)
    return _Fit(float(of_delay @ by), variance**0.5 * (_ERRORS + 5.0 / n_free), squares, n_free)


def _steps(case: Case, late: Sequence[LateStep]) -> Stretches:
    """Each step, from the first arrival of a rank in it to its first arrival in the next step.

    Steps without records of a named rank are left out: its agent attached late, or ended, and its delays are unknown.
    """
    table, n = case.table, int(case.table.step.max()) + 1
    named = sorted({late_step.process for late_step in late})
    is_named = np.isin(np.arange(case.timeline.n_processes), named)
    start = case.timeline.ts_ns[table.first_row]
    length = np.append(np.diff(start), 0)
    is_known = np.append((np.diff(table.process) == 0) & (np.diff(table.step) == 1), False)
    is_known &= ~case.timeline.is_first[table.first_row]
    if not is_named.all():
        is_known &= ~is_named[table.process]
    n_known = np.bincount(table.step[is_known], minlength=n)
    total = np.bincount(table.step[is_known], weights=length[is_known], minlength=n)
    n_recorded = np.bincount(table.step[is_named[table.process]], minlength=n)
    kept, n_calls = (n_known > 0) & (n_recorded == len(named)), np.zeros(n, np.int64)
    np.maximum.at(n_calls, table.step[is_known], (table.end_row - table.first_row)[is_known])
    is_warm = np.arange(n) < int(case.judged.step.min(initial=n))
    pause_ns = shared_pause_ns(table, case.pace.min_ns, case.programs.program)
    paused = _paused(table, pause_ns, n)
    is_normal = _is_normal(table, n)
    delay, excess = _by_named(case, late, named, is_warm=is_warm & ~is_normal, pause_ns=pause_ns)
    for process, own in excess.items():  # a single long delay has a verdict of its own
        kept &= (own < case.limits.one_off_ns) | (delay[process] > 0)
    kept &= ~_is_cut_off(kept, np.sum([np.zeros(n), *delay.values()], axis=0))
    is_after = np.zeros(n, bool)
    if _may_have_changed(total[kept] / n_known[kept]):
        is_after = _after_change(case, np.max([np.zeros(n), *delay.values()], axis=0))
    begin_ns = np.full(n, np.inf)
    np.minimum.at(begin_ns, table.step, case.arrival_ns[table.first_row])
    parts = Stretches(
        begin_ns=begin_ns[kept],
        n_steps=np.ones(int(kept.sum())),
        kind=(8 * n_calls + 4 * is_after + 2 * paused + np.append(paused[1:], False))[kept],
        length_ns=total[kept] / n_known[kept],
        delay_ns={process: each[kept] for process, each in delay.items()},
        excess_ns={process: each[kept] for process, each in excess.items()},
        is_warm=is_warm[kept],
        is_step=True,
        step_at_most_ns=np.inf,
        n_waiting=case.timeline.n_processes - len(named),
        in_all_ns={process: float(each.sum()) for process, each in delay.items()},
        others_ns=_of_others(table, is_named, n)[kept],
        most_ns=np.full(int(kept.sum()), np.inf),
    )
    return replace(parts, step_at_most_ns=_shortest_warm_up(parts, is_normal[kept]))


def _may_have_changed(length_ns: Array) -> bool:
    """Whether the shorter steps are longer in the last third than in the first: a search takes far longer."""
    third = len(length_ns) // 3
    if third < _FEWEST_FREE:
        return False
    first, last = (float(np.quantile(part, 0.25)) for part in (length_ns[:third], length_ns[-third:]))
    return last > _STEADY * first


def _after_change(case: Case, delay_ns: Array) -> Array:
    """Whether each step follows a change of all ranks that the delays did not cause: bool (n,).

    Steps before it do not show how long later steps last without delays. Delays cause a change if they grow with it.
    delay_ns: float64 (n,), the longest delay of a named rank.
    """
    number, first = np.arange(len(delay_ns)), int(case.judged.step.min(initial=len(delay_ns)))
    if case.change is None:
        return np.zeros(len(delay_ns), bool)
    is_after = number >= case.change.step
    grown_ns = float(delay_ns[is_after].mean() - delay_ns[~is_after & (number >= first)].mean())
    return is_after & (grown_ns < _BY_DELAYS * case.change.growth_ns)


def _of_others(table: Cells, is_named: Array, n: int) -> Array:
    """The excess of all processes that are not named in each step: float64 (n,)."""
    others = ~is_named[table.process]
    excess_ns = np.maximum(table.whole_excess_ns[others], 0.0)
    return np.bincount(table.step[others], weights=excess_ns, minlength=n)


def _is_cut_off(kept: Array, delay_ns: Array) -> Array:
    """Whether the trace ends with the step in which a delay begins, one of several: bool (n,).

    A part of its growth may lie in the next step, whose length is unknown.
    """
    out = np.zeros(len(kept), bool)
    last = int(np.flatnonzero(kept)[-1]) if kept.any() else 0
    if kept.any() and np.count_nonzero(delay_ns[:last]) >= _FEWEST_DELAYS:
        out[last] = delay_ns[last] > 0
    return out


def _paused(table: Cells, pause_ns: Array, n: int) -> Array:
    """Whether all ranks pause in each step, as for a checkpoint: bool (n,).

    The pause may lie before the first arrival of the step: then the step before lasts longer.
    """
    return np.asarray(np.bincount(table.step[pause_ns > 0], minlength=n) > 0)


def _by_named(
    case: Case, late: Sequence[LateStep], named: Sequence[int], *, is_warm: Array, pause_ns: Array
) -> tuple[dict[int, Array], dict[int, Array]]:
    """The delay and the excess of each named process in each step.

    The delay of a late step lasts until its end: a step with several waits has delays after the largest lateness.
    is_warm: bool (n,), warm-up steps in which hosts are slower than later.
    A step with half of the process's median delay also counts as late, although no verdict is based on it. In a pause
    of all ranks it counts if it exceeds the differences of ranks in pauses, or if it is the turn of a periodic delay.
    """
    table = case.table
    delay, excess = ({process: np.zeros(len(is_warm)) for process in named} for _ in range(2))
    for late_step in late:
        delay[late_step.process][late_step.step] = max(
            delay[late_step.process][late_step.step], late_step.late_ns, late_step.excess_ns
        )
    for process in named:
        here = np.arange(*np.searchsorted(table.process, [process, process + 1]).tolist())
        process_delay, own = delay[process], excess[process]
        own[table.step[here]] = np.maximum(table.excess_ns[here], 0.0)
        typical = float(np.median(process_delay[process_delay > 0])) if process_delay.any() else np.inf
        is_large = (table.excess_ns[here] >= _ALSO_LATE * typical) & ~is_warm[table.step[here]]
        large = here[is_large & (table.excess_ns[here] < case.limits.one_off_ns)]
        is_late = table.step[large[~is_usual_in_pauses(table, pause_ns, large, limits=case.limits)]]
        process_delay[is_late] = np.maximum(process_delay[is_late], own[is_late])
        late_cells = here[process_delay[table.step[here]] > 0]
        until_end = table.step[late_cells]
        process_delay[until_end] = np.maximum(process_delay[until_end], table.whole_excess_ns[late_cells])
        process_delay[_in_turn(process_delay, table.step[here[pause_ns[here] > 0]])] = typical
    return delay, excess


def _in_turn(delay_ns: Array, pauses: Array) -> Array:
    """The pauses without a known delay that are the turn of a periodic delay: int64, steps.

    A delay at the end of a step may show in the next step, so the turn may be off by a step.
    """
    steps = np.flatnonzero(delay_ns)
    period = _period(steps, delay_ns[steps])
    if period is None:
        return pauses[:0]
    inside = pauses[(pauses > steps[0]) & (pauses < steps[-1] + period) & (delay_ns[pauses] == 0)]
    near = inside[np.abs(inside[:, None] - steps).min(axis=1, initial=2) > 1]
    before, after = (np.abs(near[:, None] + k * period - steps).min(axis=1, initial=2) <= 1 for k in (-1, 1))
    return near[before & (after | (near + period > steps[-1]))]


def _period(steps: Array, delay_ns: Array) -> int | None:
    """The distance at which most delays return, give or take a step; None without such a distance above 2 steps."""
    if (period := period_steps(steps, delay_ns)) is not None or not len(steps):
        return period
    gaps = np.diff(steps[delay_ns >= _ALSO_LATE * np.median(delay_ns)])
    values, counts = np.unique(gaps, return_counts=True)
    if len(gaps) < _FEWEST_GAPS or values[counts.argmax()] <= 2:
        return None
    usual = int(values[counts.argmax()])
    off = np.abs(gaps - usual * np.maximum(np.round(gaps / usual), 1))
    return usual if float(np.mean(off <= 1)) >= _REGULAR else None


def _is_normal(table: Cells, n: int) -> Array:
    """Whether the hosts' own time in each step and in the next step is typical: bool (n,)."""
    count = np.bincount(table.step, minlength=n)
    own = np.bincount(table.step, weights=table.self_ns, minlength=n) / np.maximum(count, 1)
    is_normal = own <= _NORMAL * np.median(own[count > 0])
    return np.asarray(is_normal & np.append(is_normal[1:], False))


def _shortest_warm_up(parts: Stretches, is_normal: Array) -> float:
    """An upper bound of a step without delays: a warm-up step in which hosts are as fast as later.

    Of jobs with several common kinds of steps, the bound of the longest kind; inf if it is unknown for one of them.
    """
    named = parts.delay_ns.keys()
    sizes = [np.median(each[each > 0]) for each in parts.delay_ns.values() if each.any()]
    typical = float(np.median(sizes)) if sizes else 0.0
    is_free = parts.is_warm & is_normal & (parts.after(parts.excess_of(named)) <= _SMALL * typical)
    kinds, n_of_kind = np.unique(parts.kind[~parts.is_warm], return_counts=True)
    common = kinds[n_of_kind >= _COMMON * n_of_kind.sum()].tolist()
    bounds = [float(parts.length_ns[is_free & (parts.kind == kind)].min(initial=np.inf)) for kind in common]
    return max(bounds, default=np.inf)


def _releases(case: Case, late: Sequence[LateStep], slow_gpus: Collection[int]) -> Stretches:
    """The time from each release to the next, for hosts that run ahead of their GPUs."""
    when, n_steps = case.waits.released_ns, np.diff(case.waits.released_in)
    delay = {late_step.process: np.zeros(len(n_steps)) for late_step in late}
    in_all = dict.fromkeys(delay, 0.0)
    for late_step in late:
        k = int(np.searchsorted(when, case.arrival_ns[late_step.peak_row], side="right")) - 1
        in_all[late_step.process] += late_step.delay_ns
        if 0 <= k < len(n_steps):
            delay[late_step.process][k] += late_step.delay_ns
    most_ns = _most_between_releases(case, sorted(delay))
    for process in delay.keys() & set(slow_gpus):  # a slow GPU has work all the time
        most_ns[delay[process] > 0] = np.inf
    hosts = [late_step for late_step in late if late_step.process not in slow_gpus]
    return Stretches(
        begin_ns=when[:-1].astype(np.float64),
        n_steps=n_steps,
        kind=np.zeros(len(n_steps), np.int64),
        length_ns=np.diff(when).astype(np.float64),
        delay_ns=delay,
        excess_ns={},
        is_warm=np.zeros(len(n_steps), bool),
        is_step=False,
        step_at_most_ns=_shortest_before_release(case),
        n_waiting=case.timeline.n_processes - len(delay),
        in_all_ns=in_all,
        others_ns=np.full(len(n_steps), np.nan),
        most_ns=most_ns,
        unhidden_ns=max((each.delay_ns for each in hosts), default=0.0),
    )


def _most_between_releases(case: Case, named: Sequence[int]) -> Array:
    """By stretch between two releases, a limit of its growth by the delays of some processes: float64 (k,).

    A GPU that is never without work would have needed the same time. It lacks work until the last rank has enqueued the
    first step after a release, and whenever its queue runs empty. A step needs at least the time from the end of a
    step's calls on the last rank to the release, divided by the steps in between and this step itself. The time in
    which the other ranks enqueue the first step is not a delay.
    """
    when, released_in = case.waits.released_ns.astype(np.float64), case.waits.released_in
    table, n = case.table, int(case.table.step.max()) + 2
    is_named = np.isin(table.process, named)
    last, of_others = (np.full(n, -np.inf) for _ in range(2))
    arrival = case.arrival_ns[table.end_row - 1].astype(np.float64)
    np.maximum.at(last, table.step, arrival)
    np.maximum.at(of_others, table.step[~is_named], arrival[~is_named])
    out = np.full(len(when) - 1, np.inf)
    for k, (begin, end) in enumerate(zip(released_in[:-1].tolist(), released_in[1:].tolist(), strict=True)):
        steps = np.arange(max(begin, 0), min(end, n))
        steps = steps[last[steps] > when[k]]
        if not len(steps):
            continue
        shortest = np.maximum(when[k + 1] - last[steps], 0.0) / (end - steps)
        first = max(of_others[steps[0]] - when[k], 0.0)
        length = when[k + 1] - when[k]
        out[k] = max(length - first - (end - begin) * float(shortest.min()), 0.0)
    return out


def _shortest_before_release(case: Case) -> float:
    """An upper bound of a step from the end of a step's calls on the last rank to the next release.

    A GPU does no work before it is enqueued.
    """
    table, when, released_in = case.judged, case.waits.released_ns, case.waits.released_in
    number, at = np.unique(table.step, return_inverse=True)
    ended = np.full(len(number), np.iinfo(np.int64).min)
    np.maximum.at(ended, at, case.arrival_ns[table.end_row - 1])
    following = np.searchsorted(released_in, number, side="right")
    inside = following < len(when)
    n_left = released_in[following[inside]] - number[inside] - 1
    bound = (when[following[inside]] - ended[inside]) / np.maximum(n_left, 1)
    return float(bound[n_left >= _FEWEST_STEPS].min(initial=np.inf))
