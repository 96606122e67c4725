"""Who is slow itself: the late steps of each rank, and whether they recur enough to name it.

Two votes must agree. The rank arrives late (needs clocks), and its own self time exceeds its peers' by what
explains the lateness (needs none; it is the same as waiting least). A rank that is late without such an excess
was kept waiting itself: a victim. Then the late steps must recur on the same rank more often than chance gives.
"""

from dataclasses import dataclass, replace
from math import exp, lgamma, log, log1p

import numpy as np

from stallscope.diagnose.cores import MUCH, in_pieces
from stallscope.diagnose.groups import by_group, medians, numbered
from stallscope.diagnose.programs import Programs
from stallscope.diagnose.rounds import Rounds
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline import Timeline
from stallscope.events.layout import Array

_LARGE_PROGRAM = 4  # processes of which a quarter may be slow without raising the lower quartile
_STRETCHES_AT_ONCE = 1 << 12
_STEPS_AHEAD = 64
"""A host that runs further ahead waits in its launches for room in the queue (1,024 entries)."""

_FEW = 0.05  # share of the rows up to which they are looked at one by one
_NEGLIGIBLE = 1e-12  # a term so small against its sum ends it
_WANDERING = 2.5  # 1.25 for a median, twice as much where six tenths of what is off stay off in the next step
_AMONG_OTHERS = 15  # so many times less may be left to chance where other ranks are late, too


@dataclass(frozen=True)
class LateStep:
    """A rank was late in a step by its own doing.

    first_row, peak_row: rows of the timeline between which the delay arose. late_ns: gained until the peak,
    against the median of the others (in jobs that run ahead lateness adds up over steps). excess_ns: its own self
    time beyond its peers'. n_rounds: rounds of the step it was late in. is_held: it was not late to arrive, but
    kept the others waiting in a round under way.
    """

    process: int
    step: int
    first_row: int
    peak_row: int
    late_ns: float
    excess_ns: float
    n_rounds: int
    is_held: bool = False


@dataclass(frozen=True)
class Cells:
    """Steps x processes: the rows of one process in one step form a cell; arrays (c,)."""

    process: Array
    step: Array
    first_row: Array
    end_row: Array
    peak_row: Array
    late_ns: Array
    rise_ns: Array
    excess_ns: Array
    held_row: Array
    held_ns: Array
    self_ns: Array
    wait_ns: Array

    def sums(self, value: Array) -> Array:
        """The sum of a value (n,) over the rows of each cell: (c,)."""
        return _sums(value, self.first_row, self.end_row)


def cells(
    line: Timeline, plan: Programs, met: Rounds, *, excess: tuple[Array, Array], held_ns: Array
) -> Cells:
    """Lateness and own excess of each process in each step of the pattern (step >= 0).

    excess: float64 (n,) each, of self time and of host time (see excess.excess_ns). The larger explanation counts:
    host time misses slow copies and allocations, and self time is blind where victims wait inside a copy.
    held_ns: float64 (n,), what the process held the others up for while they were waiting already (see excess).
    self_ns, wait_ns: the process's self time in the step, and its waits.

    rise_ns is the lateness gained in the step: at its peak, less what was left over from the step before, which
    is what the rank was late at the step's first call beyond its own excess there.
    """
    n = len(line.rows)
    if not n:
        none = np.zeros(0, np.int64)
        real = none.astype(np.float64)
        return Cells(none, none, none, none, none, real, real, real, none, real, real, none)
    begins = line.is_first.copy()
    begins[1:] |= plan.step[1:] != plan.step[:-1]
    first = np.flatnonzero(begins)
    end = np.append(first[1:], n)
    late = _known(met.late_ns)
    peak, held_row = _last_largest(late, first, end), _largest_of_few(held_ns, first, end)
    is_start = line.is_first[first]
    before = np.where(is_start, 0.0, late[np.maximum(first - 1, 0)])
    waited = _sums(line.wait_ns, first, end)
    length = line.ts_ns[end - 1] - line.ts_ns[np.where(is_start, first, first - 1)]
    at_first = np.maximum(np.maximum(excess[0][first], excess[1][first]), 0.0)
    carried = np.clip(late[first] - at_first, 0.0, np.maximum(before, 0.0))
    rise = late[peak] - carried
    own = np.maximum(*(_largest_tail(value, first, peak) for value in excess))
    kept = plan.step[first] >= 0
    return Cells(
        process=line.process[first][kept],
        step=plan.step[first][kept],
        first_row=first[kept],
        end_row=end[kept],
        peak_row=peak[kept],
        late_ns=late[peak][kept],
        rise_ns=rise[kept],
        excess_ns=own[kept],
        held_row=held_row[kept],
        held_ns=held_ns[held_row][kept],
        self_ns=(length - waited)[kept].astype(np.float64),
        wait_ns=waited[kept],
    )


def _sums(value: Array, first: Array, end: Array) -> Array:
    """The sum of value over each stretch of rows first..end: (k,)."""
    out = np.empty(len(first), np.promote_types(value.dtype, np.int64))

    def add(here: slice) -> None:
        begin, ends = int(first[here.start]), end[here]
        before = np.zeros(ends[-1] - begin + 1, out.dtype)  # before[i]: sum of all up to row i, without it
        np.cumsum(value[begin : ends[-1]], out=before[1:])
        np.subtract(before[ends - begin], before[first[here] - begin], out=out[here])

    in_pieces(len(first), add, rows_at_once=_STRETCHES_AT_ONCE, is_much=len(value) >= MUCH)
    return out


def _largest_of_few(value: Array, first: Array, end: Array) -> Array:
    """As _last_largest, of values that are 0 in most rows and negative in none."""
    rows = np.flatnonzero(value)
    if len(rows) > _FEW * len(value):
        return _last_largest(value, first, end)
    out = end - 1
    stretch = np.searchsorted(first, rows, side="right") - 1
    order = np.lexsort((rows, value[rows], stretch))
    is_largest = np.append(np.diff(stretch[order]) != 0, True)[: len(rows)]
    out[stretch[order[is_largest]]] = rows[order[is_largest]]
    return out


def _known(value: Array) -> Array:
    """The value with 0 where it is NaN."""
    is_unknown = np.isnan(value)
    if not is_unknown.any():
        return value
    value = value.copy()
    value[is_unknown] = 0.0
    return value


def _last_largest(value: Array, first: Array, end: Array) -> Array:
    """The row of the largest value in each stretch of rows, the last of equals; stretches cover all rows in order."""
    out = np.empty(len(first), np.int64)

    def find(here: slice) -> None:
        begin, ends = int(first[here.start]), end[here]
        own = value[begin : ends[-1]]
        starts = first[here] - begin
        largest = np.repeat(np.maximum.reduceat(own, starts), ends - first[here])
        rows = np.flatnonzero(own == largest)
        out[here] = rows[np.searchsorted(rows, ends - begin) - 1] + begin

    in_pieces(len(first), find, rows_at_once=_STRETCHES_AT_ONCE, is_much=len(value) >= MUCH)
    return out


def _largest_tail(value: Array, first: Array, last: Array) -> Array:
    """The largest sum of value over a tail of each stretch first..last (both included)."""
    out = np.empty(len(first))

    def find(here: slice) -> None:
        begin, after = int(first[here.start]), last[here] + 1
        before = np.zeros(after[-1] - begin + 1)  # before[i]: sum of all up to row i, without it
        np.cumsum(value[begin : after[-1]], out=before[1:])
        ends = np.stack([first[here], after], axis=1).ravel() - begin
        np.subtract(before[after - begin], np.minimum.reduceat(before, ends)[::2], out=out[here])

    in_pieces(len(first), find, rows_at_once=_STRETCHES_AT_ONCE, is_much=len(value) >= MUCH)
    return out


def usual_step_ns(line: Timeline, table: Cells) -> float:
    """Median time that a step of a process takes; 0 when unknown.

    From the beginning of one step to that of the next, where processes wait for their GPUs in most steps. Where they
    do not, their hosts run ahead, and only many steps together take as long as on the GPUs.
    """
    starts = line.ts_ns[table.first_row]
    n_steps = len(np.unique(table.step))
    runs_ahead = n_steps > 0 and not np.median(table.wait_ns)
    apart = min(max(n_steps // 4, 1), _STEPS_AHEAD) if runs_ahead else 1
    n_between = table.step[apart:] - table.step[:-apart]
    same = (table.process[apart:] == table.process[:-apart]) & (n_between == apart)
    return float(np.median((starts[apart:] - starts[:-apart])[same])) / apart if same.any() else 0.0


def judged(table: Cells, line: Timeline, limits: Thresholds) -> Cells:
    """The cells without warm-up: the first steps, and further ones while they take several times the usual."""
    starts = line.ts_ns[table.first_row]
    usual = usual_step_ns(line, table)
    first_judged = limits.warm_up_steps
    for step in range(limits.warm_up_steps, 10):
        now, after = starts[table.step == step], starts[table.step == step + 1]
        if (
            not len(now)
            or not len(after)
            or np.median(after) - np.median(now) <= limits.warm_up_factor * usual
        ):
            break
        first_judged = step + 1
    return _where(table, table.step >= first_judged)


def _where(table: Cells, mask: Array) -> Cells:
    return replace(table, **{name: getattr(table, name)[mask] for name in Cells.__dataclass_fields__})


def noise_ns(line: Timeline, table: Cells) -> float:
    """How much the self time of a quiet rank varies from step to step (robust standard deviation).

    The median over the ranks; with few of them the lower quartile, which one disturbed rank of two cannot raise.
    """
    spreads = by_group(table.process, table.self_ns, line.n_processes, _spread)
    spreads = spreads[np.bincount(table.process, minlength=line.n_processes) >= 4]
    return float(np.quantile(spreads, 0.25 if len(spreads) < 8 else 0.5)) if len(spreads) else 0.0


def _spread(values: Array) -> Array:
    return 1.4826 * medians(np.abs(values - medians(values)[:, None]))


@dataclass(frozen=True)
class Pace:
    """What is usual in a job. step_ns: a step. noise_ns: see noise_ns(). least_ns: from which lateness on a single
    step counts as late; steady_ns: the same for a rank that is late in most steps; even_ns: for
    one that is late by about as much in nearly all.
    """

    step_ns: float
    noise_ns: float
    least_ns: float
    steady_ns: float
    even_ns: float


def pace(line: Timeline, table: Cells, limits: Thresholds) -> Pace:
    """The pace of a job, from its judged steps."""
    step_ns, noise = usual_step_ns(line, table), noise_ns(line, table)
    in_all = min(noise, _steady_noise_ns(line, table, noise, limits))
    steady = max(limits.min_late_ns, limits.steady_step_share * step_ns)
    return Pace(
        step_ns=step_ns,
        noise_ns=noise,
        least_ns=max(limits.min_late_ns, limits.late_step_share * step_ns, limits.noise_factor * noise),
        steady_ns=max(steady, limits.steady_noise_factor * noise),
        even_ns=max(steady, limits.steady_noise_factor * in_all),
    )


def _steady_noise_ns(line: Timeline, table: Cells, noise: float, limits: Thresholds) -> float:
    """How much ranks differ from each other over all steps: the largest median lateness of all but the one that is
    latest (or earliest); and no less than what is left of the noise of single steps in a median over so many, which
    follow each other as hosts wander.
    """
    n_cells = np.bincount(table.process, minlength=line.n_processes)
    known = n_cells >= limits.steady_steps
    if known.sum() < 3:
        return noise
    each = np.abs(by_group(table.process, table.rise_ns, line.n_processes, medians))[known]
    left = _WANDERING * noise / float(np.median(n_cells[known])) ** 0.5
    return max(float(np.sort(each)[-2]), left)


def late_steps(
    line: Timeline, met: Rounds, table: Cells, *, program: Array, usual: Pace, limits: Thresholds
) -> list[LateStep]:
    """The steps in which a rank was late by its own doing. program: int64 (p,), see Programs."""
    if not len(table.step):
        return []
    least = usual.least_ns
    needed = _needed_ns(table, usual, limits)[table.process]
    is_late = (table.rise_ns >= needed) & (table.excess_ns >= limits.source_share * table.rise_ns)
    is_late &= table.excess_ns >= limits.source_share * needed
    is_held = ~is_late & (table.held_ns >= least)
    is_late &= table.rise_ns >= limits.shared_factor * shared_pause_ns(table, least, program)
    is_late &= ~_absorbed(line, table, is_late, limits)
    found = [_late(table, met, i, needed_ns=float(needed[i])) for i in np.flatnonzero(is_late).tolist()]
    return found + [_held(table, i) for i in np.flatnonzero(is_held).tolist()]


def shared_pause_ns(table: Cells, least_ns: float, program: Array) -> Array:
    """By cell: how much longer than usual all ranks alike took themselves in that step; 0 where they did not.

    Checkpoints and validations are such steps: ranks differ in them by nature. All ranks are compared, and those of
    each program, as the steps of two programs may have different numbers. program: int64 (p,), see Programs.
    """
    everybody = _pause_ns(table, np.zeros_like(program))
    is_large = np.bincount(program) >= _LARGE_PROGRAM
    if len(is_large) > 1 and is_large.any():
        alone = _pause_ns(table, program) * is_large[program[table.process]]
        everybody = np.maximum(everybody, alone)
    return np.where(everybody >= least_ns, everybody, 0.0)


def _pause_ns(table: Cells, group: Array) -> Array:
    """By cell: how much longer than usual the processes of its group took in that step, if twice as long or more.

    group: int64 (p,). The lower quartile of the ranks is looked at, which a slow rank does
    not raise.
    """
    place, n_places = numbered(group[table.process], table.step)
    typical = by_group(place, table.self_ns, n_places, _lower_quartiles)
    of_group = np.zeros(n_places, np.int64)
    of_group[place] = group[table.process]
    usual = by_group(of_group, typical, int(group.max(initial=0)) + 1, medians)[of_group]
    return np.where(typical >= 2 * usual, typical - usual, 0.0)[place]


def _lower_quartiles(values: Array) -> Array:
    """Of each row, as one of its values."""
    place = (values.shape[1] - 1) // 4
    return np.asarray(np.partition(values, place, axis=1)[:, place])


def _absorbed(line: Timeline, table: Cells, is_late: Array, limits: Thresholds) -> Array:
    """Late cells of ranks whose late steps last no longer than steps around which nobody is late: nobody had to wait.

    Nothing is said where there are too few such steps to compare with.
    """
    out = np.zeros(len(is_late), bool)
    before = np.maximum(table.first_row - 1, 0)
    length = line.ts_ns[table.end_row - 1] - line.ts_ns[before]
    has_late = np.zeros(int(table.step.max()) + 2, bool)
    has_late[table.step[is_late]] = True
    # What a late step makes others wait for shows in the interval that leads into the next one.
    has_late[1:] |= has_late[:-1].copy()
    late, quiet = np.flatnonzero(is_late), np.flatnonzero(~has_late[table.step])
    if not len(late) or not len(quiet):
        return out

    def usual(value: Array, cells: Array) -> Array:
        return by_group(table.process[cells], value[cells], line.n_processes, medians)

    longer = usual(length, late) - usual(length, quiet)
    n_quiet = np.bincount(table.process[quiet], minlength=line.n_processes)
    is_absorbed = n_quiet >= limits.steady_steps
    is_absorbed &= longer < limits.elongation * usual(table.rise_ns, late)
    out[late] = is_absorbed[table.process[late]]
    return out


def _late(table: Cells, met: Rounds, i: int, *, needed_ns: float) -> LateStep:
    rows = slice(int(table.first_row[i]), int(table.end_row[i]))
    return LateStep(
        process=int(table.process[i]),
        step=int(table.step[i]),
        first_row=int(table.first_row[i]),
        peak_row=int(table.peak_row[i]),
        late_ns=float(table.rise_ns[i]),
        excess_ns=float(table.excess_ns[i]),
        n_rounds=int((np.nan_to_num(met.late_ns[rows], nan=0.0) >= needed_ns).sum()),
    )


def _held(table: Cells, i: int) -> LateStep:
    """It arrived in time and then could not go on: it is as late as it was held up after that."""
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


def _needed_ns(table: Cells, usual: Pace, limits: Thresholds) -> Array:
    """By process: from which lateness on a step of it is late."""
    even = _is_steady(table, usual.even_ns, limits)
    even &= _is_even(table, limits)
    steady = np.where(_is_steady(table, usual.steady_ns, limits), usual.steady_ns, usual.least_ns)
    return np.where(even, usual.even_ns, steady)


def _is_even(table: Cells, limits: Thresholds) -> Array:
    """By process: late by about as much in nearly all steps. A host that wanders is late by turns."""
    n = int(table.process.max()) + 1
    usual = by_group(table.process, table.rise_ns, n, medians)
    n_near = np.bincount(table.process[table.rise_ns >= 0.5 * usual[table.process]], minlength=n)
    return (usual > 0) & (n_near >= limits.even_share * np.bincount(table.process, minlength=n))


def _is_steady(table: Cells, least_ns: float, limits: Thresholds) -> Array:
    """By process: late in most steps, with an excess of its own that explains it."""
    n = int(table.process.max()) + 1
    n_cells = np.bincount(table.process, minlength=n)
    n_late = np.bincount(table.process[table.rise_ns >= least_ns], minlength=n)
    often = (n_late >= limits.steady_share * n_cells) & (n_cells >= limits.steady_steps)
    late, own = (by_group(table.process, each, n, medians) for each in (table.rise_ns, table.excess_ns))
    return often & (own >= limits.source_share * late)


def recurring(
    found: list[LateStep], n_processes: int, *, least_ns: float, limits: Thresholds
) -> dict[int, list[LateStep]]:
    """The processes to name, each with its late steps; one-off delays are left out (see one_offs()).

    least_ns: the threshold of a late step, see Pace.
    """
    once = {id(late) for late in one_offs(found, limits)}
    left = [late for late in found if id(late) not in once]
    process = np.array([one.process for one in left], np.int64)
    step = np.array([one.step for one in left], np.int64)
    size = np.array([one.excess_ns for one in left])
    n_mine = np.bincount(process, minlength=n_processes)
    named = {}
    for candidate in np.flatnonzero(n_mine >= limits.min_late_steps).tolist():
        median = float(np.median(size[process == candidate]))
        comparable = size >= 0.5 * median
        is_clear = median >= limits.clear_factor * least_ns
        counts = n_events(
            process[comparable], step[comparable], one_by_one=is_clear, n_processes=n_processes, limits=limits
        )
        n_own = int(counts[candidate])
        enough = limits.min_late_steps if is_clear else limits.min_unclear_steps
        if n_own >= enough and beyond_chance(n_own, np.delete(counts, candidate), limits.chance):
            named[candidate] = [late for late in left if late.process == candidate]
    return named


def unsure(
    found: list[LateStep], named: dict[int, list[LateStep]], *, least_ns: float, limits: Thresholds
) -> dict[int, list[LateStep]]:
    """Processes that are not named though they have several clear late steps: the others' make that no surprise."""
    mine: dict[int, list[LateStep]] = {}
    for late in found:
        if late.process not in named and late.excess_ns >= limits.clear_factor * least_ns:
            mine.setdefault(late.process, []).append(late)
    return {process: late for process, late in mine.items() if len(late) >= limits.min_late_steps}


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


def one_offs(found: list[LateStep], limits: Thresholds) -> list[LateStep]:
    """Long delays that happened once: far longer than what else the same rank shows."""
    long = [late for late in found if late.excess_ns >= limits.one_off_ns]
    of_process: dict[int, list[float]] = {late.process: [] for late in long}
    for late in found:
        if late.process in of_process:
            of_process[late.process].append(late.excess_ns)
    sizes = {process: np.array(mine) for process, mine in of_process.items()}
    return [
        late
        for late in long
        if np.count_nonzero(sizes[late.process] >= 0.2 * late.excess_ns) < limits.min_late_steps
    ]


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
