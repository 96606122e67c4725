"""The sentence of a verdict on a hang or on a failure."""

from stallscope.diagnose.evidence_fields import RankActivity, VerdictEvidence
from stallscope.diagnose.report.phrases import identity_text, name_text, ranks_text, short_frame
from stallscope.diagnose.report.verdict import Verdict

_STATES = {"preempted": "on_cpu", "other_off": "blocked", "net": "waiting for a socket or pipe"}
"""States in words, where the name of the ledger's category does not describe a single moment."""


def failure_sentence(verdict: Verdict) -> str:
    """The rank or process that ended first, and its error."""
    facts = verdict.evidence
    subject = f"Rank {verdict.ranks[0]}" if verdict.ranks else f"Process {facts.pid}"
    host = identity_text(verdict)
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
        f"(error {facts.error}, {facts.error_text}, in {facts.function or 'a CUDA call'})."
    )


def _stated_failure(facts: VerdictEvidence, subject: str) -> str:
    """A failure that a log states, with the line of code where the log has it."""
    first = " first" if facts.also_failed_later else ""
    at = f", at {short_frame(facts.at)}" if facts.at else ""
    status, stated = facts.exit_status, facts.stated or ""
    end = f" (exit status {status})" if status is not None and f"status {status}" not in stated else ""
    return f"{subject} failed{first}: {stated.rstrip('.')}{end}{at}."


def hang_sentence(verdict: Verdict) -> str:
    """The ranks that the others wait for, in which round, and the activity of these ranks."""
    waited = verdict.evidence.waited_s
    time = f" for {waited} s" if waited is not None else ""
    if verdict.evidence.captured_late:
        return _attached_late(verdict)
    if verdict.evidence.by_stacks:
        return _by_stacks(verdict)
    if verdict.evidence.is_circle:
        return (
            f"The job hangs{time}: {ranks_text(verdict.ranks)} wait for each other in collectives of different "
            "communicators."
        )
    what = round_text(verdict) if verdict.first_round is not None else "a call"
    if verdict.abstained_because:
        return f"The job hangs{time}, and no rank can be named: {verdict.abstained_because}."
    if verdict.evidence.crossed_order:
        return (
            f"The job hangs for {waited} s: {ranks_text(verdict.ranks)} entered the rounds of two communicators in "
            "a different order than the other ranks."
        )
    doing = verdict.evidence.doing or []
    activity = _doing(doing[0]) if len(doing) == 1 else ""
    verb = "has" if len(verdict.ranks) == 1 else "have"
    silent = verdict.evidence.left_no_dump
    more = f" The state of {ranks_text(silent)} is unknown: no dump was left." if silent else ""
    more += _called_at(verdict)
    if _states(doing) == {"no_dump"}:
        ranks = ranks_text(verdict.ranks)
        return (
            f"The job hangs in {what}{time}: {ranks} left no dump, and the others wait there{activity}.{more}"
        )
    return f"The job hangs: {ranks_text(verdict.ranks)} {verb} not {_missing_part(doing)} {what}{time}{activity}.{more}"


def round_text(verdict: Verdict) -> str:
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
    at = short_frame(facts.doing[0].at or "") if facts.doing else "a different line"
    verb = "is" if len(verdict.ranks) == 1 else "are"
    return (
        f"The stacks differ: {ranks_text(verdict.ranks)} {verb} at {at}, while {ranks_text(verdict.victims)} wait at "
        f"{short_frame(facts.others_at or '')}. If the job hangs, it waits for {ranks_text(verdict.ranks)}."
    )


def _attached_late(verdict: Verdict) -> str:
    """A standstill that began before the capture."""
    facts = verdict.evidence
    head = (
        f"Attached after the stall began: all {facts.n_ranks} ranks have made no progress for at least "
        f"{facts.waited_s} s"
    )
    if verdict.ranks and facts.doing:
        return f"{head}. The others likely wait for {ranks_text(verdict.ranks)}{_doing(facts.doing[0])}."
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
        known = f" (state {name_text(state)})" if state else ""
        return f"{_failed_call(facts)}; it {verb} at {short_frame(facts.at)} instead{known}{by}{later}"
    doing = f"; it {verb} in state {name_text(state)} instead{by}" if state else ""
    return f"{_failed_call(facts)}{doing}{later}"


def _failed_call(facts: RankActivity | VerdictEvidence) -> str:
    """The failed call after which the rank left the step."""
    return f"; its {facts.failed_call} failed with error {facts.error}" if facts.failed_call else ""


def _ended(facts: RankActivity | VerdictEvidence) -> str:
    status, by = facts.exit_status, facts.ended_by
    code = f" (exit status {status})" if status is not None else ""
    signal = f" after {facts.exit_requested_by}" if facts.exit_requested_by else ""
    return f"was ended by {by}{code}" if by else f"has ended{signal}{code}"
