"""Compares two reports: the same job before and after a change, two jobs, or two windows of one job.

Takes the JSON of reports, so that a stored answer of `explain --json` can be the baseline. All measures are rates or
shares, so that the reports may cover different durations and numbers of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stallscope.diagnose.report.evidence import SLOWNESS
from stallscope.events.names import CATEGORY_NAMES

_MIN_POINTS = 0.01
"""A budget category that changed by less than one point of its share is not listed."""

MAX_GROWTH = 0.05
"""Relative growth of the step time that counts as a regression by default: jobs repeat within a few percent."""

_MAX_LOST_POINTS = 0.01

_STOPPED = frozenset({"hang", "mismatch", "failure"})
"""Kinds of verdicts after which the job makes no progress: worse than any lateness."""


@dataclass(frozen=True)
class Measures:
    """The comparable measures of a report. None where the source does not record it.

    step_ms: mean duration of a step; of a job of a hub, the typical duration. lost_share: GPU time lost to verdicts, as
    a share of all GPU time. max_lost_share: its upper end. late_ms: the largest median lateness of a verdict.
    budget: shares by category of the time ledger; of a job of a hub, productive time and losses. stopped: summary of
    the verdict after which the job makes no progress; "" where it continues. doubt: why the data may hide a fault; ""
    for complete data. usd_per_hour, max_usd_per_hour: cost of the verdicts at the hub's prices.
    """

    answer: str
    n_ranks: int
    step_ms: float | None
    lost_share: float | None
    max_lost_share: float | None
    late_ms: float | None
    ranks: tuple[int, ...]
    cause: str | None
    budget: Mapping[str, float]
    stopped: str = ""
    doubt: str = ""
    usd_per_hour: float | None = None
    max_usd_per_hour: float | None = None


@dataclass(frozen=True)
class Comparison:
    """regressions: one sentence for each measure that became worse by more than the limits.

    doubts: why the data may hide a regression.
    """

    before: Measures
    after: Measures
    regressions: tuple[str, ...]
    doubts: tuple[str, ...]

    @property
    def answer(self) -> str:
        """regression, inconclusive or no_regression. Incomplete data can show a regression, but not its absence."""
        if self.regressions:
            return "regression"
        return "inconclusive" if self.doubts else "no_regression"

    def as_json(self) -> dict[str, Any]:
        return {
            "answer": self.answer,
            "before": _as_json(self.before),
            "after": _as_json(self.after),
            "budget_change": {name: round(delta, 4) for name, delta in self.budget_changes().items()},
            "regressions": list(self.regressions),
            "doubts": list(self.doubts),
        }

    def budget_changes(self) -> dict[str, float]:
        """Change of each category's share, the largest first; empty where the sides have no category in common."""
        if self.before.budget.keys().isdisjoint(self.after.budget):
            return {}
        names = [*self.before.budget, *(name for name in self.after.budget if name not in self.before.budget)]
        deltas = {
            name: self.after.budget.get(name, 0.0) - self.before.budget.get(name, 0.0) for name in names
        }
        wanted = {name: delta for name, delta in deltas.items() if abs(delta) >= _MIN_POINTS}
        return dict(sorted(wanted.items(), key=lambda part: -abs(part[1])))

    def text(self) -> str:
        """A table for people, then the regressions."""
        rows = [
            ("answer", self.before.answer, self.after.answer, ""),
            _row("step", self.before.step_ms, self.after.step_ms, "{:,.1f} ms", is_relative=True),
            _row("GPU time lost", self.before.lost_share, self.after.lost_share, "{:.1%}"),
            _row("lateness", self.before.late_ms, self.after.late_ms, "{:,.1f} ms"),
            ("culprit", _culprit(self.before), _culprit(self.after), ""),
        ]
        if self.before.usd_per_hour or self.after.usd_per_hour:
            rows.append(_row("cost per hour", self.before.usd_per_hour, self.after.usd_per_hour, "${:,.2f}"))
        for name in self.budget_changes():
            label = name.replace("_", " ") if name in CATEGORY_NAMES else name
            values = (self.before.budget.get(name, 0.0), self.after.budget.get(name, 0.0))
            rows.append(_row(label, *values, "{:.0%}"))
        lines = [f"{'':16}{'before':>18}{'after':>18}   change"]
        lines += [f"{name:16}{old:>18}{new:>18}   {change}".rstrip() for name, old, new, change in rows]
        doubts = [f"Inconclusive: {doubt}." for doubt in self.doubts]
        lines += ["", *(self.regressions or doubts or ("No regression.",))]
        return "\n".join(lines)


def compared(
    before: Mapping[str, Any], after: Mapping[str, Any], *, max_growth: float = MAX_GROWTH
) -> Comparison:
    """The comparison of two reports (report.schema.json).

    max_growth: relative growth of the step time that is not a regression. The lost share of GPU time may grow by one
    point.
    """
    old, new = measures(before), measures(after)
    regressions = []
    if old.step_ms and new.step_ms and new.step_ms > old.step_ms * (1 + max_growth):
        growth = new.step_ms / old.step_ms - 1
        regressions.append(
            f"Regression: a step takes {new.step_ms:,.1f} ms, {growth:.0%} more than {old.step_ms:,.1f} ms."
        )
    lost_before, lost_after = old.lost_share or 0.0, new.lost_share or 0.0
    if lost_after > lost_before + _MAX_LOST_POINTS and old.answer != "inconclusive":
        regressions.append(
            f"Regression: {_culprit(new)} loses {lost_after:.1%} of the GPU time; before: {lost_before:.1%}."
        )
    if new.stopped and not old.stopped and old.answer != "inconclusive":
        regressions.append(f"Regression: {new.stopped}")
    if new.answer == "found" and old.answer == "healthy" and not regressions:
        regressions.append(f"Regression: a fault was found ({_culprit(new)}); the job was healthy before.")
    return Comparison(old, new, tuple(regressions), tuple(_doubts(old, new)))


def _doubts(old: Measures, new: Measures) -> Iterator[str]:
    """Why two reports without a regression do not show its absence."""
    for name, measured in (("before", old), ("after", new)):
        if measured.doubt:
            yield f"{name}: {measured.doubt}"
        elif measured.lost_share is None:
            yield f"{name}: the cost of the fault is not known"
        elif measured.step_ms is None and not measured.stopped:
            yield f"{name}: the data has no step times; annotate the steps (stallscope.annotate)"


def _doubt(report: Mapping[str, Any]) -> str:
    """Why the data of a report may hide a fault that it does not list; empty for complete data."""
    evidence = report.get("evidence") or {}
    if report.get("gaps"):
        return str(report["gaps"][0]["reason"])
    if report["answer"] == "inconclusive":
        verdict: Mapping[str, Any] = next(iter(report["verdicts"]), {})
        return str(verdict.get("abstained_because") or verdict.get("summary") or "the data shows no cause")
    if SLOWNESS in evidence.get("blind_spots", ()):
        return "the source shows hangs only, and no times"
    if missing := evidence.get("n_ranks_unseen"):  # reports saved before gaps were listed with a found fault
        return f"{missing} of {evidence['n_ranks'] + missing} ranks are not in this trace"
    return ""


def measures(report: Mapping[str, Any]) -> Measures:
    """The comparable measures of a report's JSON."""
    examined, verdicts = report["examined"], report["verdicts"]
    n_steps, seconds, n_ranks = (examined.get(name) or 0 for name in ("n_steps", "seconds", "n_ranks"))
    costs = [verdict.get("cost") or {} for verdict in verdicts]
    most = [_max_gpu_seconds(cost) for cost in costs]
    gpu_seconds = n_ranks * seconds
    stopped = [verdict["summary"] for verdict in verdicts if verdict["kind"] in _STOPPED]
    late = [verdict["late_ms"]["median"] for verdict in verdicts if verdict.get("late_ms")]
    worst = max(
        verdicts, key=lambda verdict: (verdict.get("cost") or {}).get("gpu_seconds") or 0.0, default=None
    )
    return Measures(
        answer=report["answer"],
        n_ranks=n_ranks,
        step_ms=report.get("step_ms") or (seconds / n_steps * 1000 if n_steps and seconds else None),
        lost_share=_share([cost.get("gpu_seconds") for cost in costs], gpu_seconds),
        max_lost_share=None if None in most else _share(most, gpu_seconds),
        late_ms=max(late, default=None),
        ranks=tuple(worst["ranks"]) if worst else (),
        cause=worst["causes"][0]["cause"] if worst and worst["causes"] else None,
        budget=(report.get("budget") or {}).get("shares") or {},
        stopped=stopped[0] if stopped else "",
        doubt=_doubt(report),
        usd_per_hour=report.get("usd_per_hour"),
        max_usd_per_hour=report.get("max_usd_per_hour"),
    )


def _share(costs: Sequence[float | None], gpu_seconds: float) -> float | None:
    """Share of all GPU time, at most 1; None where the costs or the GPU time are unknown. Unknown costs count as 0."""
    known = [cost for cost in costs if cost is not None]
    if not costs:
        return 0.0
    return min(1.0, sum(known) / gpu_seconds) if known and gpu_seconds else None


def _max_gpu_seconds(cost: Mapping[str, Any]) -> float | None:
    """The upper end of a cost; None where it is unknown."""
    if cost.get("at_most_gpu_seconds") is not None:
        return float(cost["at_most_gpu_seconds"])
    return None if cost.get("is_lower_bound") else cost.get("gpu_seconds")


def _as_json(measured: Measures) -> dict[str, Any]:
    return {
        "answer": measured.answer,
        "n_ranks": measured.n_ranks,
        "step_ms": measured.step_ms and round(measured.step_ms, 3),
        "lost_share": measured.lost_share and round(measured.lost_share, 4),
        "late_ms": measured.late_ms,
        "usd_per_hour": measured.usd_per_hour and round(measured.usd_per_hour, 4),
        "ranks": list(measured.ranks),
        "cause": measured.cause,
        "budget": dict(measured.budget),
    }


def _culprit(measured: Measures) -> str:
    if not measured.ranks:
        return measured.cause or "none"
    ranks = ", ".join(map(str, measured.ranks[:4])) + (", ..." if len(measured.ranks) > 4 else "")
    return f"rank {ranks}" + (f" ({measured.cause})" if measured.cause else "")


def _row(
    name: str, before: float | None, after: float | None, form: str, *, is_relative: bool = False
) -> tuple[str, str, str, str]:
    old, new = ("unknown" if value is None else form.format(value) for value in (before, after))
    if before is None or after is None:
        change = ""
    elif is_relative:
        change = f"{after / before - 1:+.0%}" if before else ""
    elif "$" in form:
        change = f"{after - before:+,.2f} $"
    elif "%" in form:
        change = f"{(after - before) * 100:+.1f} points"
    else:
        change = f"{after - before:+,.1f} ms"
    return name, old, new, change
