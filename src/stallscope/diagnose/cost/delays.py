"""Sums over late steps: the data that a verdict needs, so that the rows need not be kept.

The sums of two periods add up to the sum of both. A stream of events keeps the sums instead of its past rows.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from stallscope.diagnose.causes import Excess
from stallscope.diagnose.cost.absorbed import QUEUE_EMPTYING, HostTimes, passed_on
from stallscope.diagnose.cost.retransmits import retransmits_to
from stallscope.diagnose.cost.step_growth import Baseline, Growth, growth, stretches, with_longer_delays
from stallscope.diagnose.cost.waiting import Cost, RowsByRound, cost, shares
from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.diagnose.lateness.together import in_groups
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.timeline.excess import ledger_excess_ns
from stallscope.events.layout import Array
from stallscope.events.names import N_CATEGORIES, SUMMED, Category, CollectiveFlag, SampleRole

MAX_KEPT = 1024
"""Limit of late steps (the latest), and of rows of calls and offcpu (the longest), that a sum keeps individually."""

_MAX_EXPLAINED = 200  # late steps whose ledger is examined: the largest
_SECOND_NS = 1_000_000_000
_MAX_WAITS = 1 << 21  # late steps x processes examined for the cost: some seconds of work
_MAX_TOTAL_WAITS = 1 << 18  # the same for a sum only, which a sample of all sizes estimates
_MOST = 0.5  # share of a delay
_UNSEEN = 3.0
"""A GPU's delay, as a multiple of the part that its host shows: work after the last arrival is hidden."""
_AFTER_CALLS = 1.5
"""A GPU's delay, as a multiple of its delays before calls: the work after the last call is hidden."""
_APART_STEPS = 2  # late steps with at most one good step between them are one incident

N = TypeVar("N", int, float)

ProcessKey = tuple[int, int]
"""A process outside a case: node and pid."""


@dataclass(frozen=True)
class Delays:
    """Late steps, in order of time, and their sums.

    late: the latest MAX_KEPT; their row numbers are not valid. n_late: the number of all late steps. by_process: the
    number by process. n_rounds: late rounds. rounds: by communicator, the number of late steps that peaked there, and
    their first and last round. max_late_ns: the largest lateness. since_ns, until_ns: wall time, None unknown.
    lost_ns: by process, the time it was kept waiting, at most; min_ns: at least. is_lower_bound: some late steps were
    not counted in lost_ns.
    """

    late: tuple[LateStep, ...]
    n_late: int
    by_process: Mapping[ProcessKey, int]
    n_incidents: int
    n_rounds: int
    rounds: Mapping[int, tuple[int, int, int]]
    max_late_ns: float
    since_ns: int | None
    until_ns: int | None
    excess: Excess
    lost_ns: Mapping[ProcessKey, float] = field(default_factory=dict)
    min_ns: Mapping[ProcessKey, float] = field(default_factory=dict)
    is_lower_bound: bool = False

    @property
    def steps(self) -> Array:
        """The step numbers of the kept late steps: int64."""
        return np.array([late_step.step for late_step in self.late], np.int64)

    @property
    def sizes_ns(self) -> Array:
        """The own excess of the kept late steps: float64."""
        return np.array([late_step.excess_ns for late_step in self.late])

    @property
    def category(self) -> Category:
        """The ledger category of most of the excess, without waits for GPUs."""
        of_self = self.excess.ledger_ns[:N_CATEGORIES].copy()
        of_self[Category.WAIT_GPU - 1] = 0.0
        return Category(int(np.argmax(of_self)) + 1)

    @property
    def comm_hash(self) -> int:
        """The communicator in which most late steps peaked."""
        return max(self.rounds, key=lambda comm: self.rounds[comm][0])


def late_together(delays: Mapping[int, Delays], node: Array) -> list[list[int]]:
    """The processes of some delays in groups, see in_groups(). node: int64 (p,), by process of the job."""
    return in_groups(
        {process: each.steps for process, each in delays.items()},
        node,
        {process: each.category for process, each in delays.items()},
    )


def delays_by_process(
    case: Case, late: Iterable[LateStep], *, among: Iterable[LateStep] = ()
) -> dict[int, Delays]:
    """The delays of each process, with their cost as waiting time of the others.

    among: further late steps, which cause a share of that waiting time.
    """
    late = list(late)
    if not late:
        return {}
    counted = _largest(late, _n_counted(case, _MAX_WAITS))
    among_all = list(
        {(late_step.process, late_step.step): late_step for late_step in [*late, *among]}.values()
    )
    costs, n_counted = _costs(case, counted, among_all), Counter(late_step.process for late_step in counted)
    excess, result, nothing = _excess_by_process(case, late), {}, np.zeros(case.timeline.n_processes)
    for process, late_steps in _by_process(case, late).items():
        spent = costs.get(process, Cost(nothing, nothing))
        result[process] = replace(
            _delays(case, late_steps, excess[process]),
            lost_ns=_lost_by(case, spent.lost_ns),
            min_ns=_lost_by(case, spent.min_ns),
            is_lower_bound=n_counted[process] < len(late_steps),
        )
    return result


def delays_in_all(case: Case, late: Iterable[LateStep]) -> Delays:
    """The sum of the delays of all processes, of at least one late step.

    The others wait for the last late process in a step; earlier late processes add no cost.
    """
    late = sorted(late, key=lambda late_step: case.arrival_ns[late_step.peak_row])
    last_delays = list(
        {
            late_step.step: late_step for late_step in sorted(late, key=lambda late_step: late_step.late_ns)
        }.values()
    )
    counted = _of_all_sizes(last_delays, _n_counted(case, _MAX_TOTAL_WAITS))
    costs = list(_costs(case, counted, last_delays, uneven=late).values())
    all_ns = sum(late_step.late_ns for late_step in last_delays)
    more = all_ns / sum(late_step.late_ns for late_step in counted)
    lost_ns = more * np.sum([spent.lost_ns for spent in costs], axis=0)
    if case.timeline.is_p2p.any():  # indirect waits are not all recorded
        lost_ns = np.maximum(lost_ns, all_ns)
    delays = _delays(case, late, _in_all(list(_excess_by_process(case, late).values())))
    return replace(
        delays,
        lost_ns=_lost_by(case, lost_ns),
        min_ns=_lost_by(case, more * np.sum([spent.min_ns for spent in costs], axis=0)),
    )


def _costs(
    case: Case, late: list[LateStep], among: list[LateStep], *, uneven: Sequence[LateStep] = ()
) -> dict[int, Cost]:
    """The cost of each process's late steps for the others.

    among: all late steps that cause a share of the waiting time. uneven: other late steps of the same fault; no process
    would have waited for them without the fault.
    """
    by_round = RowsByRound.of(case.matched, case.table, late, among=[*among, *uneven])
    share, times = shares(case.arrival_ns, among), HostTimes.of(case.timeline, case.programs, late)
    return {
        process: cost(
            case.timeline,
            case.matched,
            case.arrival_ns,
            waits=case.waits,
            by_round=by_round,
            late=late_steps,
            among=among,
            share=share,
            passed_on=passed_on(case.timeline, times, late_steps),
            step_ns=case.step_ns,
            limits=case.limits,
        )
        for process, late_steps in _by_process(case, late).items()
    }


def as_steps_grew(
    case: Case,
    delays: Mapping[int, Delays],
    *,
    groups: Sequence[Sequence[int]],
    among: Iterable[LateStep] = (),
    baseline: Baseline | None = None,
) -> dict[int, Delays]:
    """The delays of all named processes, with the growth of the job's steps as their cost.

    groups: the processes of each verdict. The cost of a group is divided among its processes by their delays.
    among: further late steps of these processes in the case, which cause a share of the growth. baseline: quiet steps
    of the job before the case.
    """
    counted = {
        (late_step.process, late_step.step): late_step for each in delays.values() for late_step in each.late
    }
    counted |= {(late_step.process, late_step.step): late_step for late_step in among}
    parts, result = stretches(case, list(counted.values()), baseline), dict(delays)
    sizes_ns: defaultdict[int, float] = defaultdict(float)
    for late_step in counted.values():
        sizes_ns[late_step.process] += late_step.late_ns
    for group in groups:
        is_exact = not any(_empties_queue(delays[process].excess) for process in group)
        grown = growth(parts, group, is_exact=is_exact) if parts else None
        if grown is None or parts is None:
            result |= _without_growth(case, group, delays)
            continue
        if any(_is_on_gpu(delays[process].excess) for process in group):
            longer = growth(with_longer_delays(parts, group, _UNSEEN), group)
            grown = longer if longer and longer.is_measured else grown
        whole_ns = max(sum(sizes_ns[process] for process in group), 1.0)
        for process in group:
            share = sum(late_step.late_ns for late_step in delays[process].late) / whole_ns
            result[process] = _costing(case, group, delays[process], grown, share=share, by_waits=True)
    return result


def _without_growth(case: Case, group: Sequence[int], delays: Mapping[int, Delays]) -> dict[int, Delays]:
    """The delays of a group where no stretch of the job shows their growth.

    A host that runs ahead does not show the waits of its GPU: each other process lost at most the delays.
    """
    if not len(case.waits.released_ns):
        return {}
    members = {case.process_key(process) for process in group}
    others = [key for key in map(case.process_key, range(case.timeline.n_processes)) if key not in members]
    return {
        process: replace(
            delays[process],
            lost_ns={
                key: max(
                    delays[process].lost_ns.get(key, 0.0), sum(late.late_ns for late in delays[process].late)
                )
                for key in others
            },
        )
        for process in group
    }


def _costing(
    case: Case, group: Sequence[int], delays: Delays, grown: Growth, *, share: float, by_waits: bool = False
) -> Delays:
    """Delays with a share of a growth as their cost, divided equally among the processes that waited.

    by_waits: the waits of the ranks limit an uncertain growth, unless hosts run ahead and do not wait.
    """
    members = {case.process_key(process) for process in group}
    waited = [key for key in delays.lost_ns if key not in members]
    waited = waited or [
        key for key in map(case.process_key, range(case.timeline.n_processes)) if key not in members
    ]
    modelled = sum(ns for key, ns in delays.min_ns.items() if key not in members)
    if _empties_queue(delays.excess):
        modelled = 0.0
    most = grown.max_ns * share
    if by_waits and _MOST * grown.max_ns > grown.min_ns and not len(case.waits.released_ns):
        # The known waits belong to the largest lateness of a step; a step with several waits has delays after it.
        late_ns = sum(late_step.late_ns for late_step in delays.late) * len(waited)
        waited_ns = sum(ns for key, ns in delays.lost_ns.items() if key not in members)
        most = min(most, waited_ns * max(grown.delay_ns * share / max(late_ns, 1.0), 1.0) or most)
    least = (
        min(grown.min_ns * share, most)
        if grown.is_measured
        else max(grown.min_ns * share, min(modelled, most))
    )
    return replace(
        delays,
        lost_ns=dict.fromkeys(waited, most / len(waited)),
        min_ns=dict.fromkeys(waited, least / len(waited)),
    )


def _empties_queue(excess: Excess) -> bool:
    """Whether most of a delay was spent in allocations and copies: these calls wait for the GPU, and the work that the
    GPU did in that time is not lost.
    """
    spent = sum(float(excess.ledger_ns[category - 1]) for category in QUEUE_EMPTYING)
    return spent >= _MOST * excess.total_ns


def _is_on_gpu(excess: Excess) -> bool:
    """Whether most of a delay was spent in waits for the rank's own GPU."""
    return float(excess.ledger_ns[Category.DEVICE - 1]) >= _MOST * excess.total_ns


def _lost_by(case: Case, lost_ns: Array) -> dict[ProcessKey, float]:
    """The lost time by process identity, for the processes that lost time."""
    kept_waiting = np.flatnonzero(lost_ns > 0)
    columns = (column[kept_waiting].tolist() for column in (case.timeline.node, case.timeline.pid, lost_ns))
    return {(node, pid): ns for node, pid, ns in zip(*columns, strict=True)}


def _n_counted(case: Case, max_waits: int) -> int:
    return max(max_waits // max(case.timeline.n_processes, 1), 1)


def _largest(late: list[LateStep], most: int) -> list[LateStep]:
    """The longest late steps."""
    return late if len(late) <= most else sorted(late, key=lambda late_step: -late_step.late_ns)[:most]


def _of_all_sizes(late: list[LateStep], most: int) -> list[LateStep]:
    """A sample of late steps, evenly from the longest to the shortest."""
    if len(late) <= most:
        return late
    by_size = sorted(late, key=lambda late_step: -late_step.late_ns)
    indices = (2 * np.arange(most) + 1) * len(late) // (2 * most)
    return [by_size[i] for i in indices.tolist()]


def device_delays(case: Case, process: int, late: list[LateStep]) -> Delays:
    """The delays of a process by its GPU. Each other process loses at most the delays."""
    delays = _delays(case, _by_process(case, late)[process], _excess_by_process(case, late)[process])
    lost = float(sum(late_step.excess_ns for late_step in late))
    others = (other for other in range(case.timeline.n_processes) if other != process)
    return replace(delays, lost_ns={case.process_key(other): lost for other in others})


def device_cost(
    case: Case,
    process: int,
    late: list[LateStep],
    *,
    among: Sequence[LateStep] = (),
    baseline: Baseline | None = None,
) -> Delays:
    """The delays of a process by its GPU, with the growth of the job's steps as their cost.

    A GPU that is late in most steps works longer in the steps between them as well. Its lateness may contain work of
    its peers, and lacks the work after the last call of a step. A multiple of it limits a measured growth; without a
    measurement, the excess is the limit.
    among: further late steps of the GPU in the case, which cause a share of the growth. baseline: quiet steps of the
    job before the case.
    """
    counted = list({late_step.step: late_step for late_step in [*late, *among]}.values())
    delays, throughout = device_delays(case, process, late), _throughout(case, process, counted)
    parts = stretches(case, throughout, baseline, slow_gpus=[process])
    grown = growth(parts, [process], is_exact=False) if parts else None
    if parts and grown and grown.is_measured:
        longer = growth(with_longer_delays(parts, [process], _AFTER_CALLS), [process], is_exact=False)
        grown = longer if longer and longer.is_measured else grown
    elif grown:
        by_excess = [replace(late_step, late_ns=late_step.excess_ns) for late_step in throughout]
        parts = stretches(case, by_excess, baseline, slow_gpus=[process])
        grown = growth(parts, [process], is_exact=False) if parts else None
    share = sum(late_step.late_ns for late_step in late) / max(
        sum(late_step.late_ns for late_step in counted), 1.0
    )
    return _costing(case, [process], delays, grown, share=share) if grown else delays


def _throughout(case: Case, process: int, late: list[LateStep]) -> list[LateStep]:
    """The late steps of a process. If these are most steps from the first to the last, also the steps between,
    each as a typical late step.
    """
    table, by_step = case.judged, {late_step.step: late_step for late_step in late}
    if len(by_step) < case.limits.steady_share * (max(by_step) - min(by_step) + 1):
        return late
    late_ns, excess_ns = (
        float(np.median([getattr(late_step, name) for late_step in late]))
        for name in ("late_ns", "excess_ns")
    )
    result = list(late)
    for i in range(*np.searchsorted(table.process, [process, process + 1]).tolist()):
        step, row = int(table.step[i]), int(table.end_row[i]) - 1
        if min(by_step) < step < max(by_step) and step not in by_step:
            result.append(replace(late[0], step=step, peak_row=row, late_ns=late_ns, excess_ns=excess_ns))
    return result


def total(parts: Iterable[Delays]) -> Delays:
    """The sum of delays, in order of time or of different processes."""
    result = list(parts)
    if len(result) == 1:
        return result[0]
    return Delays(
        late=tuple(late_step for part in result for late_step in part.late)[-MAX_KEPT:],
        n_late=sum(part.n_late for part in result),
        by_process=_added(part.by_process for part in result),
        n_incidents=sum(part.n_incidents for part in result) - _n_continued(result),
        n_rounds=sum(part.n_rounds for part in result),
        rounds=_all_rounds(result),
        max_late_ns=max(part.max_late_ns for part in result),
        since_ns=min((part.since_ns for part in result if part.since_ns is not None), default=None),
        until_ns=max((part.until_ns for part in result if part.until_ns is not None), default=None),
        excess=_in_all([part.excess for part in result]),
        lost_ns=_in_order(_added(part.lost_ns for part in result), result[0].lost_ns),
        min_ns=_in_order(_added(part.min_ns for part in result), result[0].min_ns),
        is_lower_bound=any(part.is_lower_bound for part in result),
    )


def n_incidents(steps: Array) -> int:
    """The number of runs of late steps with at most one normal step in between."""
    return int((np.diff(np.unique(steps)) > _APART_STEPS).sum()) + 1 if len(steps) else 0


def _by_process(case: Case, late: list[LateStep]) -> dict[int, list[LateStep]]:
    """The late steps of each process, in order of time."""
    groups: dict[int, list[LateStep]] = {}
    for late_step in sorted(late, key=lambda late_step: case.arrival_ns[late_step.peak_row]):
        groups.setdefault(late_step.process, []).append(late_step)
    return groups


def _excess_by_process(case: Case, late: list[LateStep]) -> dict[int, Excess]:
    """The excess of each process's late steps over their peers, from the largest late steps."""
    largest = sorted(late, key=lambda late_step: -late_step.excess_ns)[:_MAX_EXPLAINED]
    more = _more_spent(case, largest)
    knows_syscalls = not bool((case.timeline.rows["flags"] & CollectiveFlag.NO_SYSCALLS).any())
    examined = _by_process(case, largest)
    nothing = _excess(case, [], more=more, knows_syscalls=knows_syscalls)
    return {late_step.process: nothing for late_step in late} | {
        process: _excess(case, late_steps, more=more, knows_syscalls=knows_syscalls)
        for process, late_steps in examined.items()
    }


def _more_spent(case: Case, late: list[LateStep]) -> dict[int, tuple[Array, Array]]:
    """By id of a late step, the excess of the ledger and of the calls in each row of it: see ledger_excess_ns."""
    rows = [np.arange(late_step.first_row, late_step.peak_row + 1) for late_step in late]
    ledger, counts = ledger_excess_ns(
        case.timeline, case.programs, np.concatenate([np.zeros(0, np.int64), *rows])
    )
    ends = np.cumsum([len(own) for own in rows])
    parts = (np.split(each, ends[:-1]) for each in (ledger, counts))
    return {id(late_step): more for late_step, more in zip(late, zip(*parts, strict=True), strict=True)}


def _delays(case: Case, late: list[LateStep], excess: Excess) -> Delays:
    """late: late steps of one or several processes, in order of time."""
    first, last = late[0], late[-1]
    begin = case.arrival_ns[first.peak_row] - first.late_ns
    steps: dict[int, list[int]] = {}
    for late_step in late:
        steps.setdefault(late_step.process, []).append(late_step.step)
    return Delays(
        late=tuple(late),
        n_late=len(late),
        by_process={case.process_key(process): len(own) for process, own in steps.items()},
        n_incidents=sum(n_incidents(np.array(own)) for own in steps.values()),
        n_rounds=sum(late_step.n_rounds for late_step in late),
        rounds=_rounds(case, late),
        max_late_ns=max(late_step.late_ns for late_step in late),
        since_ns=wall_ns(case.trace, case.first_node, begin),
        until_ns=wall_ns(case.trace, case.first_node, float(case.arrival_ns[last.peak_row])),
        excess=excess,
    )


def _rounds(case: Case, late: list[LateStep]) -> dict[int, tuple[int, int, int]]:
    peaks = np.array([late_step.peak_row for late_step in late])
    comms, seqs = (case.timeline.rows.column(name, peaks).tolist() for name in ("comm_hash", "seq"))
    result: dict[int, tuple[int, int, int]] = {}
    for comm, seq in zip(comms, seqs, strict=True):
        n, first, last = result.get(comm, (0, seq, seq))
        result[comm] = n + 1, min(first, seq), max(last, seq)
    return result


def _excess(
    case: Case, late: list[LateStep], *, more: Mapping[int, tuple[Array, Array]], knows_syscalls: bool
) -> Excess:
    parts = [more[id(late_step)] for late_step in late]
    ledger = np.concatenate([np.zeros((0, N_CATEGORIES)), *(part for part, _ in parts)]).sum(axis=0)
    counts = np.concatenate([np.zeros((0, 4)), *(part for _, part in parts)]).sum(axis=0)
    calls, offcpu = (_within(case, table, late) for table in (case.trace.calls, case.trace.offcpu))
    host = _within(case, case.trace.host_events, late)
    host = np.concatenate([host, retransmits_to(case.trace, host)])
    return Excess(
        total_ns=float(sum(late_step.excess_ns for late_step in late)),
        ledger_ns=ledger,
        n_steps=len(late),
        n_syncs=counts[0],
        n_allocs=counts[1],
        n_copies=counts[2],
        n_launches=counts[3],
        calls=calls,
        offcpu=offcpu,
        host=host,
        knows_syscalls=knows_syscalls,
        knows_blocking=knows_syscalls or len(case.trace.offcpu) > 0,
        symbols=case.trace.symbols,
        samples=_sampled(case, late),
        stacks=case.trace.stacks,
    )


def _sampled(case: Case, late: list[LateStep]) -> Array:
    """The samples of the late process's GPU threads in the seconds that overlap its late intervals."""
    rows = case.trace.samples
    if not late or not len(rows):
        return rows[:0]
    timeline, process = case.timeline, late[0].process
    own = rows[(rows["pid"] == timeline.pid[process]) & (rows["node"] == timeline.node[process])]
    own = own[own["role"] == SampleRole.GPU]
    is_within = np.zeros(len(own), bool)
    for late_step in late:
        begin, end = timeline.ts_ns[max(late_step.first_row - 1, 0)], timeline.ts_ns[late_step.peak_row]
        is_within |= (own["ts_ns"] - _SECOND_NS < end) & (own["ts_ns"] >= begin)
    return own[is_within]


def _within(case: Case, table: Array, late: list[LateStep]) -> Array:
    """Rows of calls, offcpu or host_events of the late process that overlap one of its late intervals."""
    if not late:
        return table[:0]
    timeline, process = case.timeline, late[0].process
    own = table[(table["pid"] == timeline.pid[process]) & (table["node"] == timeline.node[process])]
    own_end = own["ts_ns"] + np.maximum(own["duration_ns"], 0)
    if "kind" in (own.dtype.names or ()):  # events counted once a second may be from any time in that second
        own_end[np.isin(own["kind"], SUMMED)] += _SECOND_NS
    is_within = np.zeros(len(own), bool)
    for late_step in late:
        begin, end = timeline.ts_ns[max(late_step.first_row - 1, 0)], timeline.ts_ns[late_step.peak_row]
        is_within |= (own["ts_ns"] < end) & (own_end > begin)
    return own[is_within]


def _n_continued(parts: list[Delays]) -> int:
    """The number of parts that continue the last incident of earlier parts of the same processes."""
    key, last_step, n = set(parts[0].by_process), _last_step(parts[0]), 0
    for part in parts[1:]:
        if part.late and last_step is not None and key == part.by_process.keys():
            n += part.late[0].step - last_step <= _APART_STEPS
        key |= part.by_process.keys()
        last_step = _last_step(part) if part.late else last_step
    return n


def _last_step(part: Delays) -> int | None:
    return part.late[-1].step if part.late else None


def _added(parts: Iterable[Mapping[ProcessKey, N]]) -> dict[ProcessKey, N]:
    result: dict[ProcessKey, N] = {}
    for part in parts:
        for key, value in part.items():
            result[key] = result[key] + value if key in result else value
    return result


def _in_order(lost_ns: dict[ProcessKey, float], first: Mapping[ProcessKey, float]) -> dict[ProcessKey, float]:
    """The lost time sorted by process; the first part is sorted if it has all processes."""
    return lost_ns if len(lost_ns) == len(first) else dict(sorted(lost_ns.items()))


def _all_rounds(parts: list[Delays]) -> dict[int, tuple[int, int, int]]:
    result: dict[int, tuple[int, int, int]] = {}
    for part in parts:
        for comm, (n, first, last) in part.rounds.items():
            before = result.get(comm, (0, first, last))
            result[comm] = before[0] + n, min(before[1], first), max(before[2], last)
    return result


def _in_all(parts: list[Excess]) -> Excess:
    return Excess(
        total_ns=sum(part.total_ns for part in parts),
        ledger_ns=np.sum([part.ledger_ns for part in parts], axis=0),
        n_steps=sum(part.n_steps for part in parts),
        n_syncs=sum(part.n_syncs for part in parts),
        n_allocs=sum(part.n_allocs for part in parts),
        n_copies=sum(part.n_copies for part in parts),
        n_launches=sum(part.n_launches for part in parts),
        calls=_longest([part.calls for part in parts]),
        offcpu=_longest([part.offcpu for part in parts]),
        host=_longest([part.host for part in parts]),
        knows_syscalls=all(part.knows_syscalls for part in parts),
        knows_blocking=all(part.knows_blocking for part in parts),
        symbols=max((part.symbols for part in parts), key=len),
        samples=np.concatenate([part.samples for part in parts]),
        stacks=max((part.stacks for part in parts), key=len),
    )


def _longest(tables: list[Array]) -> Array:
    """The longest rows of all tables, in order."""
    rows = np.concatenate([table for table in tables if len(table)] or tables[:1])
    return rows if len(rows) <= MAX_KEPT else rows[np.sort(np.argsort(-rows["duration_ns"])[:MAX_KEPT])]
