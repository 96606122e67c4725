"""The findings on a case: faults as data, before they become verdicts."""

from dataclasses import dataclass, field

from stallscope.diagnose.arrays.parallel import both
from stallscope.diagnose.cost.absorption import Absorption, absorption
from stallscope.diagnose.gpu.device_findings import on_device, with_costly_gpus
from stallscope.diagnose.gpu.slow_gpu import SlowDevice
from stallscope.diagnose.hangs.mismatched_rounds import Mismatch, mismatches
from stallscope.diagnose.lateness.host_delays import with_host_delays
from stallscope.diagnose.lateness.late_steps import LateStep, with_states
from stallscope.diagnose.lateness.recurrence import recurring
from stallscope.diagnose.lateness.together import with_whole_nodes
from stallscope.diagnose.lateness.uneven_work import MovingLateness, SlowStage, moving, slow_stage
from stallscope.diagnose.timeline.case import Case


@dataclass(frozen=True)
class Findings:
    """The faults of a case, before they become verdicts.

    mismatches: rounds that ranks entered with different calls. late: all late steps. named: the late steps of each
    named process. device: slow GPUs by process. stage: a stage with more work. uneven: late steps of changing ranks;
    is_on_device: these are delays of the GPUs. gpu_work: GPUs that do additional work in some steps.
    differing: GPUs that are slower by a small share of a step, as GPUs of a model differ. often_last: GPUs among uneven
    work that are slow, or have more work in most steps.
    absorption: recurring late steps that cost nothing, or perhaps nothing; their ranks are not named.
    """

    case: Case
    mismatches: list[Mismatch]
    late: list[LateStep]
    named: dict[int, list[LateStep]]
    device: dict[int, SlowDevice]
    stage: SlowStage | None
    uneven: MovingLateness | None
    is_on_device: bool = False
    gpu_work: dict[int, SlowDevice] = field(default_factory=dict)
    differing: dict[int, SlowDevice] = field(default_factory=dict)
    often_last: dict[int, SlowDevice] = field(default_factory=dict)
    absorption: Absorption = field(default_factory=Absorption)


def findings(case: Case) -> Findings:
    """The findings on a case with time ledgers."""
    timeline, table, limits = case.timeline, case.judged, case.limits
    all_late, odd_rounds = both(
        lambda: [*case.late_steps],
        lambda: mismatch_findings(case),
        n=len(timeline.rows),
    )
    all_late = with_host_delays(
        timeline, case.programs, table, usual=case.pace, known=all_late, limits=limits
    )
    all_late = with_states(timeline, table, all_late)
    named = recurring(
        all_late,
        timeline.n_processes,
        min_ns=case.pace.min_ns,
        limits=limits,
        node=timeline.node,
        seen=case.table.seen(timeline.n_processes),
    )
    named = with_whole_nodes(named, all_late, timeline.node)
    gpus = with_costly_gpus(case, on_device(case, all_late))
    absorbed = absorption(case, named, slow_gpus={process: gpu.late for process, gpu in gpus.slow.items()})
    named = {process: late for process, late in named.items() if not absorbed.has(process)}
    unexplained = [
        late for late in all_late if late.process not in gpus.slow and not absorbed.has(late.process)
    ]
    uneven = moving(timeline, unexplained, named, table=table, min_ns=case.pace.min_ns, limits=limits)
    return Findings(
        case=case,
        mismatches=odd_rounds,
        late=all_late,
        named=named,
        device=gpus.slow,
        stage=slow_stage(timeline, case.programs, table, step_ns=case.step_ns, limits=limits) or gpus.stage,
        uneven=uneven or gpus.uneven,
        is_on_device=uneven is None,
        gpu_work=gpus.more_work,
        differing=gpus.differing,
        often_last={process: device for process, device in gpus.often_last.items() if process not in named},
        absorption=absorbed,
    )


def mismatch_findings(case: Case) -> list[Mismatch]:
    """The rounds that ranks entered with different calls."""
    return mismatches(case.timeline, case.programs, case.matched, arrival_ns=case.arrival_ns)
