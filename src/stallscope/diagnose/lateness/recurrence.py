"""Whether late steps recur on the same rank more often than chance gives: then it is named."""

from collections.abc import Container
from math import exp, lgamma, log, log1p

import numpy as np

from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.together import companions
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.layout import Array

_NEGLIGIBLE = 1e-12  # a term so small against its sum ends it
_LIKE = 0.2  # a delay is like another one from this share of its length on
_AMONG_OTHERS = 15  # so many times less may be left to chance where other ranks are late, too


def recurring(
    found: list[LateStep],
    n_processes: int,
    *,
    least_ns: float,
    limits: Thresholds,
    node: Array | None = None,
) -> dict[int, list[LateStep]]:
    """The processes to name, each with its late steps; its one-off delays are left out (see one_offs()).

    One-off delays of the others count where they are not far longer: they may be what this one happened to have thrice.
    least_ns: the threshold of a late step, see Pace. node: int64 (n_processes,), UNKNOWN for processes that are gone:
    ranks of nodes that are late together count as one.
    """
    once = {id(late) for late in one_offs(found, limits.one_off_ns, limits)}
    is_once = np.array([id(late) in once for late in found], bool)
    process = np.array([late.process for late in found], np.int64)
    step = np.array([late.step for late in found], np.int64)
    size = np.array([late.excess_ns for late in found])
    is_usual = np.array([late.is_usual for late in found], bool)
    n_mine = np.bincount(process[~is_once], minlength=n_processes)
    named = {}
    for candidate in np.flatnonzero(n_mine >= limits.min_late_steps).tolist():
        own = np.flatnonzero((process == candidate) & ~is_once)
        median = float(np.median(size[own]))
        comparable = (size >= 0.5 * median) & (~is_once | (_LIKE * size <= median))
        comparable[(process == candidate) & is_once] = False
        is_clear = median >= limits.clear_factor * least_ns and 2 * is_usual[own].sum() <= len(own)
        counts = n_events(
            process[comparable], step[comparable], one_by_one=is_clear, n_processes=n_processes, limits=limits
        )
        n_own = int(counts[candidate])
        enough = limits.min_late_steps if is_clear else limits.min_unclear_steps
        if n_own < enough:
            continue
        is_sure = beyond_chance(n_own, np.delete(counts, candidate), limits.chance)
        if not is_sure and node is not None:
            mates = companions(candidate, process[comparable], step[comparable], node)
            others = np.delete(counts, [candidate, *mates.tolist()])
            is_sure = len(mates) > 0 and len(others) > 0 and beyond_chance(n_own, others, limits.chance)
        if is_sure:
            named[candidate] = [found[i] for i in own.tolist()]
    return named


def unsure(
    found: list[LateStep],
    named: dict[int, list[LateStep]],
    *,
    least_ns: float,
    long_ns: float,
    limits: Thresholds,
) -> dict[int, list[LateStep]]:
    """Processes that are not named though they have several clear late steps, or one from long_ns on: the others' make
    that no surprise.
    """
    mine: dict[int, list[LateStep]] = {}
    for late in found:
        is_clear = late.excess_ns >= limits.clear_factor * least_ns and not late.is_usual
        if is_clear and late.process not in named:
            mine.setdefault(late.process, []).append(late)
    long_ns = max(long_ns, limits.one_off_ns)
    return {
        process: late
        for process, late in mine.items()
        if len(late) >= limits.min_late_steps or max(one.excess_ns for one in late) >= long_ns
    }


def n_events(process: Array, step: Array, *, one_by_one: bool, n_processes: int, limits: Thresholds) -> Array:
    """How many independent delays each process's late steps are: int64 (n_processes,).

    Clear ones count one by one. Hosts wander by themselves and stay slow for some steps: small ones in a row count
    once, and more for every further `steady_steps` of them.
    """
    if one_by_one or not len(process):
        return np.bincount(process, minlength=n_processes)
    order = np.lexsort((step, process))
    process, step = process[order], step[order]
    begins = np.ones(len(process), bool)
    begins[1:] = (np.diff(process) != 0) | (np.diff(step) > 2)
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, len(process)))
    weight = 1 + lengths // limits.steady_steps * limits.min_unclear_steps
    return np.bincount(process[first], weights=weight, minlength=n_processes).astype(np.int64)


def incidents(found: list[LateStep], named: Container[int], limits: Thresholds) -> list[LateStep]:
    """Single delays worth a line. named: processes whose shorter delays are reported already."""
    once = one_offs(found, limits.incident_ns, limits)
    return [late for late in once if late.process not in named or late.excess_ns >= limits.one_off_ns]


def one_offs(found: list[LateStep], least_ns: float, limits: Thresholds) -> list[LateStep]:
    """Delays of at least least_ns that happened once: far longer than the other delays of the same rank."""
    long = [late for late in found if late.excess_ns >= least_ns]
    of_process: dict[int, list[float]] = {late.process: [] for late in long}
    for late in found:
        if late.process in of_process:
            of_process[late.process].append(late.excess_ns)
    sizes = {process: np.array(mine) for process, mine in of_process.items()}
    return [
        late
        for late in long
        if np.count_nonzero(sizes[late.process] >= _LIKE * late.excess_ns) < limits.min_late_steps
    ]


def alone(
    once: list[LateStep], found: list[LateStep], *, named: Container[int], node: Array
) -> list[LateStep]:
    """Of single long delays, those of which no other rank has had the like, and that are not usual where they came.

    Where ranks have such delays by turns, as those in which garbage is collected, who had the longest is chance.
    found: all late steps. named: processes that are late for reasons of their own, which tell nothing of others.
    node: int64 (p,), by process: all ranks of a node, late in one step, were held up together.
    """
    others = [late for late in found if late.process not in named]
    process = np.array([late.process for late in others], np.int64)
    step = np.array([late.step for late in others], np.int64)
    size = np.array([late.excess_ns for late in others])

    n_on_node = np.bincount(node[node >= 0])

    def is_alone(late: LateStep) -> bool:
        is_like = (size >= _LIKE * late.excess_ns) & (process != late.process)
        beside = is_like & (step == late.step) & (node[process] == node[late.process])
        is_whole = len(n_on_node) > 1 and np.count_nonzero(beside) + 1 == n_on_node[node[late.process]]
        return not (is_like & ~beside if is_whole else is_like).any()

    return [late for late in once if not late.is_usual and is_alone(late)]


def beyond_chance(n_own: int, others: Array | list[int], chance: float) -> bool:
    """Whether so many late steps of one rank among the others' are more than chance, if all ranks were alike.

    Against all the others (binomial), or against the quieter three quarters of them (Poisson), which lets several
    culprits be named. Where others are late too, delays that move around are likely, and the proof must be stricter.
    Corrected for the number of ranks that could have come out first.
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
    """The rate at which the quieter three quarters of many Poisson counts have this mean: those chosen for being
    low say too little of the rest.
    """
    if mean > 500:
        return mean  # the difference is small against what chance adds
    low, high = mean, 2 * mean + 1
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_of_quiet(middle) <= mean else (low, middle)
    return low


def _mean_of_quiet(rate: float) -> float:
    left, total, k, share = 0.75, 0.0, 0, exp(-rate)
    while left > 1e-9 and k < 10 * rate + 50:
        taken = min(share, left)
        left, total = left - taken, total + k * taken
        k += 1
        share *= rate / k
    return total / 0.75


def _binomial_tail(least: int, n: int, p: float) -> float:
    """The chance of at least so many of n; 1 for no more than are to be expected.

    Exact far out in the tail, too, whatever n is: a normal distribution has next to nothing there where p is small,
    as it is in large jobs.
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
