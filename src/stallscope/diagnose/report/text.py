"""A report as plain text, for people. No other part parses this text."""

from collections.abc import Mapping

from stallscope.diagnose.causes import Explained, leading
from stallscope.diagnose.evidence_fields import RankActivity, VerdictEvidence, as_json
from stallscope.diagnose.processes.budget_summary import lines as summary_lines
from stallscope.diagnose.report.evidence import Evidence
from stallscope.diagnose.report.verdict import Report, Verdict, VerdictCost, wall_text
from stallscope.events.counted import counted

_MOST_STACKS = 4
_MOST_RANKS = 12
_STATES = {"preempted": "on_cpu", "other_off": "blocked", "net": "waiting for a socket or pipe"}
"""States in words, where the name of the ledger's category does not describe a single moment."""

_MOST_FRAMES = 6


def summary(verdict: Verdict) -> str:
    """One or two sentences: the rank, its lateness, how often, and the cause."""
    sentences = {
        "straggler": _straggler,
        "device": _device,
        "process": _process,
        "failure": _failure,
        "hang": _hang,
        "mismatch": _mismatch,
        "imbalance": _imbalance,
        "change": _change,
        "link": _link,
        "inconclusive": _inconclusive,
    }
    return sentences[verdict.kind](verdict)


def report(result: Report) -> str:
    """The whole report as plain text."""
    lines = [f"Events: {result.source}." if result.source else "Events: from a trace.", _examined(result)]
    lines += summary_lines(result.activity)
    lines += [result.budget.line()] if result.budget else []
    lines += _answer(result)
    for number, verdict in enumerate(result.verdicts, 1):
        lines += ["", *_block(verdict, number, len(result.verdicts))]
    for remark in result.benign:
        lines += ["", f"Not an alarm: {_remark(remark)}"]
    return "\n".join(lines)


def headline(result: Report) -> str:
    """The answer in one sentence: the first verdict, health, or the first reason for an inconclusive answer."""
    if result.verdicts:
        return result.verdicts[0].summary
    if result.gaps:
        return f"Inconclusive: {result.gaps[0].reason}."
    if result.evidence and not result.evidence.shows_slowness:
        return "Healthy: no rank hangs."
    has_peers = result.examined["n_rounds"] and result.examined["n_ranks"] != 1
    return f"Healthy: {'no rank slows down the others' if has_peers else 'nothing keeps a GPU waiting'}."


def _answer(result: Report) -> list[str]:
    """The answer without a verdict: healthy with its evidence, or inconclusive with the reasons."""
    if result.verdicts:
        return []
    evidence = _evidence(result.evidence) if result.evidence else []
    rows = []
    for gap in result.gaps[1:]:
        rows += [("also", f"{gap.reason}.")]
    rows += [
        ("action" if i == 0 else "", action)
        for i, action in enumerate(dict.fromkeys(g.action for g in result.gaps))
    ]
    return ["", headline(result), *_rows(rows + evidence)]


def _evidence(evidence: Evidence) -> list[tuple[str, str]]:
    """Rows on the examined data, and on the faults that the source cannot show."""
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


def _n_unseen(result: Report) -> int:
    return int(result.examined.get("n_ranks_unseen", 0))


def _examined(result: Report) -> str:
    counts = result.examined
    lost = counts["n_lost_records"]
    of_jobs = f" of {counted(counts['n_jobs'], 'job')}" if "n_jobs" in counts else ""
    of_all = f" of {counts['n_ranks'] + n}" if (n := _n_unseen(result)) else ""
    tail = "no records lost" if not lost else f"{counted(lost, 'record')} lost: verdicts are less reliable"
    return (
        f"Examined {counted(counts['n_ranks'], 'rank')}{of_all}{of_jobs} on {counted(counts['n_nodes'], 'node')}, "
        f"{counted(counts['n_communicators'], 'communicator')}, {counted(counts['n_rounds'], 'round')} in "
        f"{counted(counts['n_steps'], 'step')}, {counts['seconds']:.1f} s; {tail}."
    )


def _block(verdict: Verdict, number: int, total: int) -> list[str]:
    head = f"[{number}/{total}] " if total > 1 else ""
    rows: list[tuple[str, str]] = []
    if job := verdict.evidence.job:
        times = f", {job.since} until {job.until}" if job.since else ""
        rows.append(("job", f"{job.number} of {job.of}{times}"))
    if owner := _owner(verdict.owner):
        rows.append(("owner", owner))
    if verdict.since_ns is not None:
        rows.append(("since", _since(verdict)))
    for i, part in enumerate(verdict.causes):
        rows.append(("cause" if i == 0 else "", _cause(verdict, part)))
    rows += [("code", line) for line in _code(verdict)]
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


def _owner(owner: Mapping[str, str]) -> str:
    """Job, user, account and location, empty without them; ids that only programs use are in the JSON."""
    name = f" ({owner['job_name']})" if "job_name" in owner else ""
    parts = [f"job {owner['job']}{name}"] if "job" in owner else []
    shown = ("user", "account", "partition", "namespace", "pod", "task", "unit")
    parts += [f"{label} {owner[label]}" for label in shown if label in owner]
    return ", ".join(parts)


def _since(verdict: Verdict) -> str:
    """Onset, first step, number of incidents, and the latest."""
    since, until = wall_text(verdict.since_ns) or "", wall_text(verdict.until_ns)
    is_one_day = until is None or until[:10] == since[:10]
    step = f", step {verdict.first_step}" if verdict.first_step is not None else ""
    onset = f"{_clock(since, is_one_day)} UTC{step}"
    if verdict.kind not in ("straggler", "device", "process") or until is None:
        return onset + (f", until {_clock(until, is_one_day)}" if until else "")
    return f"{onset}; {counted(verdict.n_incidents, 'incident')}, latest {_clock(until, is_one_day)}"


def _clock(moment: str, is_one_day: bool) -> str:
    """Time of day to the second, with the date where a verdict spans several days."""
    return moment[11:19] if is_one_day else f"{moment[:10]} {moment[11:19]}"


def _cause(verdict: Verdict, part: Explained) -> str:
    share = f"{100 * part.share:.0f} % " if verdict.kind != "hang" else ""
    return ", ".join(
        [
            f"{share}{part.noun}",
            *(_fact(name, value) for name, value in as_json(part.evidence).items() if name != "doing"),
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
    if stated := verdict.evidence.stated:
        return f"{_ranks(verdict.ranks).capitalize()} is slower than the others: {stated}."
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
    if verdict.evidence.is_one_off:
        return "once"
    if verdict.period_steps:
        return f"every {verdict.period_steps} steps"
    return f"in {verdict.evidence.n_late_steps} of {verdict.evidence.n_steps} steps"


def _device(verdict: Verdict) -> str:
    held = verdict.causes[0].evidence if verdict.causes else None
    if held and held.clock_held_by and verdict.late_ms is None:
        return (
            f"The GPU of {_ranks(verdict.ranks)}{_identity(verdict)} runs at {held.clock_mhz} MHz instead of "
            f"{held.usual_mhz} MHz, held down by {', '.join(held.clock_held_by)}; the other ranks wait for it."
        )
    late = _ms(verdict.late_ms["median"]) if verdict.late_ms else "some time"
    return (
        f"The GPU of {_ranks(verdict.ranks)}{_identity(verdict)} is {late} slower per step "
        f"{_how_often(verdict)}{_because(verdict)}."
    )


def _process(verdict: Verdict) -> str:
    facts = verdict.evidence
    where = f" on {', '.join(verdict.nodes)}" if any(verdict.nodes) else ""
    if (gain := facts.gain_at_most) is not None and verdict.causes:
        at = _short(facts.line or "")
        line = f", at {at}" if at.strip() and at not in verdict.causes[0].title else ""
        return (
            f"Process {facts.pid} ({facts.command}){where} {verdict.causes[0].title}{line}: "
            f"{facts.share:.0%} of its time; at most {gain:.1f} times faster without it."
        )
    return (
        f"Process {facts.pid} ({facts.command}){where} keeps its GPU waiting: "
        f"{facts.n_late_steps} of {facts.n_steps} steps take {_ms_of(facts.step_ms_late)} "
        f"instead of {_ms_of(facts.step_ms_usual)}{_because(verdict)}."
    )


def _failure(verdict: Verdict) -> str:
    facts = verdict.evidence
    subject = f"Rank {verdict.ranks[0]}" if verdict.ranks else f"Process {facts.pid}"
    host = _identity(verdict)
    if facts.stated is not None:
        is_known = bool(verdict.ranks) or facts.pid is not None
        return _stated_failure(facts, f"{subject if is_known else 'A process'}{host}")
    if facts.exit_status is not None:
        end = f"{_failed_call(facts)}; its process {_ended(facts)}"
        return f"{subject}{host} ended before the others and brought down the job{end}."
    first = " first" if verdict.victims or facts.also_failed_later else ""
    title = verdict.causes[0].title if verdict.causes else "made a call that failed"
    return (
        f"{subject}{host} failed{first}: it {title} "
        f"(error {facts.error}, {facts.said}, in {facts.function or 'a CUDA call'})."
    )


def _stated_failure(facts: VerdictEvidence, subject: str) -> str:
    """A failure that a log states, with the line of code where the log has it."""
    first = " first" if facts.also_failed_later else ""
    at = f", at {_short(facts.at)}" if facts.at else ""
    status, stated = facts.exit_status, facts.stated or ""
    end = f" (exit status {status})" if status is not None and f"status {status}" not in stated else ""
    return f"{subject} failed{first}: {stated.rstrip('.')}{end}{at}."


def _ms_of(value: float | None) -> str:
    return "some time" if value is None else _ms(value)


def _hang(verdict: Verdict) -> str:
    waited = verdict.evidence.waited_s
    time = f" for {waited} s" if waited is not None else ""
    if verdict.evidence.captured_late:
        return _attached_late(verdict)
    if verdict.evidence.by_stacks:
        return _by_stacks(verdict)
    if verdict.evidence.is_circle:
        return f"The job hangs: {_ranks(verdict.ranks)} wait for each other over several communicators{time}."
    what = _round(verdict) if verdict.first_round is not None else "a call"
    if verdict.abstained_because:
        return f"The job hangs{time}, and no rank can be named: {verdict.abstained_because}."
    if verdict.evidence.crossed_order:
        return (
            f"The job hangs for {waited} s: {_ranks(verdict.ranks)} entered the rounds of two communicators in "
            "a different order than the other ranks."
        )
    doing = verdict.evidence.doing or []
    activity = _doing(doing[0]) if len(doing) == 1 else ""
    verb = "has" if len(verdict.ranks) == 1 else "have"
    silent = verdict.evidence.left_no_dump
    more = f" The state of {_ranks(silent)} is unknown: no dump was left." if silent else ""
    more += _called_at(verdict)
    if _states(doing) == {"no_dump"}:
        ranks = _ranks(verdict.ranks)
        return (
            f"The job hangs in {what}{time}: {ranks} left no dump, and the others wait there{activity}.{more}"
        )
    return f"The job hangs: {_ranks(verdict.ranks)} {verb} not {_missing_part(doing)} {what}{time}{activity}.{more}"


def _round(verdict: Verdict) -> str:
    """The round with its operation and its group, where the source states them."""
    operation, group = verdict.evidence.operation, verdict.evidence.group
    what = f"round {verdict.first_round}{f' ({operation})' if operation else ''}"
    return f"{what} of {group}" if group else f"{what} of communicator {verdict.comm_hash}"


def _called_at(verdict: Verdict) -> str:
    """The line of code in which the others wait, and the last call of a single named rank."""
    line, doing = verdict.evidence.line, verdict.evidence.doing or []
    last = doing[0].last_call if len(doing) == 1 else None
    others = f" The others made that call at {line}." if line else ""
    return others + (f" Its last call was {last}." if last and len(verdict.ranks) == 1 else "")


def _by_stacks(verdict: Verdict) -> str:
    """Ranks at a different line of code than the other ranks, from one dump of the stacks."""
    facts = verdict.evidence
    at = _short(facts.doing[0].at or "") if facts.doing else "a different line"
    verb = "is" if len(verdict.ranks) == 1 else "are"
    return (
        f"The stacks differ: {_ranks(verdict.ranks)} {verb} at {at}, while {_ranks(verdict.victims)} wait at "
        f"{_short(facts.others_at or '')}. If the job hangs, it waits for {_ranks(verdict.ranks)}."
    )


def _attached_late(verdict: Verdict) -> str:
    """A standstill that began before the capture."""
    facts = verdict.evidence
    head = (
        f"Attached after the stall began: all {facts.n_ranks} ranks have made no progress for at least "
        f"{facts.waited_s} s"
    )
    if verdict.ranks and facts.doing:
        return f"{head}. The others likely wait for {_ranks(verdict.ranks)}{_doing(facts.doing[0])}."
    return f"{head}, and no rank can be named: {verdict.abstained_because}."


def _missing_part(doing: list[RankActivity]) -> str:
    """The part of the round that the responsible ranks have not done: enter it, or complete it."""
    states = _states(doing)
    if states == {"not_completed"}:
        return "completed"
    return "entered or not completed" if "not_completed" in states else "entered"


def _states(doing: list[RankActivity]) -> set[str | None]:
    return {activity.has for activity in doing}


def _doing(facts: RankActivity) -> str:
    """The state of a missing rank, as a clause that begins with a semicolon."""
    has_hung = bool(facts.has_hung)
    if facts.is_alive is False and not has_hung:
        return f"{_failed_call(facts)}; its process {_ended(facts)}"
    state = _STATES.get(facts.state, facts.state) if facts.state else None
    by = f" ({facts.stopped_by})" if facts.stopped_by else ""
    verb, later = ("was", f", until its process {_ended(facts)}") if has_hung else ("is", "")
    if facts.at:
        known = f" (state {_words(state)})" if state else ""
        return f"{_failed_call(facts)}; it {verb} at {_short(facts.at)} instead{known}{by}{later}"
    doing = f"; it {verb} in state {_words(state)} instead{by}" if state else ""
    return f"{_failed_call(facts)}{doing}{later}"


def _failed_call(facts: RankActivity | VerdictEvidence) -> str:
    """The failed call after which the rank left the step."""
    return f"; its {facts.failed_call} failed with error {facts.error}" if facts.failed_call else ""


def _ended(facts: RankActivity | VerdictEvidence) -> str:
    status, by = facts.exit_status, facts.ended_by
    code = f" (exit status {status})" if status is not None else ""
    signal = f" after {facts.asked_by}" if facts.asked_by else ""
    return f"was ended by {by}{code}" if by else f"has ended{signal}{code}"


def _short(frame: str) -> str:
    """A frame without the folders of its file."""
    line, _, function = frame.rpartition(" ")
    return f"{line.rpartition('/')[2]} {function}"


def _code(verdict: Verdict) -> list[str]:
    """The stacks in which the named ranks are or were held, one line for each."""
    if verdict.evidence.stack:
        return [stack(verdict.evidence.stack)]
    doing = verdict.evidence.doing or []
    return [
        (f"rank {activity.rank}: " if len(doing) > 1 else "") + stack(activity.stack)
        for activity in doing[:_MOST_STACKS]
        if activity.stack
    ]


def stack(frames: list[str]) -> str:
    """A stack in one line, innermost frame first, without the interpreter's own frames."""
    shown = [frame for frame in frames if not frame.startswith("<frozen ")] or frames
    more = f" <- {len(shown) - _MOST_FRAMES} more" if len(shown) > _MOST_FRAMES else ""
    return " <- ".join(_short(frame) for frame in shown[:_MOST_FRAMES]) + more


def _mismatch(verdict: Verdict) -> str:
    return (
        f"{_ranks(verdict.ranks).capitalize()} entered round {verdict.first_round} of communicator "
        f"{verdict.comm_hash} with a different operation, size or type than the other ranks{_since_then(verdict)}."
    )


def _since_then(verdict: Verdict) -> str:
    waited = verdict.evidence.waited_s
    return f"; since then the job has made no progress for {waited} s" if waited is not None else ""


def _imbalance(verdict: Verdict) -> str:
    if stage := verdict.evidence.slow_stage:
        extra = _ms(verdict.late_ms["median"]) if verdict.late_ms else "more"
        return (
            f"Uneven work, no faulty machine: the stage of {_ranks(stage)} works {extra} longer per step, "
            "and the others wait for it."
        )
    if more := verdict.evidence.more_work:
        extra = _ms(verdict.late_ms["median"]) if verdict.late_ms else "more"
        return (
            f"Uneven work, no faulty machine: {_ranks(more)} {'works' if len(more) == 1 else 'work'} {extra} longer "
            f"{_how_often(verdict)}, and the others wait."
        )
    return (
        f"Uneven work, no faulty machine: in {verdict.evidence.n_late_steps} of "
        f"{verdict.evidence.n_steps} steps a rank is late, and the late rank changes."
    )


def _inconclusive(verdict: Verdict) -> str:
    if verdict.evidence.largest_item:
        because = verdict.abstained_because
        return (
            f"Process {verdict.evidence.pid} has no known fault, but is not shown to be healthy: {because}."
        )
    if verdict.cost is None and verdict.evidence.suspects and verdict.late_ms is None:
        return f"The job makes no more calls: {verdict.abstained_because}."
    return f"Something is slow, but no rank can be named: {verdict.abstained_because}."


def _change(verdict: Verdict) -> str:
    """The whole job became slower: when, by how much, and which part of the step grew."""
    facts = verdict.evidence
    before, after = facts.step_ms_before or 0.0, facts.step_ms_after or 0.0
    parts = [f"{_words(name)} +{_ms(ms)}" for name, ms in (facts.grew_ms or {}).items()]
    growth = f" ({', '.join(parts)} per step)" if parts else ""
    return (
        f"The whole job became {after / before - 1:.0%} slower at step {verdict.evidence.from_step}: steps "
        f"take {_ms(after)} instead of {_ms(before)}{growth}. No rank is to blame: {verdict.abstained_because}."
    )


def _link(verdict: Verdict) -> str:
    suspects, times = verdict.evidence.suspects, verdict.evidence.times_as_long
    ranks = _ranks(suspects) if suspects else "a group of ranks"
    more = f", {_ms(verdict.late_ms['median'])} more in" if verdict.late_ms else " in"
    return (
        f"The collectives of {ranks} take {times} times as long on their GPUs as similar collectives{more} each of "
        f"{verdict.evidence.n_late_steps} steps: {verdict.abstained_because}."
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
    recurs = verdict.kind in ("straggler", "device", "process") and not verdict.evidence.is_one_off
    hours = cost.gpu_hours_per_day if recurs and cost.at_most_gpu_seconds is None else None
    rate = f" ({hours:.0f} GPU hours a day at this rate)" if hours is not None and hours >= 0.5 else ""
    return ", ".join(parts) + rate


def _gpu_seconds(cost: VerdictCost) -> str:
    if cost.at_most_gpu_seconds is not None:
        return _range(cost.gpu_seconds, cost.at_most_gpu_seconds, least=0.05, digits=1)
    return f"{'at least ' if cost.is_lower_bound else ''}{cost.gpu_seconds:.1f}"


def _range(low: float, high: float, *, least: float, digits: int) -> str:
    """A range of two numbers, or its upper end where the lower end is below least."""
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
        return ", ".join(map(str, value))
    return str(value)
