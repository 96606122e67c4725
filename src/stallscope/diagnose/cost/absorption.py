"""Host delays without a cost, because the GPUs' queues absorb them, and host delays for which this is unknown.

A delay is absorbed if steps with the delay last no longer than other steps. If every step has the delay, the end of a
step shows whether absorption is possible: a GPU with more queued work than the delay may have continued to work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stallscope.diagnose.cost.absorbed import QUEUE_EMPTYING, HostTimes, passed_on
from stallscope.diagnose.cost.step_growth import Growth, growth, stretches, without_others
from stallscope.diagnose.lateness.late_steps import LateStep, spent_ns
from stallscope.diagnose.timeline.case import Case

_PASSED_ON = 0.2  # share of a delay, by the model of the GPU's queue, from which the delay is not absorbed
_UNSURE = 0.05  # share of the delays; a minimum cost up to this share proves nothing
_MOST = 0.5  # share of the delays

Late = Mapping[int, Sequence[LateStep]]


@dataclass(frozen=True)
class Absorption:
    """Late steps by process. proved: they cost nothing. possible: their cost is unknown and may be nothing."""

    proved: dict[int, Sequence[LateStep]] = field(default_factory=dict)
    possible: dict[int, Sequence[LateStep]] = field(default_factory=dict)

    def has(self, process: int) -> bool:
        """Whether the delays of a process certainly or possibly cost nothing."""
        return process in self.proved or process in self.possible


def absorption(
    case: Case, named: Late, *, slow_gpus: Late | None = None, is_exact: bool = True
) -> Absorption:
    """The absorbed delays of ranks that are late repeatedly.

    named: their late steps by process. slow_gpus: late steps of slow GPUs, whose steps do not show the cost of other
    processes' delays. is_exact: see growth(); False for delays of GPUs.

    Absorbed delays do not make steps longer, so the remaining processes are compared again without them.
    """
    result, left = Absorption(), dict(named)
    while left:
        gpus = {process: late for process, late in (slow_gpus or {}).items() if process not in left}
        found = _absorbed_alone(case, left, gpus, is_exact=is_exact)
        if not found.proved and not found.possible:
            break
        result = Absorption({**result.proved, **found.proved}, {**result.possible, **found.possible})
        left = {process: late for process, late in left.items() if not found.has(process)}
    return result


def _absorbed_alone(case: Case, named: Late, slow_gpus: Late, *, is_exact: bool) -> Absorption:
    """The absorbed delays where each process is compared without the steps of the other named processes."""
    late = [
        late_step for by_process in (named, slow_gpus) for own in by_process.values() for late_step in own
    ]
    parts = stretches(case, late, slow_gpus={*slow_gpus, *(() if is_exact else named)})
    if parts is None:
        return Absorption()
    least = case.limits.min_late_steps
    grown = {
        process: growth(
            without_others(parts, process, n_least=least),
            [process],
            is_exact=is_exact and not _empties_queue(case, named[process]),
            is_linear=True,
        )
        for process in named
        if process in parts.delay_ns and parts.beyond_steps(process) <= _UNSURE
    }
    known = {process: each for process, each in grown.items() if each is not None}
    proved = {process for process, each in known.items() if _is_absorbed(case, each, named[process])}
    possible = {
        process
        for process, each in known.items()
        if process not in proved and each.min_ns <= _UNSURE * each.delay_ns
    }
    return Absorption(
        proved={process: named[process] for process in proved},
        possible={process: named[process] for process in possible if _may_be_absorbed(case, named[process])},
    )


def _empties_queue(case: Case, late: Sequence[LateStep]) -> bool:
    """Whether most of the delays were spent in allocations and copies: these calls wait for the GPU first."""
    emptying_ns = sum(float(spent_ns(case.timeline, late, category).sum()) for category in QUEUE_EMPTYING)
    return emptying_ns >= _MOST * sum(late_step.excess_ns for late_step in late)


def _is_absorbed(case: Case, grown: Growth, late: Sequence[LateStep]) -> bool:
    """Whether steps with the delays last about as long as others, relative to the delay and to a step."""
    limits, n_waiting = case.limits, max(case.timeline.n_processes - 1, 1)
    each_ns = grown.max_ns / n_waiting / max(len(late), 1)
    is_short = each_ns <= limits.late_step_share * case.step_ns
    return grown.is_measured and is_short and grown.max_ns <= limits.elongation * grown.delay_ns


def _may_be_absorbed(case: Case, late: Sequence[LateStep]) -> bool:
    """Whether the GPU had more remaining work, when the host began to wait for it, than the host was late."""
    table, process = case.judged, late[0].process
    here = slice(*np.searchsorted(table.process, [process, process + 1]))
    after = np.searchsorted(table.step[here], [late_step.step + 1 for late_step in late])
    waited = np.append(table.wait_ns[here], 0)[np.minimum(after, len(table.step[here]))]
    delay = np.array([late_step.delay_ns for late_step in late])
    times = HostTimes.of(case.timeline, case.programs, list(late))
    parts = passed_on(case.timeline, times, list(late))
    return bool(np.median(waited - delay) >= 0 and np.median(parts) < _PASSED_ON)
