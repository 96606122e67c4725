"""What a case shows, before it is put in words."""

from dataclasses import dataclass, field

from stallscope.diagnose.arrays.parallel import both
from stallscope.diagnose.cost.absorption import Absorption, absorption
from stallscope.diagnose.gpu.device_findings import on_device, with_costly_gpus
from stallscope.diagnose.gpu.slow_gpu import SlowDevice
from stallscope.diagnose.hangs.mismatch import Mismatch, mismatches
from stallscope.diagnose.lateness.imbalance import Moving, SlowStage, moving, slow_stage
from stallscope.diagnose.lateness.late_steps import LateStep, late_steps
from stallscope.diagnose.lateness.recurrence import recurring
from stallscope.diagnose.timeline.case import Case


@dataclass(frozen=True)
class Findings:
    """What a case shows, before it is put in words.

    mismatches: rounds entered differently. late: all late steps. named: those of each rank to name. device: slow
    GPUs by process. stage: a stage with more work. uneven: late steps that no rank owns; is_on_device: of the GPUs.
    gpu_work: GPUs that do additional work in some steps.
    absorption: late steps that recur and cost nothing, or perhaps nothing; their ranks are not named.
    """

    case: Case
    mismatches: list[Mismatch]
    late: list[LateStep]
    named: dict[int, list[LateStep]]
    device: dict[int, SlowDevice]
    stage: SlowStage | None
    uneven: Moving | None
    is_on_device: bool = False
    gpu_work: dict[int, SlowDevice] = field(default_factory=dict)
    absorption: Absorption = field(default_factory=Absorption)


def findings(case: Case) -> Findings:
    """What a case with ledgers shows."""
    line, table, limits = case.line, case.judged, case.limits
    found, odd_rounds = both(
        lambda: late_steps(line, case.met, table, program=case.plan.program, usual=case.pace, limits=limits),
        lambda: mismatch_findings(case),
        n=len(line.rows),
    )
    named = recurring(found, line.n_processes, least_ns=case.pace.least_ns, limits=limits, node=line.node)
    absorbed = absorption(case, named)
    named = {process: late for process, late in named.items() if not absorbed.has(process)}
    gpus = with_costly_gpus(case, on_device(case, found))
    unexplained = [late for late in found if late.process not in gpus.slow and not absorbed.has(late.process)]
    uneven = moving(line, unexplained, named, table=table, least_ns=case.pace.least_ns, limits=limits)
    return Findings(
        case=case,
        mismatches=odd_rounds,
        late=found,
        named=named,
        device=gpus.slow,
        stage=slow_stage(line, case.plan, table, step_ns=case.step_ns, limits=limits) or gpus.stage,
        uneven=uneven or gpus.uneven,
        is_on_device=uneven is None,
        gpu_work=gpus.more_work,
        absorption=absorbed,
    )


def mismatch_findings(case: Case) -> list[Mismatch]:
    """The rounds that ranks entered differently."""
    return mismatches(case.line, case.plan, case.met, arrival_ns=case.arrival_ns)
