"""Holds a report against what is known: right, wrong, or abstained."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from stallscope.diagnose.report.verdict import Report, Verdict
from stallscope.synth.faults import Answer

Mark = Literal["right", "wrong", "abstained"]


class Judged(NamedTuple):
    """What became of one case.

    culprit: right when exactly the guilty are named (where nobody is guilty: nobody, and what it is instead is
    said); wrong when anybody else is; else abstained. cause: "" where there is none to tell. n_accused: ranks
    named that are not guilty. cost_gpu_seconds: as the verdicts say it, None where they say none, or a range.
    """

    culprit: Mark
    cause: Mark | Literal[""]
    n_accused: int
    cost_gpu_seconds: float | None
    said: str


def judged(report: Report, answers: Iterable[Answer], *, guilty: Iterable[int] = ()) -> Judged:
    """Compare a report with the answers that can be known.

    guilty: the ranks with a fault, also where the records cannot tell: naming them is never an accusation.
    """
    wanted = tuple(answers)
    named = {rank for verdict in report.verdicts for rank in verdict.ranks}
    theirs = {rank for answer in wanted for rank in _to_name(answer)}
    accused = named - theirs - set(guilty)
    costs = [verdict.cost for verdict in report.verdicts if verdict.cost]
    is_range = any(cost.at_most_gpu_seconds is not None for cost in costs)
    return Judged(
        culprit=_culprit(report, wanted, named=named, accused=accused),
        cause=_cause(report, wanted),
        n_accused=len(accused),
        cost_gpu_seconds=round(sum(cost.gpu_seconds for cost in costs), 3)
        if costs and not is_range
        else None,
        said="; ".join(map(_said, report.verdicts)) or "healthy",
    )


def _to_name(answer: Answer) -> tuple[int, ...]:
    """The ranks a verdict should name: a slow stage is shown as evidence, for no machine is bad."""
    return () if answer.kind in ("slow_stage", "imbalance", "all_slow", "unknown_device") else answer.ranks


def _culprit(report: Report, wanted: tuple[Answer, ...], *, named: set[int], accused: set[int]) -> Mark:
    if accused:
        return "wrong"
    return "right" if all(_is_told(report, answer, named) for answer in wanted) else "abstained"


def _is_told(report: Report, answer: Answer, named: set[int]) -> bool:
    kinds = {verdict.kind for verdict in report.verdicts}
    if answer.kind == "slow_stage":
        stages = [verdict.evidence.get("slow_stage") for verdict in report.verdicts]
        return list(answer.ranks) in stages
    if answer.kind == "imbalance":
        return "imbalance" in kinds
    if answer.kind == "all_slow":
        return answer.is_from_start or "inconclusive" in kinds
    if answer.kind == "unknown_device":
        return True
    return set(answer.ranks) <= named


def _cause(report: Report, wanted: tuple[Answer, ...]) -> Mark | Literal[""]:
    marks = [_cause_of(report, answer) for answer in wanted if _to_name(answer)]
    if not marks:
        return ""
    return "wrong" if "wrong" in marks else "abstained" if "abstained" in marks else "right"


def _cause_of(report: Report, answer: Answer) -> Mark:
    """Of the costliest verdict that names these ranks."""
    about = [verdict for verdict in report.verdicts if set(answer.ranks) & set(verdict.ranks)]
    if not about:
        return "abstained"
    told = _told_cause(about[0])
    if told in ("", "unknown"):
        return "abstained"
    return "right" if told == answer.cause else "wrong"


def _told_cause(verdict: Verdict) -> str:
    """In the words of the simulator, which tells hangs apart by what they come from."""
    if verdict.kind == "mismatch":
        calls = verdict.evidence["calls"]
        assert isinstance(calls, list)
        differs = [name for name in ("op", "datatype", "count") if len({call[name] for call in calls}) > 1]
        return f"mismatch_{differs[0]}" if differs else ""
    if verdict.evidence.get("crossed_order"):
        return "crossed_order"
    doing = verdict.evidence.get("doing")
    if verdict.kind == "hang" and isinstance(doing, list):
        return "missing_rank" if any(one.get("is_alive", True) for one in doing) else "dead_process"
    return verdict.causes[0].cause.name if verdict.causes else ""


def _said(verdict: Verdict) -> str:
    ranks = ",".join(map(str, verdict.ranks[:6])) + ("..." if len(verdict.ranks) > 6 else "")
    what = _told_cause(verdict) or (verdict.abstained_because or "")
    return " ".join(part for part in (verdict.kind, f"[{ranks}]" if ranks else "", what) if part)
