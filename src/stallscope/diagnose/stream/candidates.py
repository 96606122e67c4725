"""Candidate verdicts of an evaluation, each with the key of the incident to which it belongs."""

from dataclasses import replace

from stallscope.diagnose.cost.delays import Delays, delays_by_process, total
from stallscope.diagnose.lateness.together import in_groups
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.stream import evaluation as looks
from stallscope.diagnose.stream.evaluation import Look
from stallscope.diagnose.stream.history import LEAST_QUIET_STEPS, History, quiet_steps
from stallscope.diagnose.stream.incidents import Incidents, Sighted, worded
from stallscope.diagnose.stream.job_members import Who
from stallscope.diagnose.verdicts import claimed_rank, device, imbalance, inconclusive, mismatch, straggler
from stallscope.diagnose.verdicts._late import between, late_ranks

RANK, MOVES, STAGE, SLOW, HANG, FAILED = "rank", "moves", "stage", "slow", "hang", "failed"
UNSURE = "unsure"
CLAIMED = "claimed"
_CONFIRM_STEPS = 4  # an incident opens when its candidate is still there this many steps later
_CONFIRM_SMALL_STEPS = 16  # hosts vary over time, so small delays must persist longer
_CONFIRM_STAGE_STEPS = 32  # stages of few ranks vary over time as well
_STILL_SLOW = 0.8  # share of the growth that was reported first


def sightings(
    seen: Look, history: History, incidents: Incidents, *, is_whole: bool = False, is_usual: bool = True
) -> list[Sighted]:
    """The candidate verdicts of an evaluation, each with the delays of its own incident only.

    is_whole: no further rows will arrive. is_usual: the evaluation is periodic and not triggered by one rank; then it
    also checks for a slowdown of all ranks, which takes long.
    """
    found, case = seen.found, seen.case
    if claims := claimed_rank.verdicts(case):
        return [claimed(verdict) for verdict in claims]
    known = {
        process
        for process in range(case.line.n_processes)
        for one in [incidents.of(RANK, frozenset([case.who(process)]))]
        if one is not None and one.sighted.verdict.kind == "straggler"
    }
    ranks = _ranks(seen, history, known, only_since=True, is_whole=is_whole)
    taken = {p for p in range(case.line.n_processes) for one in ranks if case.who(p) in one.who}
    devices = [one for one in _devices(seen, history, only_since=True) if not one.who & _who(seen, taken)]
    out = [*(odd(worded(verdict)) for verdict in mismatch.verdicts(case, found.mismatches)), *ranks, *devices]
    if found.stage:
        verdict = worded(stage(seen, history))
        out.append(Sighted(STAGE, frozenset(), verdict, -1, LEAST_QUIET_STEPS, _CONFIRM_STAGE_STEPS))
    if found.uneven:
        out += _moves(seen, history, named=taken, only_since=True)
    out += _once(seen, history)
    if out or not (is_usual or is_whole):
        return out
    return _slow(seen, incidents) or _unsure(seen)


def report(seen: Look, history: History, incidents: Incidents, *, standstill: list[Verdict]) -> list[Verdict]:
    """All verdicts on a job whose first rows have been dropped, including closed incidents.

    A finding that only the remaining rows show is reported if it has an open incident.
    """
    found = seen.found
    if claims := claimed_rank.verdicts(seen.case):
        return [worded(verdict) for verdict in claims]
    ranks = _ranks(seen, history, set(), only_since=False, is_whole=False)
    taken = frozenset(who for one in ranks for who in one.who)
    rest = [one for one in _devices(seen, history, only_since=False) if not one.who & taken]
    if found.stage:
        rest.append(Sighted(STAGE, frozenset(), stage(seen, history), -1, 0))
    if found.uneven:
        rest += _moves(seen, history, named=set(found.named), only_since=False)
    now = [
        *mismatch.verdicts(seen.case, found.mismatches),
        *([] if found.mismatches else standstill),
        *straggler.costliest_first([one.verdict for one in ranks]),
        *(one.verdict for one in rest if incidents.of(one.sort, one.who)),
        *(one.verdict for one in _once(seen, history)),
    ]
    told = {_what(verdict) for verdict in now}
    before = [*history.over, *(one.sighted.verdict for one in incidents.open)]
    now += [verdict for verdict in before if _what(verdict) not in told and _matters(seen, verdict)]
    return [worded(verdict) for verdict in now]


def claimed(verdict: Verdict) -> Sighted:
    """Several processes with the same rank: no other verdict on the job is reliable."""
    return Sighted(CLAIMED, frozenset(), worded(verdict), -1, LEAST_QUIET_STEPS)


def odd(verdict: Verdict) -> Sighted:
    """The candidate for a round that ranks entered with different calls."""
    sort = f"mismatch {verdict.comm_hash} {verdict.first_round}"
    return Sighted(sort, frozenset(), verdict, -1, LEAST_QUIET_STEPS)


def stage(seen: Look, history: History) -> Verdict:
    """The verdict on a slow stage, with its cost before the remaining rows."""
    assert seen.found.stage is not None
    verdict = imbalance.stage(seen.case, seen.found.stage)
    if not history.is_trimmed or verdict.cost is None:
        return verdict
    share = seen.examined.n_steps / max(seen.found.stage.n_steps, 1)
    spent = between(
        seen.case,
        0.0,
        verdict.cost.may_be_gpu_seconds * share,
        observed_ns=seen.examined.observed_ns,
    )
    return replace(verdict, cost=spent, evidence=verdict.evidence | {"n_steps": seen.examined.n_steps})


def _ranks(
    seen: Look, history: History, known: set[int], *, only_since: bool, is_whole: bool
) -> list[Sighted]:
    """Candidates for late ranks.

    known: processes with an open incident; they stay named, late or not. is_whole: the rows are complete, so no further
    evaluation needs to confirm a name.
    """
    case, least = seen.case, seen.case.limits.min_late_steps
    held = looks.parts(seen, history.late, seen.live, only_since=only_since)
    n_late = {p: sum(one.n_late for one in kept) + len(late) for p, (kept, late) in held.items()}
    named = {p for p in seen.found.named if is_whole or p in seen.firm}
    chosen = {p for p in named if n_late.get(p, 0) >= least} | (known & held.keys())
    delays = looks.summed(seen, held, sorted(chosen))
    out = []
    for group in in_groups({process: delays[process].steps for process in chosen}, case.line.node):
        verdict = late_ranks(seen.case, group, delays, examined=seen.examined)
        if straggler.is_nothing(seen.case, verdict) and not known.issuperset(group):
            continue
        steps = total(delays[process] for process in group).steps
        confirm = 0 if seen.large.issuperset(group) else _CONFIRM_SMALL_STEPS
        who, last = _who(seen, set(group)), int(steps.max())
        out.append(Sighted(RANK, who, worded(verdict), last, quiet_steps(steps), confirm))
    return out


def _devices(seen: Look, history: History, *, only_since: bool) -> list[Sighted]:
    held = looks.parts(seen, history.device, seen.device, only_since=only_since)
    out = []
    for process, slow in seen.found.device.items():
        delays = looks.summed_device(seen, held, process)
        if delays is None:
            continue
        verdict = device.verdict(seen.case, process, slow, delays, examined=seen.examined)
        quiet = quiet_steps(delays.steps)
        last = int(delays.steps.max())
        out.append(Sighted(RANK, _who(seen, {process}), worded(verdict), last, quiet, _CONFIRM_STEPS))
    return out


def _moves(seen: Look, history: History, *, named: set[int], only_since: bool) -> list[Sighted]:
    if seen.found.is_on_device:
        return _moves_on_devices(seen)
    held = looks.parts(seen, history.late, seen.live, only_since=only_since)
    uneven = [p for p in held if p not in named and p not in seen.found.device]
    delays = looks.summed(seen, held, uneven)
    if not delays:
        return []
    whole = total(delays.values())
    verdict = imbalance.moving_ranks(seen.case, whole, examined=seen.examined)
    last, quiet = int(whole.steps.max()), quiet_steps(whole.steps)
    return [Sighted(MOVES, frozenset(), worded(verdict), last, quiet, _CONFIRM_SMALL_STEPS)]


def _moves_on_devices(seen: Look) -> list[Sighted]:
    """The candidate for delays that move between GPUs, from the remaining rows."""
    assert seen.found.uneven is not None
    verdict = imbalance.moving(seen.found, seen.found.uneven, seen.examined)
    return [Sighted(MOVES, frozenset(), worded(verdict), -1, LEAST_QUIET_STEPS, _CONFIRM_SMALL_STEPS)]


def _unsure(seen: Look) -> list[Sighted]:
    """Candidates for clear late steps that may be chance; they must persist for many steps."""
    return [
        Sighted(UNSURE, frozenset(), worded(verdict), -1, LEAST_QUIET_STEPS, _CONFIRM_STAGE_STEPS)
        for verdict in inconclusive.doubtful(seen.found, seen.examined)
    ]


def _once(seen: Look, history: History) -> list[Sighted]:
    """Candidates for single delays that took a large share of the examined time and that no other rank had."""
    least = seen.case.limits.incident_share * seen.examined.observed_ns
    found: list[tuple[int, Delays]] = []
    for process in range(seen.case.line.n_processes):
        track = history.late.of.get(seen.case.who(process))
        kept = [part for part in track.once if part.max_late_ns >= least] if track else []
        here = [one for one in seen.live.get(process, []) if one.excess_ns >= least]
        here = [one for one in here if (process, one.step) in seen.alone]
        found += [(process, part) for part in kept if (process, part.late[0].step) in seen.alone]
        found += [(process, delays_by_process(seen.case, [one])[process]) for one in here]
    out = []
    for process, delays in found:
        verdict = straggler.one_off(seen.case, process, delays, examined=seen.examined)
        step = delays.late[0].step
        out.append(
            Sighted(
                f"once {step}",
                _who(seen, {process}),
                worded(verdict),
                step,
                LEAST_QUIET_STEPS,
                _CONFIRM_STEPS,
            )
        )
    return out


def _slow(seen: Look, incidents: Incidents) -> list[Sighted]:
    """Candidates for a slowdown of all ranks, as long as the steps take nearly as long as first reported."""
    found = inconclusive.all_slow(seen.case)
    known = incidents.of(SLOW, frozenset())
    if not found and known is not None:
        was = known.sighted.verdict
        before, after = (float(str(was.evidence[f"step_ms_{when}"])) for when in ("before", "after"))
        if seen.case.step_ns / 1e6 >= before + _STILL_SLOW * (after - before):
            found = [was]
    return [
        Sighted(SLOW, frozenset(), worded(verdict), -1, LEAST_QUIET_STEPS, _CONFIRM_STEPS)
        for verdict in found
    ]


def _who(seen: Look, processes: set[int]) -> frozenset[Who]:
    return frozenset(seen.case.who(process) for process in processes)


def _what(verdict: Verdict) -> tuple[object, ...]:
    """The key that is equal for two verdicts of a job on the same fault."""
    if verdict.kind in ("straggler", "device"):
        return "rank", tuple(verdict.ranks), verdict.evidence.get("is_one_off", False)
    if verdict.kind in ("hang", "mismatch"):
        return verdict.kind, verdict.comm_hash, verdict.first_round
    return verdict.kind, "moves" in verdict.evidence


def _matters(seen: Look, verdict: Verdict) -> bool:
    """Whether the verdict of a closed incident is still relevant, given all later steps."""
    if not verdict.evidence.get("is_one_off") or verdict.late_ms is None:
        return True
    rank = seen.case.line.rank
    if {int(rank[process]) for process, _ in seen.once - seen.alone}.issuperset(verdict.ranks):
        return False  # other ranks have had similar delays since
    return verdict.late_ms["max"] * 1e6 >= seen.case.limits.incident_share * seen.examined.observed_ns
