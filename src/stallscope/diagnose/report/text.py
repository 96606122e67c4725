"""A report as plain text, for people. No other part parses this text."""

from collections.abc import Mapping

from stallscope.diagnose.causes import Explained
from stallscope.diagnose.evidence_fields import RequestPart, as_json
from stallscope.diagnose.processes.budget_summary import lines as summary_lines
from stallscope.diagnose.report.evidence import Evidence
from stallscope.diagnose.report.phrases import ms_text, name_text, ranks_text, stack_text, value_text
from stallscope.diagnose.report.sentences import summary
from stallscope.diagnose.report.verdict import Report, Verdict, VerdictCost, wall_text
from stallscope.events.counted import counted, counted_reason

__all__ = ["headline", "report", "summary"]

_MAX_STACKS = 4
_MAX_IN_SHORT = 4
_HIDDEN_CHANGE = 0.08
"""The smallest change that shows is printed from this share of a step on; below, it is near the threshold."""
_COLUMNS, _LINES = 80, 20  # of a small terminal, without the prompt and the command


def report(result: Report) -> str:
    """The whole report as plain text."""
    lines = [f"Events: {result.source}." if result.source else "Events: from a trace.", _examined(result)]
    lines += summary_lines(result.activity)
    lines += [result.budget.line()] if result.budget else []
    answer = _answer(result)
    for number, verdict in enumerate(result.verdicts, 1):
        answer += ["", *_block(verdict, number, len(result.verdicts))]
    for remark in result.benign:
        answer += ["", f"Not an alarm: {_remark(remark)}"]
    return "\n".join([*lines, *answer, *_in_short(result, answer)])


def _in_short(result: Report, answer: list[str]) -> list[str]:
    """The costliest verdicts in a line each, where the first verdict is no longer on the terminal."""
    if sum(1 + max(len(line) - 1, 0) // _COLUMNS for line in answer) <= _LINES or not result.verdicts:
        return []
    numbered = sorted(
        enumerate(result.verdicts, 1),
        key=lambda each: -(each[1].cost.may_be_gpu_seconds if each[1].cost else 0.0),
    )
    n = len(numbered)
    heads = [f"[{number}/{n}] " if n > 1 else "" for number, _ in numbered]
    shown = [f"{head}{verdict.summary}" for head, (_, verdict) in zip(heads, numbered, strict=True)]
    rest = n - _MAX_IN_SHORT
    return ["", "In short:", *shown[:_MAX_IN_SHORT], *([f"and {rest} more"] if rest > 0 else [])]


def headline(result: Report) -> str:
    """The answer in one sentence: the first verdict, health, or the first reason for an inconclusive answer."""
    if result.verdicts:
        return result.verdicts[0].summary
    if result.gaps:
        return f"Inconclusive: {result.gaps[0].reason}."
    if n_requests := result.examined.get("n_requests"):
        return f"Healthy: {counted(n_requests, 'request')}, none much later than the others."
    if result.evidence and not result.evidence.shows_slowness:
        return "Healthy: no rank hangs."
    has_peers = result.examined["n_rounds"] and result.examined["n_ranks"] != 1
    return f"Healthy: {'no rank slows down the others' if has_peers else 'nothing keeps a GPU waiting'}."


def _answer(result: Report) -> list[str]:
    """The answer without a verdict: healthy with its evidence, or inconclusive with the reasons."""
    if result.verdicts:
        return []
    evidence = _evidence(result.evidence) if result.evidence else []
    share = result.evidence.min_change_share if result.evidence else None
    if share is not None and share >= _HIDDEN_CHANGE and not result.gaps:
        evidence.append(("limits", f"a change of the job's pace of less than {share:.0%} may not show"))
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
        omitted = ", ".join(counted_reason(n, reason) for reason, n in evidence.coverage.omitted.items())
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
        if readings := part.evidence.gpu_readings:
            rows.append(("readings", f"{', '.join(readings)} (by the driver)"))
    rows += [("path" if i == 0 else "", _part(each)) for i, each in enumerate(verdict.evidence.parts or [])]
    rows += [("engine", line) for line in _own_times(verdict)]
    rows += [("code", line) for line in _code(verdict)]
    rows += [("link", f"{state} (by the driver)") for state in verdict.evidence.link_states or ()]
    if sends := verdict.evidence.sends:
        rows.append(("transfers", f"slow from rank {', '.join(sends)}"))
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
    shown = ("user", "account", "partition", "namespace", "workload", "pod", "queue", "model", "task", "unit")
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
            *(
                _fact(name, value)
                for name, value in as_json(part.evidence).items()
                if name not in ("doing", "gpu_readings")
            ),
        ]
    )


def _fact(name: str, value: object) -> str:
    """One entry of the evidence: `21 intervals`, `longest 294 ms`, `devices nvme0n1`."""
    if name.startswith("n_") and isinstance(value, int):
        return f"{value} {name_text(name)}"
    if (name == "ms" or name.endswith("_ms")) and isinstance(value, int | float):
        return f"{name_text(name[:-3])} {ms_text(value)}".strip()
    if "_ms_" in name and isinstance(value, list):
        return f"{name_text(name.replace('_ms_', '_'))} {', '.join(map(ms_text, value))}"
    return f"{name_text(name)} {value_text(value)}"


def _times(ms_of: Mapping[str, float]) -> str:
    """Times by name, in milliseconds: `on cpu 430 ms, lock 13 ms`."""
    return ", ".join(f"{name_text(name)} {ms_text(ms)}" for name, ms in ms_of.items())


def _part(part: RequestPart) -> str:
    """A part of the path of late requests: `decode 443 ms in process 4711: on cpu 430 ms, lock 13 ms`."""
    states = _times(part.states or {})
    process = f" in process {part.pid}" if part.pid else ""
    return f"{name_text(part.part)} {ms_text(part.ms)}{process}{f': {states}' if states else ''}"


def _own_times(verdict: Verdict) -> list[str]:
    """The engine's own times of late requests, next to the recorded times."""
    facts = verdict.evidence
    if not (facts.engine_ms and facts.recorded_ms):
        return []
    own, recorded = _times(facts.engine_ms), _times(facts.recorded_ms)
    return [
        f"spans of {counted(facts.n_spans or 0, 'request')}: {own}; recorded times of the same requests: {recorded}"
    ]


def _victims(verdict: Verdict) -> str:
    """The ranks that waited, and how long each did on average."""
    if verdict.cost is None or verdict.cost.may_be_gpu_seconds <= 0:
        return ranks_text(verdict.victims)
    each = ms_text(1000 * verdict.cost.may_be_gpu_seconds / len(verdict.victims))
    most = "up to " if verdict.cost.at_most_gpu_seconds is not None else ""
    least = "at least " if verdict.cost.is_lower_bound and not most else ""
    return f"{ranks_text(verdict.victims)} waited {most or least}{each}{' each' if len(verdict.victims) > 1 else ''}"


def _code(verdict: Verdict) -> list[str]:
    """The stacks in which the named ranks are or were held, one line for each."""
    if verdict.evidence.stack:
        return [stack_text(verdict.evidence.stack)]
    doing = verdict.evidence.doing or []
    return [
        (f"rank {activity.rank}: " if len(doing) > 1 else "") + stack_text(activity.stack)
        for activity in doing[:_MAX_STACKS]
        if activity.stack
    ]


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
    rest = ", ".join(_fact(name, value) for name, value in remark.items() if name not in ("what", "at_ns"))
    return f"{remark['what']}{f' ({rest})' if rest else ''}."
