"""Holds a report against the truth of a generated job."""

from typing import Any, Literal, NamedTuple

from generator.jobs import Truth

from stallscope.diagnose.report.verdict import Report, Verdict

Mark = Literal["right", "accused", "wrong", "missed", "inconclusive"]

ACCUSING = ("straggler", "hang", "mismatch", "device", "failure")
"""Kinds of verdicts that accuse the ranks they name."""
GPU_CAUSES = ("gpu_slow", "gpu_shared", "gpu_fault")
MUST_NAME_SHARE = 0.05
"""A fault that costs less than this share of the time need not be named."""
SURE, AT_MOST = 0.1, 3.0
"""A cost is right within 10 %, or a range that contains the truth and ends at most at three times the truth."""


class Answer(NamedTuple):
    """The result of one job.

    mark: right; accused (a rank of a healthy job); wrong (a rank that is not the culprit); missed (no rank named, or an
    imbalance where the work is even, and not inconclusive); inconclusive. cause, cost: "" where none is to be judged.
    """

    mark: Mark
    cause: Literal["", "right", "wrong"]
    cost: Literal["", "right", "wrong"]
    cost_ratio: tuple[float, float] | None
    report: str


def answer(report: Report, truth: Truth) -> Answer:
    """The marks of a report."""
    text = "; ".join(map(_short, report.verdicts)) or ("healthy" if report.healthy else _gaps(report))
    named = {rank for verdict in _accusing(report) for rank in verdict.ranks}
    fault, is_small = truth.fault, truth.cost_share < MUST_NAME_SHARE
    if fault is None or (fault.ranks and not named and (is_small or _was_over(truth))):
        return Answer(_of_healthy(report, truth, named), "", "", None, text)
    if named - set(fault.ranks) - truth.may_name or _blames_more_work(report, truth, fault.ranks):
        return Answer("wrong", "", "", None, text)
    if not fault.ranks:
        return Answer(_of_whole_job(report, truth), "", "", None, text)
    if set(fault.ranks) <= named:
        cost, ratio = _cost(report, truth)
        return Answer("right", _cause(report, truth), cost, ratio, text)
    if is_small:
        return Answer("right", "", "", None, text)
    if not named - truth.may_name and _is_unknowable(truth) and (_is_at_times(truth) or not report.healthy):
        return Answer("right", "", "", None, text)
    return Answer("inconclusive" if _is_inconclusive(report) else "missed", "", "", None, text)


def _accusing(report: Report) -> list[Verdict]:
    return [verdict for verdict in report.verdicts if verdict.kind in ACCUSING]


def _of_healthy(report: Report, truth: Truth, named: set[int]) -> Mark:
    """Healthy or a remark is right; so are ranks with more work of their own, but not a slow GPU."""
    if named - truth.may_name or _blames_more_work(report, truth, ()):
        return "accused"
    if named or report.healthy:
        return "right"
    if _is_inconclusive(report):
        return "inconclusive"
    return "right" if truth.uneven or truth.fault else "missed"


def _blames_more_work(report: Report, truth: Truth, culprits: tuple[int, ...]) -> bool:
    """Whether a rank that has more work is named for a reason other than its work."""
    return any(
        set(verdict.ranks) & truth.may_name - set(culprits)
        and (verdict.kind != "straggler" or any(part.cause.name in GPU_CAUSES for part in verdict.causes))
        for verdict in _accusing(report)
    )


def _of_whole_job(report: Report, truth: Truth) -> Mark:
    """A job that slows down as a whole is reported as a change, without a name."""
    kinds = {verdict.kind for verdict in report.verdicts}
    if truth.cost_share < MUST_NAME_SHARE or "change" in kinds:
        return "right"
    return "inconclusive" if _is_inconclusive(report) else "missed"


def _is_unknowable(truth: Truth) -> bool:
    """Only GPU times and the driver's records show whose GPU is slow; a slow link may have any cause."""
    if truth.fault and truth.fault.kind == "slow_link":
        return True
    return bool(truth.fault and truth.fault.slow_gpus and not truth.has_gpu_times)


def _was_over(truth: Truth) -> bool:
    """Whether the fault cost nothing while all agents watched, as a stop before the last agent was attached."""
    return truth.recorded_gpu_s < MUST_NAME_SHARE * truth.cost_gpu_s


def _is_at_times(truth: Truth) -> bool:
    """Without GPU times, a GPU that is slow at times looks like steps of different lengths."""
    return bool(truth.fault and truth.fault.kind == "slow_gpu_at_times")


def _is_inconclusive(report: Report) -> bool:
    """The report abstains, by a verdict or because its data leave gaps."""
    kinds = {verdict.kind for verdict in report.verdicts}
    return "inconclusive" in kinds or (not report.healthy and not kinds)


def _cause(report: Report, truth: Truth) -> Literal["", "right", "wrong"]:
    assert truth.fault
    if not truth.fault.causes:
        return ""
    about = [verdict for verdict in _accusing(report) if set(verdict.ranks) & set(truth.fault.ranks)]
    first = about[0].causes[0].cause.name if about[0].causes else ""
    return "right" if first in truth.fault.causes else "wrong"


def _cost(report: Report, truth: Truth) -> tuple[Literal["", "right", "wrong"], tuple[float, float] | None]:
    """Whether the reported cost, or range, holds the true cost; and the ends of the range by the truth."""
    assert truth.fault
    true_s = truth.cost_gpu_s
    costs = [v.cost for v in _accusing(report) if v.cost and set(v.ranks) & set(truth.fault.ranks)]
    if true_s < 0.5:
        return "", None
    if not costs:
        return "wrong", None
    low = sum(cost.gpu_seconds for cost in costs)
    high = sum(cost.may_be_gpu_seconds for cost in costs)
    # A report on rows of some agents only may count the time in which not all agents watched, or leave it out.
    min_s, max_s = sorted((true_s, truth.recorded_gpu_s))
    is_right = low * (1 - SURE) <= max_s and min_s <= high * (1 + SURE) and high <= AT_MOST * max_s
    return ("right" if is_right else "wrong"), (round(low / true_s, 3), round(high / true_s, 3))


def _gaps(report: Report) -> str:
    return "inconclusive " + "; ".join(gap.reason for gap in report.gaps)[:80]


def _short(verdict: Verdict) -> str:
    ranks = ",".join(map(str, verdict.ranks[:8])) + (",..." if len(verdict.ranks) > 8 else "")
    cause = verdict.causes[0].cause.name if verdict.causes else ""
    why = "" if cause else (verdict.abstained_because or "")[:60]
    words: list[Any] = [verdict.kind, f"[{ranks}]" if ranks else "", cause, why]
    return " ".join(word for word in words if word)
