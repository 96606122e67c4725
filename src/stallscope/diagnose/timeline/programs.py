"""The programs of a job, the ranks that run each program, and the beginnings of its training steps.

Ranks of one program are peers: their self times can be compared call by call. Stages of a pipeline run different
programs. A step is the repeating pattern of calls. If all calls are equal, the synchronise calls or copies between
them make the pattern, or the long intervals. If the pattern spans many steps, because a call is made in some of them
only, a step is the pattern that repeats between two such calls. Without any repetition, a step lasts from one wait to
the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import numbered
from stallscope.diagnose.arrays.round_tables import Tables
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array

_SAME_PAIRS = 0.9  # share of pairs of successive calls that two processes of one program have in common
_SAME_COUNTS = 0.05  # and how far the shares of each call may differ (relative)
_FEW = 3  # calls that may be missing by chance, as lost records
_LOST, _BY_CHANCE = 0.02, 4  # or this share of lost records, times this many standard deviations
_MAX_SINGLE_PROCESSES = 256
"""More single processes are not a coincidence, and each would be compared with all."""
_COUNTED = 20  # calls rarer than this are not compared by share
_MIN_REPEATS = 6
_MAX_PERIOD = 4096
_MATCH = 0.9
_SIMILAR = 0.8  # share of the marks that begin a step, and of the calls that are part of one
_LONG = 2.5  # in medians: longer intervals are the gaps between the steps of jobs that run ahead
_COMPARED_ROWS = 16_384
_FEWEST_MODELS, _MAX_MODELS = 3, 3  # of two processes none is typical
_ANNOTATED = 0.5  # share of the rows of a process that must lie in annotated steps


@dataclass(frozen=True)
class Programs:
    """program, member: int64 (p,) by process, and its index among the processes of the program.
    key: int64 (n,), equal for rows that are the same call of one program; n_calls: the number of calls. calls: the
    same rows laid out as tables.
    step: int64 (n,), training step of each row within its program; -1 before the pattern begins.
    has_steps: bool by program, whether a repeating pattern was found.
    """

    program: Array
    member: Array
    key: Array
    n_calls: int
    calls: Tables
    step: Array
    has_steps: Array


def programs_of(timeline: Timeline, annotated: Array | None = None) -> Programs:
    """Programs, matching calls and steps of a timeline.

    annotated: int64 (n,), the annotated step of each row (see annotated_steps); it overrides the detected pattern.
    """
    kind = _kind(timeline)
    signature, _ = numbered(timeline.rows["op"], timeline.rows["datatype"], timeline.role, *kind)
    program = _same_program(timeline, signature)
    n_programs = int(program.max(initial=-1)) + 1
    by_row = (program[timeline.process],) if n_programs > 1 else ()
    called_with, _ = numbered(*by_row, timeline.role, *kind)
    key, n_calls = numbered(called_with, timeline.rows["seq"])
    step_of_key, has_steps = np.full(n_calls, -1, np.int64), np.zeros(n_programs, bool)
    member, counts = np.zeros(timeline.n_processes, np.int64), np.diff(timeline.first)
    for number in range(n_programs):
        members = np.flatnonzero(program == number)
        member[members] = np.arange(len(members))
        annotator = _annotating_process(timeline, members, annotated)
        if annotated is not None and annotator >= 0:
            rows = _rows_of(timeline, annotator)
            step_of_key[key[rows]], has_steps[number] = annotated[rows], True
            continue
        by_length = members[np.argsort(-counts[members], kind="stable")]
        rows, steps = _steps_of_model(timeline, by_length, signature)
        step_of_key[key[rows]], has_steps[number] = steps.step, steps.is_pattern
    return Programs(
        program=program,
        member=member,
        key=key,
        n_calls=n_calls,
        calls=Tables.of(called_with, member[timeline.process], key, is_laid_out=False),
        step=_carried_forward(step_of_key[key], timeline.is_first),
        has_steps=has_steps,
    )


def first_of_steps(timeline: Timeline, programs: Programs) -> Array:
    """The first row of each step of each process: int64, sorted."""
    begins = timeline.is_first.copy()
    begins[1:] |= programs.step[1:] != programs.step[:-1]
    return np.flatnonzero(begins)


def _rows_of(timeline: Timeline, process: int) -> slice:
    return slice(int(timeline.first[process]), int(timeline.first[process + 1]))


def _annotating_process(timeline: Timeline, members: Array, annotated: Array | None) -> int:
    """The process of a program with the most annotated rows; -1 if no process has enough of them."""
    if annotated is None:
        return -1
    n_annotated = np.bincount(timeline.process[annotated >= 0], minlength=timeline.n_processes)[members]
    n_rows = np.diff(timeline.first)[members]
    best = int(np.argmax(n_annotated))
    return int(members[best]) if n_annotated[best] >= _ANNOTATED * n_rows[best] > 0 else -1


def _kind(timeline: Timeline) -> tuple[Array, ...]:
    """A column with 0 for collectives, and for point-to-point a number per direction and distance to the peer. No
    column without point-to-point calls.
    """
    calls = np.flatnonzero(timeline.is_p2p)
    if not len(calls):
        return ()
    op, peer, own = (timeline.rows.column(name, calls) for name in ("op", "peer_rank", "comm_rank"))
    kind = np.zeros(len(timeline.rows), np.int64)
    kind[calls] = numbered(op, peer.astype(np.int64) - own)[0] + 1
    return (kind,)


def _same_program(timeline: Timeline, signature: Array) -> Array:
    """The number of the program of each process: int64 (p,)."""
    previous = np.concatenate([[-1], signature[:-1]])[: len(signature)]
    previous[timeline.first[:-1]] = -1
    pair, _ = numbered(previous, signature)
    pairs, calls = _shares(timeline, pair), _shares(timeline, signature)
    n_rows = np.diff(timeline.first)
    program = np.full(timeline.n_processes, -1, np.int64)
    number = 0
    while (program < 0).any():
        left = np.flatnonzero(program < 0)
        model = left[np.argmax(n_rows[left])]
        common = np.minimum(pairs[left], pairs[model]).sum(axis=1)
        compared = np.minimum(n_rows[left], n_rows[model])[:, None]
        expected = calls[model] * compared
        lost = _BY_CHANCE * np.sqrt(2 * _LOST * expected)
        allowed = np.maximum(np.maximum(_SAME_COUNTS * expected, _FEW), lost)
        differs = np.abs(calls[left] - calls[model]) * compared > allowed
        is_same = (common >= _SAME_PAIRS) & ~(differs & (expected >= _COUNTED)).any(axis=1)
        is_same[left == model] = True
        program[left[is_same]] = number
        number += 1
    return numbered(_with_companions(program, pairs))[0]


def _with_companions(program: Array, pairs: Array) -> Array:
    """The programs; a process that is alone in its program joins the most similar program of several processes.

    Lost records may change how often a process makes a call, which would leave it without peers.
    """
    size, out = np.bincount(program), program.copy()
    alone = np.flatnonzero(size[program] == 1).tolist()
    if len(alone) > _MAX_SINGLE_PROCESSES or not (size > 1).any():
        return out
    for process in alone:
        common = np.minimum(pairs, pairs[process]).sum(axis=1)
        common[size[program] == 1] = 0.0
        best = int(np.argmax(common))
        if common[best] >= _SAME_PAIRS:
            out[process] = program[best]
    return out


def _shares(timeline: Timeline, code: Array) -> Array:
    """The share of each code in the rows of each process: float64 (p, codes)."""
    n_codes = int(code.max(initial=-1)) + 1
    counts = np.bincount(timeline.process * n_codes + code, minlength=timeline.n_processes * n_codes)
    counts = counts.reshape(timeline.n_processes, n_codes).astype(np.float64)
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


@dataclass(frozen=True)
class _Steps:
    """step: int64 (n,), of each row of a process, -1 before the pattern. is_pattern: the calls repeat.
    begins_marked: each step begins with a synchronise call or a copy.
    """

    step: Array
    is_pattern: bool
    begins_marked: bool = False


def _steps_of_model(timeline: Timeline, by_length: Array, signature: Array) -> tuple[slice, _Steps]:
    """The rows of a process that all processes of its program resemble, and its steps.

    A faulty process makes additional synchronise calls and copies, which hide the beginnings of its steps. So the steps
    of another process count if they begin with marks, and the steps of the process with the most rows do not.
    by_length: the processes of the program, the process with the most rows first.
    """
    models = by_length if len(by_length) >= _FEWEST_MODELS else by_length[:1]
    found: list[tuple[slice, _Steps]] = []
    for model in models[:_MAX_MODELS].tolist():
        rows = _rows_of(timeline, model)
        found.append((rows, _steps(timeline, rows, signature[rows])))
        if found[-1][1].begins_marked:
            return found[-1]
    return found[0]


def _steps(timeline: Timeline, where: slice, signature: Array) -> _Steps:
    """The steps of one process."""
    rows = timeline.rows[where]
    sized, _ = numbered(signature, rows["count"])
    interval = np.diff(rows["ts_ns"], prepend=rows["ts_ns"][:1])
    synced, copied = (np.diff(rows[name].astype(np.int64), prepend=0) > 0 for name in ("n_syncs", "n_copies"))
    is_step_per_call = synced.mean() >= _MATCH  # then long intervals are delays, not gaps between steps
    is_long = interval > _LONG * np.median(interval)
    choices: list[tuple[Array, ...]] = [(sized,), (signature,), (synced, copied)]
    if not is_step_per_call:
        choices.append((is_long,))
    marks = (synced, copied) if synced.any() or copied.any() else (is_long,)
    length, begins = _shortest_stretch((sized, signature), marks)
    for choice in choices:
        symbols = [numbered(signature, mark)[0] for mark in choice]
        # A job that runs ahead waits once in several steps, but copies its input in each: the shorter period wins.
        periods = [(period, i) for i, each in enumerate(symbols) if (period := repeat_length(each)) > 1]
        if periods:
            period, shortest = min(periods)
            if 0 < length <= period // 2:
                break
            return _Steps(_counted(symbols[shortest], period, interval), True, length > 0)
    if length:
        return _Steps(np.cumsum(begins) - 1, True, begins_marked=True)
    if is_step_per_call:
        return _Steps(np.arange(len(rows)), True, begins_marked=True)
    waited = timeline.wait_ns[where] > 0
    if waited.sum() >= _MIN_REPEATS:
        return _Steps(np.cumsum(waited) - 1, is_pattern=False)
    return _Steps(np.arange(len(rows)), is_pattern=False)


def _shortest_stretch(sequences: Sequence[Array], marks: Sequence[Array]) -> tuple[int, Array]:
    """The shortest repeating sequence of calls that begins with a mark: its length, 0 without any, and its beginnings,
    bool (n,). marks: bool (n,) each, such as "has copied its input".

    A call in some steps only, such as a checkpoint's barrier or a logged loss, makes several steps look like one period
    of the calls. The steps in that period still begin with the same calls.
    """
    stretches = [
        stretch for mark in marks for symbols in sequences if (stretch := _stretch(symbols, mark))[0]
    ]
    return min(stretches, key=lambda stretch: stretch[0]) if stretches else (0, np.zeros(0, bool))


def _stretch(symbols: Array, mark: Array) -> tuple[int, Array]:
    """The length and beginnings of equal sequences of calls, if most marks begin one and they contain most calls."""
    at, begins = np.flatnonzero(mark), np.zeros(len(mark), bool)
    if len(at) <= _MIN_REPEATS:
        return 0, begins
    lengths = np.diff(at, append=len(mark))
    typical = int(np.bincount(lengths).argmax())
    starts = at[lengths >= typical]
    calls = symbols[starts[:, None] + np.arange(typical)]
    starts = starts[(calls == np.median(calls, axis=0)).all(axis=1)]
    if len(starts) < _SIMILAR * len(at) or len(starts) * typical < _SIMILAR * (len(mark) - at[0]):
        return 0, begins
    begins[starts] = True
    return typical, begins


def repeat_length(symbols: Array) -> int:
    """The period of a sequence: 0 when it does not repeat, 1 when all symbols are equal.

    symbols: int64 (n,). Every pair of successive symbols must recur at that distance, also rare pairs: so a
    step of many equal layers is found, not a layer. Pairs that are too rare for a conclusion are left out.
    """
    symbols = symbols[-_COMPARED_ROWS:]
    n = len(symbols)
    if n < 2 * _MIN_REPEATS:
        return 0
    pair, n_pairs = numbered(symbols[:-1], symbols[1:])
    if n_pairs == 1:
        return 1
    counts = np.bincount(pair)
    for least in np.unique(np.concatenate([[_MIN_REPEATS - 1], counts[counts >= _MIN_REPEATS]])):
        kept = counts >= least
        if kept.sum() < 2 or counts[kept].sum() < _MATCH * len(pair):
            break
        period = _shortest(pair, counts, kept)
        if period:
            return period
    return 0


def _shortest(pair: Array, counts: Array, kept: Array) -> int:
    rarest = int(np.argmin(np.where(kept, counts, np.iinfo(np.int64).max)))
    at = np.flatnonzero(pair == rarest)
    candidates = np.unique(np.diff(at), return_counts=True)
    frequent = [int(lag) for lag, n in zip(*candidates, strict=True) if n >= 0.5 * len(at) * _MATCH]
    sums = [int(at[i + k] - at[i]) for k in (1, 2, 3, 4) for i in range(min(len(at) - k, 1))]
    for lag in sorted({*frequent, *sums}):
        if 1 < lag <= min(_MAX_PERIOD, len(pair) // _MIN_REPEATS) and _matches(pair, kept, lag):
            return lag
    return 0


def _matches(pair: Array, kept: Array, lag: int) -> bool:
    """Whether each kept pair recurs at this distance."""
    same = pair[lag:] == pair[:-lag]
    total = np.bincount(pair[:-lag], minlength=len(kept))
    good = np.bincount(pair[:-lag][same], minlength=len(kept))
    return bool((good[kept] >= _MATCH * total[kept]).all())


def _counted(symbols: Array, period: int, interval_ns: Array) -> Array:
    """Step number of each row: a step begins with the row after the longest median interval.

    The beginning is recognised by its pair of symbols if that pair occurs once per step. Then rows outside the
    pattern (a validation, a checkpoint) do not shift the steps after them.
    """
    n = len(symbols)
    phase = np.arange(n) % period
    median_ns = np.array(
        [np.median(interval_ns[phase == i]) if (phase == i).any() else 0 for i in range(period)]
    )
    previous = np.concatenate([[-1], symbols[:-1]])
    pair, _ = numbered(previous, symbols)
    begins_at = int(np.argmax(median_ns))
    here = pair[phase == begins_at]
    mark = int(np.bincount(here).argmax())
    marked = pair == mark
    if 0.8 * n / period <= marked.sum() <= 1.2 * n / period:
        return np.cumsum(marked) - 1
    return np.where(np.arange(n) < begins_at, -1, (np.arange(n) - begins_at) // period)


def _carried_forward(step: Array, is_first: Array) -> Array:
    """Rows whose call the model process lacks belong to the step before them."""
    known = step >= 0
    if not (known[:-1] & ~known[1:] & ~is_first[1:]).any():
        return step
    start = np.maximum.accumulate(np.where(is_first, np.arange(len(step)), 0))
    last = np.maximum.accumulate(np.where(known, np.arange(len(step)), -1))
    usable = last >= start
    return np.where(known, step, np.where(usable, step[np.maximum(last, 0)], -1))
