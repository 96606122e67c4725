"""Candidate verdicts of an evaluation, each with the key of the incident to which it belongs."""

from dataclasses import replace

from stallscope.diagnose.cost.delays import Delays, delays_by_process, total
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.stream import evaluation as evaluations
from stallscope.diagnose.stream.evaluation import Evaluation
from stallscope.diagnose.stream.history import MIN_QUIET_STEPS, History, quiet_steps
from stallscope.diagnose.stream.incidents import UNCERTAIN, Candidate, Incidents, worded
from stallscope.diagnose.stream.job_members import ProcessKey
from stallscope.diagnose.verdicts import (
    change,
    claimed_rank,
    device,
    imbalance,
    inconclusive,
    mismatch,
    straggler,
)
from stallscope.diagnose.verdicts._late import between, late_ranks

RANK, MOVES, STAGE, SLOW, HANG, FAILED = "rank", "moves", "stage", "slow", "hang", "failed"
CLAIMED = "claimed"
_CONFIRM_STEPS = 4  # an incident opens when its candidate is still there this many steps later
_CONFIRM_SMALL_STEPS = 16  # hosts vary over time, so small delays must persist longer
_CONFIRM_STAGE_STEPS = 32  # stages of few ranks vary over time as well
_STILL_SLOW = 0.8  # share of the growth that was reported first


def of_evaluation(
    result: Evaluation,
    history: History,
    incidents: Incidents,
    *,
    is_whole: bool = False,
    is_periodic: bool = True,
) -> list[Candidate]:
    """The candidate verdicts of an evaluation, each with the delays of its own incident only.

    is_whole: no further rows will arrive. is_periodic: the evaluation was not triggered by one rank; then it also
    checks for a slowdown of all ranks, which takes long.
    """
    faults, case = result.faults, result.case
    if claims := claimed_rank.verdicts(case):
        return [claimed(verdict) for verdict in claims]
    known = {
        process
        for process in range(case.timeline.n_processes)
        for candidate in [incidents.of(RANK, frozenset([case.process_key(process)]))]
        if candidate is not None and candidate.candidate.verdict.kind == "straggler"
    }
    ranks = _ranks(result, history, known, only_since=True, is_whole=is_whole)
    taken = {
        p
        for p in range(case.timeline.n_processes)
        for candidate in ranks
        if case.process_key(p) in candidate.processes
    }
    devices = [
        candidate
        for candidate in _devices(result, history, only_since=True)
        if not candidate.processes & _processes(result, taken)
    ]
    out = [
        *(mismatched(worded(verdict)) for verdict in mismatch.verdicts(case, faults.mismatches)),
        *ranks,
        *devices,
    ]
    if faults.stage:
        verdict = worded(stage(result, history))
        out.append(Candidate(STAGE, frozenset(), verdict, -1, MIN_QUIET_STEPS, _CONFIRM_STAGE_STEPS))
    if faults.uneven:
        out += _moves(result, history, named=taken, only_since=True)
    out += _once(result, history)
    if not (is_periodic or is_whole):
        return out
    out += _often_last(result)
    if out:
        return out + _slow(result, incidents)
    return _links(result) or _slow(result, incidents) or _uncertain(result)


def report(
    result: Evaluation, history: History, incidents: Incidents, *, standstill: list[Verdict]
) -> list[Verdict]:
    """All verdicts on a job whose first rows have been dropped, including closed incidents.

    A finding that only the remaining rows show is reported if it has an open incident.
    """
    faults = result.faults
    if claims := claimed_rank.verdicts(result.case):
        return [worded(verdict) for verdict in claims]
    ranks = _ranks(result, history, set(), only_since=False, is_whole=False)
    taken = frozenset(processes for candidate in ranks for processes in candidate.processes)
    rest = [
        candidate
        for candidate in _devices(result, history, only_since=False)
        if not candidate.processes & taken
    ]
    if faults.stage:
        rest.append(Candidate(STAGE, frozenset(), stage(result, history), -1, 0))
    if faults.uneven:
        rest += _moves(result, history, named=set(faults.named), only_since=False)
    now = [
        *mismatch.verdicts(result.case, faults.mismatches),
        *([] if faults.mismatches else standstill),
        *straggler.costliest_first([candidate.verdict for candidate in ranks]),
        *(candidate.verdict for candidate in rest if incidents.of(candidate.sort, candidate.processes)),
        *(candidate.verdict for candidate in _once(result, history)),
    ]
    reported = {_key(verdict) for verdict in now}
    before = [*history.over, *(candidate.candidate.verdict for candidate in incidents.open)]
    now += [verdict for verdict in before if _key(verdict) not in reported and _is_relevant(result, verdict)]
    return [worded(verdict) for verdict in now]


def claimed(verdict: Verdict) -> Candidate:
    """Several processes with the same rank: no other verdict on the job is reliable."""
    return Candidate(CLAIMED, frozenset(), worded(verdict), -1, MIN_QUIET_STEPS)


def mismatched(verdict: Verdict) -> Candidate:
    """The candidate for a round that ranks entered with different calls."""
    sort = f"mismatch {verdict.comm_hash} {verdict.first_round}"
    return Candidate(sort, frozenset(), verdict, -1, MIN_QUIET_STEPS)


def stage(result: Evaluation, history: History) -> Verdict:
    """The verdict on a slow stage, with its cost before the remaining rows."""
    assert result.faults.stage is not None
    verdict = imbalance.stage(result.case, result.faults.stage)
    if not history.is_trimmed or verdict.cost is None:
        return verdict
    share = result.examined.n_steps / max(result.faults.stage.n_steps, 1)
    spent = between(
        result.case,
        0.0,
        verdict.cost.may_be_gpu_seconds * share,
        observed_ns=result.examined.observed_ns,
    )
    return replace(verdict, cost=spent, evidence=replace(verdict.evidence, n_steps=result.examined.n_steps))


def _ranks(
    result: Evaluation, history: History, known: set[int], *, only_since: bool, is_whole: bool
) -> list[Candidate]:
    """Candidates for late ranks.

    known: processes with an open incident; they stay named, late or not. is_whole: the rows are complete, so no further
    evaluation needs to confirm a name.
    """
    case, least = result.case, result.case.limits.min_late_steps
    held = evaluations.parts(result, history.late, result.live, only_since=only_since)
    n_late = {p: sum(part.n_late for part in kept) + len(late) for p, (kept, late) in held.items()}
    named = {p for p in result.faults.named if is_whole or p in result.firm}
    chosen = {p for p in named if n_late.get(p, 0) >= least} | (known & held.keys())
    delays = evaluations.summed(result, held, sorted(chosen))
    groups = straggler.grouped(case, result.faults.named, {process: delays[process] for process in chosen})
    more, out = groups.more_work, []
    for group in [*([more] if more else []), *groups.late]:
        if groups.unclear.issuperset(group) and not (is_whole or known.issuperset(group)):
            continue  # later steps decide whether these ranks are at fault or have more work
        if group is more:
            verdict = imbalance.more_work(case, group, delays, examined=result.examined)
        else:
            verdict = late_ranks(case, group, delays, examined=result.examined)
        if straggler.is_nothing(case, verdict, result.examined) and not known.issuperset(group):
            continue
        steps = total(delays[process] for process in group).steps
        confirm = 0 if result.large.issuperset(group) else _CONFIRM_SMALL_STEPS
        processes, last = _processes(result, set(group)), int(steps.max())
        out.append(Candidate(RANK, processes, worded(verdict), last, quiet_steps(steps), confirm))
    return out


def _devices(result: Evaluation, history: History, *, only_since: bool) -> list[Candidate]:
    held = evaluations.parts(result, history.device, result.device, only_since=only_since)
    out = []
    for process, slow in result.faults.device.items():
        delays = evaluations.summed_device(result, held, process)
        if delays is None:
            continue
        verdict = device.verdict(result.case, process, slow, delays, examined=result.examined)
        quiet = quiet_steps(delays.steps)
        last = int(delays.steps.max())
        out.append(
            Candidate(RANK, _processes(result, {process}), worded(verdict), last, quiet, _CONFIRM_STEPS)
        )
    return out


def _moves(result: Evaluation, history: History, *, named: set[int], only_since: bool) -> list[Candidate]:
    if result.faults.is_on_device:
        return _moves_on_devices(result)
    held = evaluations.parts(result, history.late, result.live, only_since=only_since)
    uneven = [p for p in held if p not in named and p not in result.faults.device]
    delays = evaluations.summed(result, held, uneven)
    if not delays:
        return []
    whole = total(delays.values())
    verdict = imbalance.moving_ranks(result.case, whole, examined=result.examined)
    last, quiet = int(whole.steps.max()), quiet_steps(whole.steps)
    return [Candidate(MOVES, frozenset(), worded(verdict), last, quiet, _CONFIRM_SMALL_STEPS)]


def _moves_on_devices(result: Evaluation) -> list[Candidate]:
    """The candidate for delays that move between GPUs, from the remaining rows."""
    assert result.faults.uneven is not None
    verdict = imbalance.moving(result.faults, result.faults.uneven, result.examined)
    return [Candidate(MOVES, frozenset(), worded(verdict), -1, MIN_QUIET_STEPS, _CONFIRM_SMALL_STEPS)]


def _uncertain(result: Evaluation) -> list[Candidate]:
    """Candidates for clear late steps that may be chance; they must persist for many steps."""
    return [
        Candidate(UNCERTAIN, frozenset(), worded(verdict), -1, MIN_QUIET_STEPS, _CONFIRM_STAGE_STEPS)
        for verdict in inconclusive.doubtful(result.faults, result.examined)
    ]


def _often_last(result: Evaluation) -> list[Candidate]:
    """Candidates for GPUs that are slow, or have more work in most steps, from the remaining rows."""
    processes = result.faults.often_last
    return [
        Candidate(
            UNCERTAIN,
            _processes(result, {process}),
            worded(verdict),
            -1,
            MIN_QUIET_STEPS,
            _CONFIRM_STAGE_STEPS,
        )
        for process, verdict in zip(
            processes, inconclusive.often_last(result.faults, result.examined), strict=True
        )
    ]


def _once(result: Evaluation, history: History) -> list[Candidate]:
    """Candidates for single delays that took a large share of the examined time and that no other rank had."""
    least = result.case.limits.incident_share * result.examined.observed_ns
    delays_of_process: list[tuple[int, Delays]] = []
    for process in range(result.case.timeline.n_processes):
        track = history.late.of.get(result.case.process_key(process))
        kept = [part for part in track.once if part.max_late_ns >= least] if track else []
        here = [late_step for late_step in result.live.get(process, []) if late_step.excess_ns >= least]
        here = [late_step for late_step in here if (process, late_step.step) in result.alone]
        delays_of_process += [
            (process, part) for part in kept if (process, part.late[0].step) in result.alone
        ]
        delays_of_process += [
            (process, delays_by_process(result.case, [late_step])[process]) for late_step in here
        ]
    out = []
    for process, delays in delays_of_process:
        verdict = straggler.one_off(result.case, process, delays, examined=result.examined)
        step = delays.late[0].step
        out.append(
            Candidate(
                f"once {step}",
                _processes(result, {process}),
                worded(verdict),
                step,
                MIN_QUIET_STEPS,
                _CONFIRM_STEPS,
            )
        )
    return out


def _links(result: Evaluation) -> list[Candidate]:
    """Candidates for slow links, by communicator."""
    return [
        Candidate(
            f"link {verdict.comm_hash}", frozenset(), worded(verdict), -1, MIN_QUIET_STEPS, _CONFIRM_STEPS
        )
        for verdict in change.slow_links(result.case)
    ]


def _slow(result: Evaluation, incidents: Incidents) -> list[Candidate]:
    """Candidates for a slowdown of all ranks, as long as the steps take nearly as long as first reported."""
    verdicts = change.of_other_steps(result.faults)
    known = incidents.of(SLOW, frozenset())
    if not verdicts and known is not None:
        was = known.candidate.verdict
        before, after = was.evidence.step_ms_before or 0.0, was.evidence.step_ms_after or 0.0
        if result.case.step_ns / 1e6 >= before + _STILL_SLOW * (after - before):
            verdicts = [was]
    return [
        Candidate(SLOW, frozenset(), worded(verdict), -1, MIN_QUIET_STEPS, _CONFIRM_STEPS)
        for verdict in verdicts
    ]


def _processes(result: Evaluation, processes: set[int]) -> frozenset[ProcessKey]:
    return frozenset(result.case.process_key(process) for process in processes)


def _key(verdict: Verdict) -> tuple[object, ...]:
    """The key that is equal for two verdicts of a job on the same fault."""
    if verdict.kind in ("straggler", "device"):
        return "rank", tuple(verdict.ranks), bool(verdict.evidence.is_one_off)
    if verdict.kind in ("hang", "mismatch", "link"):
        return verdict.kind, verdict.comm_hash, verdict.first_round
    return verdict.kind, verdict.evidence.moves is not None


def _is_relevant(result: Evaluation, verdict: Verdict) -> bool:
    """Whether the verdict of a closed incident is still relevant, given all later steps."""
    if not verdict.evidence.is_one_off or verdict.late_ms is None:
        return True
    rank = result.case.timeline.rank
    if {int(rank[process]) for process, _ in result.once - result.alone}.issuperset(verdict.ranks):
        return False  # other ranks have had similar delays since
    return verdict.late_ms["max"] * 1e6 >= result.case.limits.incident_share * result.examined.observed_ns
