"""Compares a report with the known truth: right, wrong or abstained."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.synth.fault_models import Answer

Mark = Literal["right", "wrong", "abstained"]


class Judged(NamedTuple):
    """The result of one case.

    culprit: right if the report names exactly the culprits, or no rank and the kind of problem where no rank is a
    culprit; wrong if it names another rank; otherwise abstained. cause: "" where the truth has none. n_accused: named
    ranks that are not culprits. cost_gpu_seconds: sum over the verdicts, None without a cost or with a range.
    """

    culprit: Mark
    cause: Mark | Literal[""]
    n_accused: int
    cost_gpu_seconds: float | None
    said: str


def judged(report: Report, answers: Iterable[Answer], *, guilty: Iterable[int] = ()) -> Judged:
    """Compare a report with the answers that the records can show.

    guilty: the ranks with a fault, also a fault that the records cannot show: naming them is never an accusation.
    """
    answers = tuple(answers)
    named = {rank for verdict in report.verdicts for rank in verdict.ranks}
    expected = {rank for answer in answers for rank in _to_name(answer)}
    accused = named - expected - set(guilty)
    costs = [verdict.cost for verdict in report.verdicts if verdict.cost]
    is_range = any(cost.at_most_gpu_seconds is not None for cost in costs)
    return Judged(
        culprit=_culprit(report, answers, named=named, accused=accused),
        cause=_cause(report, answers),
        n_accused=len(accused),
        cost_gpu_seconds=round(sum(cost.gpu_seconds for cost in costs), 3)
        if costs and not is_range
        else None,
        said="; ".join(map(_short, report.verdicts)) or "healthy",
    )


def _to_name(answer: Answer) -> tuple[int, ...]:
    """The ranks that a verdict should name. A slow stage is evidence only, because no machine is bad."""
    return () if answer.kind in ("slow_stage", "imbalance", "all_slow", "unknown_device") else answer.ranks


def _culprit(report: Report, answers: tuple[Answer, ...], *, named: set[int], accused: set[int]) -> Mark:
    if accused:
        return "wrong"
    return "right" if all(_is_reported(report, answer, named) for answer in answers) else "abstained"


def _is_reported(report: Report, answer: Answer, named: set[int]) -> bool:
    kinds = {verdict.kind for verdict in report.verdicts}
    if answer.kind == "slow_stage":
        stages = [verdict.evidence.slow_stage for verdict in report.verdicts]
        return list(answer.ranks) in stages
    if answer.kind == "imbalance":
        return "imbalance" in kinds
    if answer.kind == "all_slow":
        return answer.is_from_start or bool(kinds & {"change", "inconclusive"})
    if answer.kind == "unknown_device":
        return True
    return set(answer.ranks) <= named


def _cause(report: Report, answers: tuple[Answer, ...]) -> Mark | Literal[""]:
    marks = [_cause_of(report, answer) for answer in answers if _to_name(answer)]
    if not marks:
        return ""
    return "wrong" if "wrong" in marks else "abstained" if "abstained" in marks else "right"


def _cause_of(report: Report, answer: Answer) -> Mark:
    """The mark for the cause of the costliest verdict that names these ranks."""
    about = [verdict for verdict in report.verdicts if set(answer.ranks) & set(verdict.ranks)]
    if not about:
        return "abstained"
    cause = _reported_cause(about[0])
    if cause in ("", "unknown"):
        return "abstained"
    return "right" if cause == answer.cause else "wrong"


def _reported_cause(verdict: Verdict) -> str:
    """The cause in the simulator's vocabulary, which distinguishes hangs by their origin."""
    if verdict.kind == "mismatch":
        calls = verdict.evidence.calls or []
        differs = [
            name for name in ("op", "datatype", "count") if len({getattr(call, name) for call in calls}) > 1
        ]
        return f"mismatch_{differs[0]}" if differs else ""
    if verdict.evidence.crossed_order:
        return "crossed_order"
    doing = verdict.evidence.doing
    if verdict.kind == "hang" and doing is not None:
        return "missing_rank" if any(rank.is_alive is not False for rank in doing) else "dead_process"
    return verdict.causes[0].cause.name if verdict.causes else ""


def _short(verdict: Verdict) -> str:
    ranks = ",".join(map(str, verdict.ranks[:6])) + ("..." if len(verdict.ranks) > 6 else "")
    detail = _reported_cause(verdict) or (verdict.abstained_because or "")
    return " ".join(part for part in (verdict.kind, f"[{ranks}]" if ranks else "", detail) if part)
