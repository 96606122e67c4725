"""A report in words, for people. Everything here is made from the data; nothing is read back from it."""

from stallscope.diagnose.causes import Explained, leading
from stallscope.diagnose.processes.summary import lines as summary_lines
from stallscope.diagnose.report.evidence import Evidence
from stallscope.diagnose.report.verdict import Report, Verdict, VerdictCost, wall_text
from stallscope.events.counted import counted

_MOST_PLACES = 4
_MOST_RANKS = 12
_STATES = {"preempted": "on_cpu", "other_off": "blocked", "net": "waiting for a socket or pipe"}
"""States in words, where the name of the ledger's category says less of one moment."""

_MOST_FRAMES = 6


def summary(verdict: Verdict) -> str:
    """One or two sentences: who, how late, how often, why."""
    say = {
        "straggler": _straggler,
        "device": _device,
        "process": _process,
        "failure": _failure,
        "hang": _hang,
        "mismatch": _mismatch,
        "imbalance": _imbalance,
        "inconclusive": _inconclusive,
    }
    return say[verdict.kind](verdict)


def report(found: Report) -> str:
    """The whole report as plain text."""
    lines = [f"Events: {found.source}." if found.source else "Events: from a trace.", _examined(found)]
    lines += summary_lines(found.activity)
    lines += [found.budget.line()] if found.budget else []
    lines += _answer(found)
    for number, verdict in enumerate(found.verdicts, 1):
        lines += ["", *_block(verdict, number, len(found.verdicts))]
    for remark in found.benign:
        lines += ["", f"Not an alarm: {_remark(remark)}"]
    return "\n".join(lines)


def headline(found: Report) -> str:
    """The answer in one sentence: the first verdict, health, or the first reason for an inconclusive answer."""
    if found.verdicts:
        return found.verdicts[0].summary
    if found.gaps:
        return f"Inconclusive: {found.gaps[0].reason}."
    if found.evidence and not found.evidence.shows_slowness:
        return "Healthy: no rank hangs."
    has_peers = found.examined["n_rounds"] and found.examined["n_ranks"] != 1
    return f"Healthy: {'no rank slows down the others' if has_peers else 'nothing keeps a GPU waiting'}."


def _answer(found: Report) -> list[str]:
    """The answer without a verdict: healthy with its evidence, or inconclusive with the reasons."""
    if found.verdicts:
        return []
    evidence = _evidence(found.evidence) if found.evidence else []
    rows = []
    for gap in found.gaps[1:]:
        rows += [("also", f"{gap.reason}.")]
    rows += [
        ("action" if i == 0 else "", action)
        for i, action in enumerate(dict.fromkeys(g.action for g in found.gaps))
    ]
    return ["", headline(found), *_rows(rows + evidence)]


def _evidence(evidence: Evidence) -> list[tuple[str, str]]:
    """What the answer rests on, and what the source cannot show."""
    parts = []
    if evidence.n_rounds:
        parts.append(
            f"{evidence.n_whole_rounds:,} of {counted(evidence.n_rounds, 'round')} matched on all members "
            f"({evidence.whole_share:.0%})"
        )
    if evidence.n_steps is not None:
        parts.append(counted(evidence.n_steps, "step"))
    if evidence.clock_error_ms is not None:
        parts.append(f"clocks aligned within {evidence.clock_error_ms:.2f} ms")
    lost, unseen = evidence.n_lost_records, evidence.n_ranks_unseen
    parts.append(f"{counted(lost, 'record')} lost" if lost else "no records lost")
    parts.append(f"{counted(unseen, 'rank')} unseen" if unseen else "no ranks unseen")
    rows = [("evidence", ", ".join(parts))]
    if evidence.coverage.omitted:
        omitted = ", ".join(f"{n:,} {reason}" for reason, n in evidence.coverage.omitted.items())
        rows.append(("omitted", omitted))
    if evidence.coverage.blind_spots:
        rows.append(("not shown", f"{', '.join(evidence.coverage.blind_spots)}: this source cannot show it"))
    return rows


def _rows(rows: list[tuple[str, str]]) -> list[str]:
    return [f"  {name:<10}  {value}".rstrip() for name, value in rows]


def _n_unseen(found: Report) -> int:
    return int(found.examined.get("n_ranks_unseen", 0))


def _examined(found: Report) -> str:
    seen = found.examined
    lost = seen["n_lost_records"]
    apart = f" of {counted(seen['n_jobs'], 'job')}" if "n_jobs" in seen else ""
    of_all = f" of {seen['n_ranks'] + n}" if (n := _n_unseen(found)) else ""
    tail = "no records lost" if not lost else f"{counted(lost, 'record')} lost: verdicts are less sure"
    return (
        f"Examined {counted(seen['n_ranks'], 'rank')}{of_all}{apart} on {counted(seen['n_nodes'], 'node')}, "
        f"{counted(seen['n_communicators'], 'communicator')}, {counted(seen['n_rounds'], 'round')} in "
        f"{counted(seen['n_steps'], 'step')}, {seen['seconds']:.1f} s; {tail}."
    )


def _block(verdict: Verdict, number: int, total: int) -> list[str]:
    head = f"[{number}/{total}] " if total > 1 else ""
    rows: list[tuple[str, str]] = []
    job = verdict.evidence.get("job")
    if isinstance(job, dict):
        times = f", {job['since']} until {job['until']}" if "since" in job else ""
        rows.append(("job", f"{job['number']} of {job['of']}{times}"))
    if verdict.since_ns is not None:
        rows.append(("since", _since(verdict)))
    for i, part in enumerate(verdict.causes):
        rows.append(("cause" if i == 0 else "", _cause(verdict, part)))
    rows += [("code", line) for line in _places(verdict)]
    if verdict.victims:
        rows.append(("victims", _victims(verdict)))
    if verdict.cost:
        rows.append(("cost", _cost(verdict)))
    rows.append(("confidence", f"{100 * verdict.confidence:.0f} %"))
    if verdict.severity:
        rows.append(("severity", verdict.severity))
    if verdict.abstained_because:
        rows.append(("caveat", verdict.abstained_because))
    rows += [("action" if i == 0 else "", advice) for i, advice in enumerate(verdict.advice)]
    return [f"{head}{verdict.summary}", *_rows(rows)]


def _since(verdict: Verdict) -> str:
    """Onset, first step, number of incidents, and the latest."""
    since, until = wall_text(verdict.since_ns) or "", wall_text(verdict.until_ns)
    is_one_day = until is None or until[:10] == since[:10]
    step = f", step {verdict.first_step}" if verdict.first_step is not None else ""
    said = f"{_clock(since, is_one_day)} UTC{step}"
    if verdict.kind not in ("straggler", "device", "process") or until is None:
        return said + (f", until {_clock(until, is_one_day)}" if until else "")
    return f"{said}; {counted(verdict.n_incidents, 'incident')}, latest {_clock(until, is_one_day)}"


def _clock(moment: str, is_one_day: bool) -> str:
    """Time of day to the second, with the date where a verdict spans several days."""
    return moment[11:19] if is_one_day else f"{moment[:10]} {moment[11:19]}"


def _cause(verdict: Verdict, part: Explained) -> str:
    share = f"{100 * part.share:.0f} % " if verdict.kind != "hang" else ""
    return ", ".join(
        [
            f"{share}{part.noun}",
            *(_fact(name, value) for name, value in part.evidence.items() if name != "doing"),
        ]
    )


def _fact(name: str, value: object) -> str:
    """One entry of the evidence: `21 intervals`, `longest 294 ms`, `devices nvme0n1`."""
    if name.startswith("n_") and isinstance(value, int):
        return f"{value} {_words(name)}"
    if name.endswith("_ms") and isinstance(value, int | float):
        return f"{_words(name[:-3])} {_ms(value)}"
    return f"{_words(name)} {_value(value)}"


def _victims(verdict: Verdict) -> str:
    """The ranks that waited, and how long each did on average."""
    if verdict.cost is None or verdict.cost.may_be_gpu_seconds <= 0:
        return _ranks(verdict.victims)
    each = _ms(1000 * verdict.cost.may_be_gpu_seconds / len(verdict.victims))
    most = "up to " if verdict.cost.at_most_gpu_seconds is not None else ""
    least = "at least " if verdict.cost.is_lower_bound and not most else ""
    return (
        f"{_ranks(verdict.victims)} waited {most or least}{each}{' each' if len(verdict.victims) > 1 else ''}"
    )


def _straggler(verdict: Verdict) -> str:
    if "stated" in verdict.evidence:
        return (
            f"{_ranks(verdict.ranks).capitalize()} is slower than the others: {verdict.evidence['stated']}."
        )
    late = _ms(verdict.late_ms["median"]) if verdict.late_ms else "some time"
    is_plural = len(verdict.ranks) > 1 and len(verdict.nodes) > 1
    verb = "slow down" if is_plural else "slows down"
    return f"{_subject(verdict)} {verb} the job: {late} late {_how_often(verdict)}{_because(verdict)}."


def _subject(verdict: Verdict) -> str:
    """The rank with its host and process, or the nodes whose ranks are all named."""
    if len(verdict.ranks) > 1:
        named = ", ".join(verdict.nodes[:4]) + (
            f" and {len(verdict.nodes) - 4} more" if verdict.nodes[4:] else ""
        )
        ranks = f"{len(verdict.ranks)} ranks" if len(verdict.ranks) > _MOST_RANKS else _ranks(verdict.ranks)
        return f"Node{'s' if len(verdict.nodes) > 1 else ''} {named} ({ranks})"
    return f"Rank {verdict.ranks[0]}{_identity(verdict)}"


def _identity(verdict: Verdict) -> str:
    """Host and process id of a rank, in parentheses, where they are known."""
    host = [f"host {verdict.nodes[0]}"] if len(verdict.nodes) == 1 and verdict.nodes[0] else []
    pid = [f"pid {verdict.pids[0]}"] if len(verdict.pids) == 1 else []
    return f" ({', '.join(host + pid)})" if host or pid else ""


def _because(verdict: Verdict) -> str:
    states = [part.state for part in leading(verdict.causes)]
    return f", {' and '.join(states)}" if states else ""


def _how_often(verdict: Verdict) -> str:
    if verdict.evidence.get("is_one_off"):
        return "once"
    if verdict.period_steps:
        return f"every {verdict.period_steps} steps"
    return f"in {verdict.evidence.get('n_late_steps')} of {verdict.evidence.get('n_steps')} steps"


def _device(verdict: Verdict) -> str:
    late = _ms(verdict.late_ms["median"]) if verdict.late_ms else "some time"
    return (
        f"The GPU of {_ranks(verdict.ranks)}{_identity(verdict)} is {late} slower per step "
        f"{_how_often(verdict)}{_because(verdict)}."
    )


def _process(verdict: Verdict) -> str:
    said = verdict.evidence
    where = f" on {', '.join(verdict.nodes)}" if any(verdict.nodes) else ""
    if isinstance(gain := said.get("gain_at_most"), float) and verdict.causes:
        at = _short(str(said.get("line", "")))
        line = f", at {at}" if at.strip() and at not in verdict.causes[0].title else ""
        return (
            f"Process {said.get('pid')} ({said.get('command')}){where} {verdict.causes[0].title}{line}: "
            f"{said.get('share'):.0%} of its time; at most {gain:.1f} times faster without it."
        )
    return (
        f"Process {said.get('pid')} ({said.get('command')}){where} keeps its GPU waiting: "
        f"{said.get('n_late_steps')} of {said.get('n_steps')} steps take {_ms_of(said.get('step_ms_late'))} "
        f"where {_ms_of(said.get('step_ms_usual'))} is usual{_because(verdict)}."
    )


def _failure(verdict: Verdict) -> str:
    said = verdict.evidence
    who = f"Rank {verdict.ranks[0]}" if verdict.ranks else f"Process {said.get('pid')}"
    where = _identity(verdict)
    if "stated" in said:
        return _stated_failure(said, f"{who if verdict.ranks or 'pid' in said else 'A process'}{where}")
    if "exit_status" in said:
        how = f"{_in_vain(said)}; its process {_ended(said)}"
        return f"{who}{where} ended before the others and took the job with it{how}."
    first = " first" if verdict.victims or said.get("also_failed_later") else ""
    what = verdict.causes[0].title if verdict.causes else "made a call that failed"
    return (
        f"{who}{where} failed{first}: it {what} "
        f"(error {said.get('error')}, {said.get('said')}, in {said.get('function') or 'a CUDA call'})."
    )


def _stated_failure(said: dict[str, object], who: str) -> str:
    """A failure that a log states, with the line of code where it holds one."""
    first = " first" if said.get("also_failed_later") else ""
    at = f", at {_short(str(said['at']))}" if "at" in said else ""
    status = said.get("exit_status")
    end = (
        f" (exit status {status})"
        if status is not None and f"status {status}" not in str(said["stated"])
        else ""
    )
    return f"{who} failed{first}: {str(said['stated']).rstrip('.')}{end}{at}."


def _ms_of(value: object) -> str:
    return _ms(value) if isinstance(value, float) else "some time"


def _hang(verdict: Verdict) -> str:
    waited = verdict.evidence.get("waited_s")
    time = f" for {waited} s" if waited is not None else ""
    if verdict.evidence.get("captured_late"):
        return _captured_late(verdict)
    if verdict.evidence.get("by_stacks"):
        return _by_stacks(verdict)
    if verdict.evidence.get("is_circle"):
        return f"The job hangs: {_ranks(verdict.ranks)} wait for each other over several communicators{time}."
    what = _round(verdict) if verdict.first_round is not None else "what others wait for"
    if verdict.abstained_because:
        return f"The job hangs{time}, and no rank can be named: {verdict.abstained_because}."
    if verdict.evidence.get("crossed_order"):
        return (
            f"The job hangs for {waited} s: {_ranks(verdict.ranks)} entered the rounds of two communicators in "
            "another order than the others."
        )
    doing = verdict.evidence.get("doing")
    said = _doing(doing[0]) if isinstance(doing, list) and len(doing) == 1 else ""
    verb = "has" if len(verdict.ranks) == 1 else "have"
    silent = verdict.evidence.get("left_no_dump")
    more = f" What {_ranks(silent)} did is not known: no dump was left." if isinstance(silent, list) else ""
    more += _called_at(verdict)
    if _lack(doing) == {"no_dump"}:
        return f"The job hangs in {what}{time}: {_ranks(verdict.ranks)} left no dump, and the others wait there.{more}"
    return f"The job hangs: {_ranks(verdict.ranks)} {verb} not {_lacking(doing)} {what}{time}{said}.{more}"


def _round(verdict: Verdict) -> str:
    """The round with its operation and its group, where the source states them."""
    operation, group = verdict.evidence.get("operation"), verdict.evidence.get("group")
    what = f"round {verdict.first_round}{f' ({operation})' if operation else ''}"
    return f"{what} of {group}" if group else f"{what} of communicator {verdict.comm_hash}"


def _called_at(verdict: Verdict) -> str:
    """Where the others made the call that they wait in, and the last call of the only rank that is named."""
    line, doing = verdict.evidence.get("line"), verdict.evidence.get("doing")
    last = doing[0].get("last_call") if isinstance(doing, list) and len(doing) == 1 else None
    others = f" The others made that call at {line}." if line else ""
    return others + (f" Its last call was {last}." if last and len(verdict.ranks) == 1 else "")


def _by_stacks(verdict: Verdict) -> str:
    """Ranks that stand elsewhere than the rest, by stacks dumped once."""
    said = verdict.evidence
    doing = said.get("doing")
    at = _short(str(doing[0]["at"])) if isinstance(doing, list) and doing else "another place"
    verb = "is" if len(verdict.ranks) == 1 else "are"
    return (
        f"The stacks differ: {_ranks(verdict.ranks)} {verb} at {at}, while {_ranks(verdict.victims)} wait at "
        f"{_short(str(said.get('others_at')))}. If the job hangs, it waits for {_ranks(verdict.ranks)}."
    )


def _captured_late(verdict: Verdict) -> str:
    said = verdict.evidence
    head = (
        f"Captured after the stall began: all {said.get('n_ranks')} ranks stand still, for {said.get('waited_s')} s "
        "at least"
    )
    doing = said.get("doing")
    if verdict.ranks and isinstance(doing, list):
        return f"{head}. The others likely wait for {_ranks(verdict.ranks)}{_doing(doing[0])}."
    return f"{head}, and no rank can be named: {verdict.abstained_because}."


def _lacking(doing: object) -> str:
    """What those held responsible have not done: enter the round, or get through it."""
    has = _lack(doing)
    if has == {"not_completed"}:
        return "got through"
    return "entered or not got through" if "not_completed" in has else "entered"


def _lack(doing: object) -> set[object]:
    return {told.get("has") for told in doing if isinstance(told, dict)} if isinstance(doing, list) else set()


def _doing(told: dict[str, object]) -> str:
    has_hung = bool(told.get("has_hung"))
    if told.get("is_alive") is False and not has_hung:
        return f"{_in_vain(told)}; its process {_ended(told)}"
    state, stopped_by = _STATES.get(str(told.get("state")), told.get("state")), told.get("stopped_by")
    by = f" ({stopped_by})" if stopped_by else ""
    verb, later = ("was", f", until its process {_ended(told)}") if has_hung else ("is", "")
    if told.get("at"):
        known = f" (state {_words(str(state))})" if state else ""
        return f"{_in_vain(told)}; it {verb} at {_short(str(told['at']))} instead{known}{by}{later}"
    doing = f"; it {verb} in state {_words(str(state))} instead{by}" if state else ""
    return f"{_in_vain(told)}{doing}{later}"


def _in_vain(told: dict[str, object]) -> str:
    """The call after which the rank did something else."""
    return f"; its {told['failed_call']} failed with error {told['error']}" if "failed_call" in told else ""


def _ended(told: dict[str, object]) -> str:
    status, by = told.get("exit_status"), told.get("ended_by")
    how = f" (exit status {status})" if status is not None else ""
    asked = f" after {told['asked_by']}" if "asked_by" in told else ""
    return f"was ended by {by}{how}" if by else f"has ended{asked}{how}"


def _short(frame: str) -> str:
    """A frame without the folders of its file."""
    place, _, function = frame.rpartition(" ")
    return f"{place.rpartition('/')[2]} {function}"


def _places(verdict: Verdict) -> list[str]:
    """Where in the code those named are or were held: a line each."""
    own = verdict.evidence.get("stack")
    if isinstance(own, list):
        return [stack(own)]
    doing = verdict.evidence.get("doing")
    told = [one for one in doing if isinstance(one, dict)] if isinstance(doing, list) else []
    return [
        (f"rank {one['rank']}: " if len(told) > 1 else "") + stack(one["stack"])
        for one in told[:_MOST_PLACES]
        if isinstance(one.get("stack"), list)
    ]


def stack(frames: list[str]) -> str:
    """A stack in one line, innermost first, without the interpreter's own frames."""
    own = [frame for frame in frames if not frame.startswith("<frozen ")] or frames
    more = f" <- {len(own) - _MOST_FRAMES} more" if len(own) > _MOST_FRAMES else ""
    return " <- ".join(_short(frame) for frame in own[:_MOST_FRAMES]) + more


def _mismatch(verdict: Verdict) -> str:
    return (
        f"{_ranks(verdict.ranks).capitalize()} entered round {verdict.first_round} of communicator "
        f"{verdict.comm_hash} with another operation, size or type than the others{_since_then(verdict)}."
    )


def _since_then(verdict: Verdict) -> str:
    waited = verdict.evidence.get("waited_s")
    return f"; the job has stood still for {waited} s since" if waited is not None else ""


def _imbalance(verdict: Verdict) -> str:
    stage = verdict.evidence.get("slow_stage")
    if isinstance(stage, list):
        extra = _ms(verdict.late_ms["median"]) if verdict.late_ms else "more"
        return (
            f"Uneven work, no bad machine: the stage of {_ranks(stage)} works {extra} longer per step, "
            "and the others wait for it."
        )
    more = verdict.evidence.get("more_work")
    if isinstance(more, list):
        extra = _ms(verdict.late_ms["median"]) if verdict.late_ms else "more"
        return (
            f"Uneven work, no bad machine: {_ranks(more)} work {extra} longer {_how_often(verdict)}, "
            "and the others wait for them."
        )
    return (
        f"Uneven work, no bad machine: in {verdict.evidence.get('n_late_steps')} of {verdict.evidence.get('n_steps')} "
        "steps some rank is late, but not the same one."
    )


def _inconclusive(verdict: Verdict) -> str:
    if "largest_item" in verdict.evidence:
        pid = verdict.evidence.get("pid")
        return f"Process {pid}: no fault found, not shown to be healthy: {verdict.abstained_because}."
    if "step_ms_after" in verdict.evidence:
        return _slower(verdict)
    return f"Something is slow, but no rank can be named: {verdict.abstained_because}."


def _slower(verdict: Verdict) -> str:
    """The whole job became slower: when, by how much, and which part of the step grew."""
    before, after = (float(str(verdict.evidence[f"step_ms_{when}"])) for when in ("before", "after"))
    grew = verdict.evidence.get("grew_ms")
    parts = [f"{_words(name)} +{_ms(ms)}" for name, ms in grew.items()] if isinstance(grew, dict) else []
    told = f"; of each step, {', '.join(parts)}" if parts else ""
    return (
        f"The whole job became {after / before - 1:.0%} slower at step {verdict.evidence.get('from_step')}: steps "
        f"take {_ms(after)} where they took {_ms(before)}{told}. No rank is to blame: {verdict.abstained_because}."
    )


def _cost(verdict: Verdict) -> str:
    cost = verdict.cost
    if cost is None:
        return ""
    parts = [f"{_gpu_seconds(cost)} GPU seconds"]
    if cost.usd is not None and cost.at_most_usd is not None:
        parts.append(f"{_range(cost.usd, cost.at_most_usd, least=0.005, digits=2)} USD")
    elif cost.usd is not None:
        parts.append(f"{cost.usd:.2f} USD")
        parts += [f"{cost.usd_per_hour:.2f} USD an hour"] if cost.usd_per_hour is not None else []
    recurs = verdict.kind in ("straggler", "device", "process") and not verdict.evidence.get("is_one_off")
    hours = cost.gpu_hours_per_day if recurs and cost.at_most_gpu_seconds is None else None
    rate = f" ({hours:.0f} GPU hours a day at this rate)" if hours is not None and hours >= 0.5 else ""
    return ", ".join(parts) + rate


def _gpu_seconds(cost: VerdictCost) -> str:
    if cost.at_most_gpu_seconds is not None:
        return _range(cost.gpu_seconds, cost.at_most_gpu_seconds, least=0.05, digits=1)
    return f"{'at least ' if cost.is_lower_bound else ''}{cost.gpu_seconds:.1f}"


def _range(low: float, high: float, *, least: float, digits: int) -> str:
    """Two numbers; the first is left out where it is below least."""
    return f"{low:.{digits}f} to {high:.{digits}f}" if low >= least else f"at most {high:.{digits}f}"


def _remark(remark: dict[str, object]) -> str:
    rest = ", ".join(
        f"{_words(name)} {_value(value)}" for name, value in remark.items() if name not in ("what", "at_ns")
    )
    return f"{remark['what']}{f' ({rest})' if rest else ''}."


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:12])
    return f"ranks {shown}{f' and {len(ranks) - 12} more' if len(ranks) > 12 else ''}"


def _ms(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _words(name: str) -> str:
    return name.replace("n_", "", 1).replace("_", " ") if name.startswith("n_") else name.replace("_", " ")


def _value(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(str(one) for one in value)
    return str(value)
