"""The input of every stage of the diagnosis: a trace as arrays, before the search for culprits."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stallscope.diagnose.arrays.parallel import both
from stallscope.diagnose.arrays.row_order import flagged
from stallscope.diagnose.cost.waiting import Waits
from stallscope.diagnose.lateness.late_steps import LateStep, Pace, late_steps, pace
from stallscope.diagnose.lateness.slowdown import Slowdown, StepTimes, part_slowdown, slowdown
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.annotated_steps import annotated_steps
from stallscope.diagnose.timeline.clocks import Clocks, aligned
from stallscope.diagnose.timeline.excess import excess_ns, held_ns
from stallscope.diagnose.timeline.programs import Programs, programs_of
from stallscope.diagnose.timeline.rounds import Rounds, rounds
from stallscope.diagnose.timeline.step_table import Cells, cells, judged
from stallscope.diagnose.timeline.timeline import NO_WAIT_NS, Timeline, timeline_of
from stallscope.events.layout import Array
from stallscope.events.names import CollectiveFlag
from stallscope.events.trace import Trace

_SYNCED_SHARE = 0.5  # share of the steps with a synchronise call from which the hosts do not run ahead


@dataclass(frozen=True)
class Case:
    """A trace in order. table: all steps; judged: the steps after the warm-up."""

    trace: Trace
    timeline: Timeline
    clocks: Clocks
    programs: Programs
    matched: Rounds
    table: Cells
    judged: Cells
    pace: Pace
    limits: Thresholds
    usd_per_gpu_hour: float | None

    @cached_property
    def waits(self) -> Waits:
        """The waits from which the cost of late steps is computed."""
        return Waits.of(
            self.timeline,
            self.arrival_ns,
            step=self.programs.step,
            step_ns=self.step_ns,
            first_step=int(self.judged.step[0]) if len(self.judged.step) else 0,
        )

    @cached_property
    def hosts_run_ahead(self) -> bool:
        """Whether the processes neither synchronise with their GPUs nor wait for them in most steps."""
        timeline, table = self.timeline, self.judged
        if not len(table.step):
            return False
        n_syncs = timeline.rows.column("n_syncs", np.arange(len(timeline.rows))).astype(np.int64)
        is_sync = (np.diff(n_syncs, prepend=n_syncs[:1]) > 0) & ~timeline.is_first
        is_sync |= timeline.wait_ns > NO_WAIT_NS
        has_sync = table.sums(is_sync.astype(np.int64)) > 0
        n_steps, n_synced = (
            np.bincount(table.process, weights=weights, minlength=timeline.n_processes)
            for weights in (None, has_sync)
        )
        is_known = n_steps > 0
        return bool(np.median(n_synced[is_known] / n_steps[is_known]) < _SYNCED_SHARE)

    @cached_property
    def late_steps(self) -> tuple[LateStep, ...]:
        """The late steps of all processes, by their arrivals."""
        found = late_steps(
            self.timeline,
            self.matched,
            self.judged,
            program=self.programs.program,
            usual=self.pace,
            limits=self.limits,
        )
        return tuple(found)

    @cached_property
    def step_times(self) -> StepTimes:
        """The times of the judged steps."""
        return StepTimes.of(self.timeline, self.judged, self.limits)

    @cached_property
    def change(self) -> Slowdown | None:
        """The lasting change of the steps of all ranks, which late ranks may have caused."""
        data = self.timeline, self.step_times, self.limits
        return slowdown(*data) or part_slowdown(*data)

    @property
    def arrival_ns(self) -> Array:
        """Arrivals of all rows on the clock of the first node."""
        return self.clocks.arrival_ns

    @property
    def first_node(self) -> int:
        """The node whose clock arrival_ns uses."""
        return int(self.timeline.node.min())

    @property
    def step_ns(self) -> float:
        """The median step."""
        return self.pace.step_ns

    @property
    def observed_ns(self) -> float:
        """From the first arrival to the last."""
        if not len(self.timeline.rows):
            return 0.0
        return float(self.arrival_ns.max() - self.arrival_ns.min())

    @property
    def now_ns(self) -> int:
        """The end of the last capture of any node, on the common clock."""
        tied = self.clocks.offsets
        ends = [
            self.clocks.common_ns(node, end)
            for node, end in enumerate(self.trace.ends_ns)
            if end >= 0 and node in tied
        ]
        return max([*ends, int(self.arrival_ns.max(initial=0))])

    def process_key(self, process: int) -> tuple[int, int]:
        """The identity of a process outside this case: node and pid."""
        return int(self.timeline.node[process]), int(self.timeline.pid[process])


def case_of(
    trace: Trace, limits: Thresholds, usd_per_gpu_hour: float | None, *, is_numbered: bool = False
) -> Case:
    """The case of a trace. usd_per_gpu_hour: None where no price is known. is_numbered: see timeline."""
    timeline = timeline_of(trace, is_numbered=is_numbered)
    annotated = annotated_steps(trace, timeline)
    n = len(timeline.rows)
    clocks, plan = both(lambda: aligned(timeline, trace), lambda: programs_of(timeline, annotated), n=n)

    def on_host() -> tuple[Array, Array]:
        excess = excess_ns(timeline, plan, timeline.host_ns)
        return excess, held_ns(timeline, plan, excess, min_ns=limits.min_late_ns)

    (met, of_self), (of_host, held) = both(
        lambda: (rounds(timeline, clocks, limits), excess_ns(timeline, plan, timeline.self_ns)), on_host, n=n
    )
    table = cells(timeline, plan, met, excess=(of_self, of_host), held_ns=held)
    counted = judged(table, timeline, limits, is_excerpt=_is_excerpt(timeline, annotated))
    return Case(
        trace=trace,
        timeline=timeline,
        clocks=clocks,
        programs=plan,
        matched=met,
        table=table,
        judged=counted,
        pace=pace(timeline, counted, limits),
        limits=limits,
        usd_per_gpu_hour=usd_per_gpu_hour,
    )


def _is_excerpt(timeline: Timeline, annotated: Array | None) -> bool:
    """Whether the trace begins after the warm-up: attached late to all ranks, or annotated steps of a profiler."""
    if (
        len(timeline.rows)
        and flagged(timeline.rows["flags"], CollectiveFlag.LATE_ATTACH)[timeline.first[:-1]].all()
    ):
        return True
    is_profile = bool(len(timeline.rows)) and bool(
        flagged(timeline.rows["flags"], CollectiveFlag.NO_SYSCALLS).all()
    )
    return is_profile and annotated is not None and bool((annotated >= 0).any())
