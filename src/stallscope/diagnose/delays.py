"""Late steps summed up: all that a verdict on them needs, so that their rows need not be kept.

Sums of two stretches of time add up to that of both; a stream of events keeps them instead of its past.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce

import numpy as np

from stallscope.diagnose.blame import LateStep
from stallscope.diagnose.case import Case
from stallscope.diagnose.causes import Excess
from stallscope.diagnose.clocks import wall_ns
from stallscope.diagnose.cost import Waits, cost
from stallscope.diagnose.excess import ledger_excess_ns
from stallscope.events.layout import Array
from stallscope.events.names import SUMMED, CollectiveFlag

MOST_KEPT = 1024
"""Late steps, and rows of calls and offcpu, that a sum keeps one by one: the latest, the longest."""

_MANY_PARTS = 64
_MOST_EXPLAINED = 200  # late steps whose ledger is looked at: the largest ones
_SECOND_NS = 1_000_000_000
_MOST_WAITS = 1 << 21  # late steps x processes that are looked at to tell the cost: some seconds of work
_APART_STEPS = 2  # late steps with at most one good step between them are one incident

Who = tuple[int, int]
"""A process beyond one case: node and pid."""


@dataclass(frozen=True)
class Delays:
    """Late steps, in order of time, and their sums.

    late: the latest MOST_KEPT; only what does not point to rows means anything. n_late: all of them. by_process: how
    many of each process. n_rounds: late rounds. rounds: by communicator how many of the late steps peaked there, and
    the first and last round of those. max_late_ns: the largest lateness. since_ns, until_ns: wall time, None unknown.
    lost_ns: by process, time it was kept waiting; is_lower_bound: something of that could not be counted.
    """

    late: tuple[LateStep, ...]
    n_late: int
    by_process: Mapping[Who, int]
    n_incidents: int
    n_rounds: int
    rounds: Mapping[int, tuple[int, int, int]]
    max_late_ns: float
    since_ns: int | None
    until_ns: int | None
    excess: Excess
    lost_ns: Mapping[Who, float] = field(default_factory=dict)
    is_lower_bound: bool = False

    @property
    def steps(self) -> Array:
        """Of the late steps kept: int64."""
        return np.array([one.step for one in self.late], np.int64)

    @property
    def sizes_ns(self) -> Array:
        """Their own excess: float64."""
        return np.array([one.excess_ns for one in self.late])

    @property
    def comm_hash(self) -> int:
        """The communicator in which most of them peaked."""
        return max(self.rounds, key=lambda comm: self.rounds[comm][0])


def delays_by_process(
    case: Case, late: Iterable[LateStep], *, among: Iterable[LateStep] = ()
) -> dict[int, Delays]:
    """The delays of each process, with what they cost the others by waiting.

    among: further late steps, which share in what the others waited.
    """
    every = list(late)
    all_late = {(one.process, one.step): one for one in [*every, *among]}
    if not every:
        return {}
    counted = _counted(every, case.line.n_processes)
    among_all = list(all_late.values())
    waits = Waits.of(
        case.line, case.met, case.arrival_ns, late=counted, step=case.plan.step, step_ns=case.step_ns
    )
    is_counted = {id(one) for one in counted}
    found = {}
    for process, (delays, mine) in _by_process(case, every).items():
        some = [one for one in mine if id(one) in is_counted]
        with_cost = _with_cost(case, delays, some, among=among_all, waits=waits) if some else delays
        is_lower_bound = with_cost.is_lower_bound or len(some) < len(mine)
        found[process] = replace(with_cost, is_lower_bound=is_lower_bound)
    return found


def _counted(late: list[LateStep], n_processes: int) -> list[LateStep]:
    """Those whose cost is worked out: all, but of very many on very many processes the largest ones."""
    most = max(_MOST_WAITS // n_processes, 1)
    return late if len(late) <= most else sorted(late, key=lambda one: -one.late_ns)[:most]


def device_delays(case: Case, process: int, late: list[LateStep]) -> Delays:
    """The delays of a process by its GPU: each of its peers loses as much."""
    delays, _ = _by_process(case, late)[process]
    peers = np.flatnonzero(case.plan.program == case.plan.program[process])
    lost = float(sum(one.excess_ns for one in late))
    return replace(
        delays,
        lost_ns={case.who(int(peer)): lost for peer in peers if peer != process},
        is_lower_bound=True,
    )


def total(parts: Iterable[Delays]) -> Delays:
    """The sum of one or more delays, given in order of time or of different processes."""
    found = list(parts)
    while len(found) > _MANY_PARTS:  # two by two: each sum copies what it has so far
        pairs = zip(found[::2], found[1::2], strict=False)
        found = [_plus(*pair) for pair in pairs] + (found[-1:] if len(found) % 2 else [])
    return reduce(_plus, found)


def n_incidents(steps: Array) -> int:
    """Runs of late steps with at most one good step between them."""
    return int((np.diff(np.unique(steps)) > _APART_STEPS).sum()) + 1 if len(steps) else 0


def _by_process(case: Case, late: list[LateStep]) -> dict[int, tuple[Delays, list[LateStep]]]:
    largest = {id(one) for one in sorted(late, key=lambda one: -one.excess_ns)[:_MOST_EXPLAINED]}
    knows_syscalls = not bool((case.line.rows["flags"] & CollectiveFlag.NO_SYSCALLS).any())
    groups: dict[int, list[LateStep]] = {}
    for one in sorted(late, key=lambda one: case.arrival_ns[one.peak_row]):
        groups.setdefault(one.process, []).append(one)
    return {
        process: (
            _delays(case, mine, [one for one in mine if id(one) in largest], knows_syscalls=knows_syscalls),
            mine,
        )
        for process, mine in groups.items()
    }


def _delays(case: Case, late: list[LateStep], looked_at: list[LateStep], *, knows_syscalls: bool) -> Delays:
    first, last = late[0], late[-1]
    begin = case.arrival_ns[first.peak_row] - first.late_ns
    who = case.who(first.process)
    return Delays(
        late=tuple(late),
        n_late=len(late),
        by_process={who: len(late)},
        n_incidents=n_incidents(np.array([one.step for one in late])),
        n_rounds=sum(one.n_rounds for one in late),
        rounds=_rounds(case, late),
        max_late_ns=max(one.late_ns for one in late),
        since_ns=wall_ns(case.trace, case.first_node, begin),
        until_ns=wall_ns(case.trace, case.first_node, float(case.arrival_ns[last.peak_row])),
        excess=_excess(case, looked_at, knows_syscalls=knows_syscalls),
    )


def _rounds(case: Case, late: list[LateStep]) -> dict[int, tuple[int, int, int]]:
    found: dict[int, tuple[int, int, int]] = {}
    for one in late:
        row = case.line.rows[one.peak_row]
        comm, seq = int(row["comm_hash"]), int(row["seq"])
        n, first, last = found.get(comm, (0, seq, seq))
        found[comm] = n + 1, min(first, seq), max(last, seq)
    return found


def _with_cost(
    case: Case, delays: Delays, late: list[LateStep], *, among: list[LateStep], waits: Waits
) -> Delays:
    spent = cost(
        case.line,
        case.met,
        case.arrival_ns,
        waits=waits,
        late=late,
        among=among,
        step_ns=case.step_ns,
        limits=case.limits,
    )
    kept_waiting = np.flatnonzero(spent.lost_ns > 0)
    places = (column[kept_waiting].tolist() for column in (case.line.node, case.line.pid, spent.lost_ns))
    lost = {(node, pid): ns for node, pid, ns in zip(*places, strict=True)}
    return replace(delays, lost_ns=lost, is_lower_bound=spent.is_lower_bound)


def _excess(case: Case, late: list[LateStep], *, knows_syscalls: bool) -> Excess:
    spans = [np.arange(one.first_row, one.peak_row + 1) for one in late]
    ledger, counts = ledger_excess_ns(case.line, case.plan, np.concatenate([np.zeros(0, np.int64), *spans]))
    calls, offcpu = (_within(case, table, late) for table in (case.trace.calls, case.trace.offcpu))
    host = _within(case, case.trace.host_events, late)
    return Excess(
        total_ns=float(sum(one.excess_ns for one in late)),
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
        symbols=case.trace.symbols,
    )


def _within(case: Case, table: Array, late: list[LateStep]) -> Array:
    """Rows of calls, offcpu or host_events of the late process that overlap one of its late intervals."""
    if not late:
        return table[:0]
    line, process = case.line, late[0].process
    own = table[(table["pid"] == line.pid[process]) & (table["node"] == line.node[process])]
    own_end = own["ts_ns"] + np.maximum(own["duration_ns"], 0)
    if "kind" in (own.dtype.names or ()):  # what is counted once a second may have been at any time in it
        own_end[np.isin(own["kind"], SUMMED)] += _SECOND_NS
    is_within = np.zeros(len(own), bool)
    for one in late:
        begin, end = line.ts_ns[max(one.first_row - 1, 0)], line.ts_ns[one.peak_row]
        is_within |= (own["ts_ns"] < end) & (own_end > begin)
    return own[is_within]


def _plus(one: Delays, other: Delays) -> Delays:
    same = one.by_process.keys() == other.by_process.keys()
    goes_on = same and bool(one.late and other.late)
    goes_on = goes_on and other.late[0].step - one.late[-1].step <= _APART_STEPS
    return Delays(
        late=(*one.late, *other.late)[-MOST_KEPT:],
        n_late=one.n_late + other.n_late,
        by_process=dict(Counter(one.by_process) + Counter(other.by_process)),
        n_incidents=one.n_incidents + other.n_incidents - goes_on,
        n_rounds=one.n_rounds + other.n_rounds,
        rounds=_both_rounds(one.rounds, other.rounds),
        max_late_ns=max(one.max_late_ns, other.max_late_ns),
        since_ns=min(_known(one.since_ns, other.since_ns), default=None),
        until_ns=max(_known(one.until_ns, other.until_ns), default=None),
        excess=_both(one.excess, other.excess),
        lost_ns=_added(one.lost_ns, other.lost_ns),
        is_lower_bound=one.is_lower_bound or other.is_lower_bound,
    )


def _known(*values: int | None) -> list[int]:
    return [value for value in values if value is not None]


def _added(one: Mapping[Who, float], other: Mapping[Who, float]) -> dict[Who, float]:
    found = dict(one)
    for who, ns in other.items():
        found[who] = found.get(who, 0.0) + ns
    return found if len(found) == len(one) else dict(sorted(found.items()))


def _both_rounds(
    one: Mapping[int, tuple[int, int, int]], other: Mapping[int, tuple[int, int, int]]
) -> dict[int, tuple[int, int, int]]:
    found = dict(one)
    for comm, (n, first, last) in other.items():
        before = found.get(comm, (0, first, last))
        found[comm] = before[0] + n, min(before[1], first), max(before[2], last)
    return found


def _both(one: Excess, other: Excess) -> Excess:
    return Excess(
        total_ns=one.total_ns + other.total_ns,
        ledger_ns=one.ledger_ns + other.ledger_ns,
        n_steps=one.n_steps + other.n_steps,
        n_syncs=one.n_syncs + other.n_syncs,
        n_allocs=one.n_allocs + other.n_allocs,
        n_copies=one.n_copies + other.n_copies,
        n_launches=one.n_launches + other.n_launches,
        calls=_longest(one.calls, other.calls),
        offcpu=_longest(one.offcpu, other.offcpu),
        host=_longest(one.host, other.host),
        knows_syscalls=one.knows_syscalls and other.knows_syscalls,
        symbols=max(one.symbols, other.symbols, key=len),
    )


def _longest(one: Array, other: Array) -> Array:
    rows = np.concatenate([one, other])
    return rows if len(rows) <= MOST_KEPT else rows[np.sort(np.argsort(-rows["duration_ns"])[:MOST_KEPT])]
