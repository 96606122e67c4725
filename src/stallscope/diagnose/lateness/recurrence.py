"""Ranks whose late steps recur more often than chance allows: these ranks are named."""

from collections.abc import Container
from math import exp, lgamma, log, log1p

import numpy as np

from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.together import companions
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.layout import Array

_NEGLIGIBLE = 1e-12  # a series ends at a term below this share of its sum
_SIMILAR = 0.2  # a delay is similar to another delay from this share of its length
_SEVERAL = 2
_MARGIN = (
    1.25  # times the threshold of a late step that delays on the CPU must reach if only some steps are late
)
_AMONG_OTHERS = 15  # divisor of the allowed chance if other ranks are late as well


def recurring(
    late_steps: list[LateStep],
    n_processes: int,
    *,
    min_ns: float,
    limits: Thresholds,
    node: Array | None = None,
    seen: Array | None = None,
    has_states: bool = True,
) -> dict[int, list[LateStep]]:
    """The processes to name, each with its late steps; its one-off delays are left out (see one_offs()).

    One-off delays of other ranks count unless they are far longer: the candidate may have had such delays by chance.
    min_ns: the threshold of late steps without a threshold of their own, see Pace. node: int64 (n_processes,), UNKNOWN
    for processes that have ended: the ranks of nodes that are late together count as one event. seen: see companions().
    A process that a signal stopped again and again is named however late the others are. has_states: whether time
    ledgers show if a process was off the CPU; delays on the CPU must exceed the threshold by a margin. Delays that are
    far longer than all other delays are another fault than the short delays: they are also tested by themselves.
    """

    def of(delays: list[LateStep]) -> dict[int, list[LateStep]]:
        return _recurring(
            delays, n_processes, min_ns=min_ns, limits=limits, node=node, seen=seen, has_states=has_states
        )

    named = of(late_steps)
    far_longer = _far_longer(late_steps, limits)
    if not far_longer:
        return named
    long_ids = {id(late) for late in far_longer}
    long = of(far_longer)
    short = of([late for late in late_steps if id(late) not in long_ids]) if long else {}
    for process, delays in long.items():
        named[process] = [*delays, *short.get(process, [])]
    return dict(sorted(named.items()))


def _far_longer(late_steps: list[LateStep], limits: Thresholds) -> list[LateStep]:
    """The delays above the widest gap between the sizes of all delays; empty without a gap of the factor of one-off
    delays. One-off delays are left out.
    """
    one_off_ids = {id(late) for late in one_offs(late_steps, limits.one_off_ns, limits)}
    delays = sorted(
        (late for late in late_steps if id(late) not in one_off_ids), key=lambda late: late.excess_ns
    )
    size = np.array([late.excess_ns for late in delays])
    if len(size) < limits.min_late_steps:
        return []
    share = size[:-1] / np.maximum(size[1:], 1.0)
    widest = int(np.argmin(share))
    return delays[widest + 1 :] if share[widest] < _SIMILAR else []


def _recurring(
    late_steps: list[LateStep],
    n_processes: int,
    *,
    min_ns: float,
    limits: Thresholds,
    node: Array | None,
    seen: Array | None,
    has_states: bool,
) -> dict[int, list[LateStep]]:
    """The processes to name among delays of one population, see recurring()."""
    one_off_ids = {id(late) for late in one_offs(late_steps, limits.one_off_ns, limits)}
    is_once = np.array([id(late) in one_off_ids for late in late_steps], bool)
    process = np.array([late.process for late in late_steps], np.int64)
    step = np.array([late.step for late in late_steps], np.int64)
    size = np.array([late.excess_ns for late in late_steps])
    beyond = size / np.array([late.threshold_ns or min_ns for late in late_steps])
    is_usual = np.array([late.is_usual for late in late_steps], bool)
    is_stopped = np.array([late.is_stopped for late in late_steps], bool)
    is_blocked = np.array([late.is_blocked for late in late_steps], bool)
    n_recurring = np.bincount(process[~is_once], minlength=n_processes)
    named = {}
    for candidate in np.flatnonzero(n_recurring >= limits.min_late_steps).tolist():
        own = np.flatnonzero((process == candidate) & ~is_once)
        if np.count_nonzero(is_stopped[own]) >= limits.min_late_steps:
            named[candidate] = [late_steps[i] for i in own.tolist()]
            continue
        median = float(np.median(size[own]))
        comparable = (size >= 0.5 * median) & (~is_once | (_SIMILAR * size <= median))
        comparable[(process == candidate) & is_once] = False
        times = float(np.median(beyond[own]))
        is_clear = times >= limits.clear_factor and 2 * is_usual[own].sum() <= len(own)
        counts = n_events(
            process[comparable],
            step[comparable],
            each_counts=is_clear,
            n_processes=n_processes,
            limits=limits,
        )
        is_marginal = has_states and not is_clear and times < _MARGIN
        if is_marginal and 2 * is_blocked[own].sum() < len(own):
            first, last = seen[candidate] if seen is not None else (step.min(), step.max())
            if not _is_in_most_steps(step[own], int(first), int(last), limits):
                continue  # the largest differences of a slower host
        n_own = int(counts[candidate])
        enough = limits.min_late_steps if is_clear else limits.min_unclear_steps
        if n_own < enough:
            continue
        is_sure = beyond_chance(n_own, np.delete(counts, candidate), limits.chance)
        if not is_sure and node is not None:
            mates = companions(candidate, process[comparable], step[comparable], node, seen=seen)
            others = np.delete(counts, [candidate, *mates.tolist()])
            is_sure = len(mates) > 0 and len(others) > 0 and beyond_chance(n_own, others, limits.chance)
        if is_sure:
            named[candidate] = [late_steps[i] for i in own.tolist()]
    return named


def _is_in_most_steps(steps: Array, first: int, last: int, limits: Thresholds) -> bool:
    """Whether late steps are most steps of a trace, or nearly all steps from some moment on, as a growing delay.

    first, last: the first and the last step of the process.
    """
    if len(steps) >= limits.steady_share * (last - first + 1):
        return True
    steps = np.sort(steps)
    n_since = len(steps) - np.arange(len(steps))
    is_dense = n_since >= limits.even_share * (last - steps + 1)
    return bool((is_dense & (n_since >= 2 * limits.steady_steps)).any())


def with_unproven_delays(
    late_steps: list[LateStep],
    named: dict[int, list[LateStep]],
    *,
    min_ns: float,
    long_ns: float,
    costly_ns: float,
    limits: Thresholds,
) -> dict[int, list[LateStep]]:
    """Processes that are not named although they have several clear late steps, a late step of at least long_ns, or
    several late steps of at least costly_ns in all in which no other process is as late.

    The late steps of the other ranks, or too few late steps, make a coincidence possible.
    """
    own: dict[int, list[LateStep]] = {}
    for step in late_steps:
        if step.process not in named and not step.is_usual:
            own.setdefault(step.process, []).append(step)
    second_ns, long_ns = _second_ns(late_steps), max(long_ns, limits.one_off_ns)
    unproven: dict[int, list[LateStep]] = {}
    for process, late in own.items():
        clear = [step for step in late if step.excess_ns >= limits.clear_factor * min_ns]
        alone = [step for step in late if second_ns[step.step] < _SIMILAR * step.excess_ns]
        if len(clear) >= limits.min_late_steps or any(step.excess_ns >= long_ns for step in clear):
            unproven[process] = clear
        elif len(alone) >= _SEVERAL and sum(step.excess_ns for step in alone) >= costly_ns:
            unproven[process] = alone
    return unproven


def _second_ns(late_steps: list[LateStep]) -> dict[int, float]:
    """By step, the second largest excess of a process; 0 where only one is late."""
    sizes: dict[int, list[float]] = {}
    for late in late_steps:
        sizes.setdefault(late.step, [0.0]).append(late.excess_ns)
    return {step: sorted(own)[-2] for step, own in sizes.items()}


def n_events(
    process: Array, step: Array, *, each_counts: bool, n_processes: int, limits: Thresholds
) -> Array:
    """The number of independent delays of each process: int64 (n_processes,).

    Each clear late step counts (each_counts). The speed of hosts drifts and stays low for some steps: a run of small
    late steps counts once, and more for every further `steady_steps` of them.
    """
    if each_counts or not len(process):
        return np.bincount(process, minlength=n_processes)
    order = np.lexsort((step, process))
    process, step = process[order], step[order]
    begins = np.ones(len(process), bool)
    begins[1:] = (np.diff(process) != 0) | (np.diff(step) > 2)
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, len(process)))
    weight = 1 + lengths // limits.steady_steps * limits.min_unclear_steps
    return np.bincount(process[first], weights=weight, minlength=n_processes).astype(np.int64)


def incidents(late_steps: list[LateStep], named: Container[int], limits: Thresholds) -> list[LateStep]:
    """Single delays that are reported. named: processes whose shorter delays are already reported."""
    single = one_offs(late_steps, limits.incident_ns, limits)
    return [late for late in single if late.process not in named or late.excess_ns >= limits.one_off_ns]


def one_offs(late_steps: list[LateStep], min_ns: float, limits: Thresholds) -> list[LateStep]:
    """Delays of at least min_ns that happened once: far longer than the other delays of the same rank."""
    long = [late for late in late_steps if late.excess_ns >= min_ns]
    of_process: dict[int, list[float]] = {late.process: [] for late in long}
    for late in late_steps:
        if late.process in of_process:
            of_process[late.process].append(late.excess_ns)
    sizes = {process: np.array(own) for process, own in of_process.items()}
    return [
        late
        for late in long
        if np.count_nonzero(sizes[late.process] >= _SIMILAR * late.excess_ns) < limits.min_late_steps
    ]


def unique_delays(
    single: list[LateStep], late_steps: list[LateStep], *, named: Container[int], node: Array
) -> list[LateStep]:
    """The single long delays without a similar delay of another rank, and that are not normal for a pause; and all
    stops by a signal.

    If all ranks have such delays at times, as from garbage collection, the rank with the longest is chance.
    late_steps: all late steps. named: processes that are late for their own reasons, which do not bear on others.
    node: int64 (p,), by process. All ranks of a node that are late in the same step were held up together.
    """
    others = [late for late in late_steps if late.process not in named]
    process = np.array([late.process for late in others], np.int64)
    step = np.array([late.step for late in others], np.int64)
    size = np.array([late.excess_ns for late in others])

    n_on_node = np.bincount(node[node >= 0])

    def is_alone(late: LateStep) -> bool:
        is_similar = (size >= _SIMILAR * late.excess_ns) & (process != late.process)
        on_node = is_similar & (step == late.step) & (node[process] == node[late.process])
        is_whole = len(n_on_node) > 1 and np.count_nonzero(on_node) + 1 == n_on_node[node[late.process]]
        return not (is_similar & ~on_node if is_whole else is_similar).any()

    return [late for late in single if late.is_stopped or (not late.is_usual and is_alone(late))]


def beyond_chance(n_own: int, others: Array | list[int], chance: float) -> bool:
    """Whether a rank has more late steps than chance allows, if all ranks had the same rate.

    Tested against all other ranks (binomial), or against the quieter three quarters of them (Poisson), so that several
    culprits can be named. If others are late as well, delays that move between ranks are likely, and the test is
    stricter. Corrected for the number of ranks that were tested.
    """
    counts = np.asarray(others)
    n_ranks = len(counts) + 1
    if n_ranks == 1:
        return True
    allowed = 4.2 * chance / n_ranks
    total = int(counts.sum())
    tail = _binomial_tail(n_own, n_own + total, 1 / n_ranks)
    if tail <= (allowed / _AMONG_OTHERS if total else allowed):
        return True
    quiet = np.sort(counts)[: len(counts) - -(-len(counts) // 4)]
    if not len(quiet):
        return False
    mean = float(quiet.sum()) / len(quiet)
    rate = max(mean + 2 / n_ranks, _rate_of_quiet(mean))
    return _poisson_tail(n_own, rate) <= allowed / _AMONG_OTHERS


def _rate_of_quiet(mean: float) -> float:
    """The rate at which the quieter three quarters of many Poisson counts have this mean.

    Counts selected for being low underestimate the rate.
    """
    if mean > 500:
        return mean  # the correction is small against the random variation
    low, high = mean, 2 * mean + 1
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_of_quiet(middle) <= mean else (low, middle)
    return low


def _mean_of_quiet(rate: float) -> float:
    remaining, total, k, share = 0.75, 0.0, 0, exp(-rate)
    while remaining > 1e-9 and k < 10 * rate + 50:
        taken = min(share, remaining)
        remaining, total = remaining - taken, total + k * taken
        k += 1
        share *= rate / k
    return total / 0.75


def _binomial_tail(least: int, n: int, p: float) -> float:
    """The probability of at least `least` of n events; 1 if that is at most the expected number.

    Exact far out in the tail for any n. A normal distribution underestimates the tail if p is small, as in large jobs.
    """
    if least <= n * p:
        return 1.0
    log_first = lgamma(n + 1) - lgamma(least + 1) - lgamma(n - least + 1)
    term = exp(log_first + least * log(p) + (n - least) * log1p(-p))
    tail = 0.0
    for k in range(least, n + 1):
        tail += term
        term *= (n - k) / (k + 1) * p / (1 - p)
        if term <= _NEGLIGIBLE * tail:
            break
    return tail


def _poisson_tail(least: int, rate: float) -> float:
    if rate <= 0:
        return float(least <= 0)
    below = sum(exp(k * log(rate) - rate - lgamma(k + 1)) for k in range(least))
    return max(1.0 - below, 0.0)
