"""Compares two reports: the same job before and after a change, two jobs, or two windows of one job.

Takes the JSON of reports, so that a stored answer of `explain --json` can be the baseline. All measures are rates or
shares, so that the reports may cover different durations and numbers of ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stallscope.events.names import CATEGORY_NAMES

_LEAST_POINTS = 0.01
"""A budget category that changed by less than one point of its share is not listed."""

MAX_GROWTH = 0.05
"""Relative growth of the step time that counts as a regression by default: jobs repeat within a few percent."""

_MAX_LOST_POINTS = 0.01


@dataclass(frozen=True)
class Measures:
    """The comparable measures of a report. None where the source does not record it.

    step_ms: mean duration of a step. lost_share: GPU time lost to the verdicts, as a share of all GPU time.
    late_ms: the largest median lateness of a verdict. budget: shares by category of the time ledger.
    """

    answer: str
    n_ranks: int
    step_ms: float | None
    lost_share: float | None
    late_ms: float | None
    ranks: tuple[int, ...]
    cause: str | None
    budget: Mapping[str, float]


@dataclass(frozen=True)
class Comparison:
    """regressions: one sentence for each measure that became worse by more than the limits."""

    before: Measures
    after: Measures
    regressions: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "before": _as_json(self.before),
            "after": _as_json(self.after),
            "budget_change": {name: round(delta, 4) for name, delta in self.budget_changes().items()},
            "regressions": list(self.regressions),
        }

    def budget_changes(self) -> dict[str, float]:
        """Change of each category's share, the largest first."""
        names = [*self.before.budget, *(name for name in self.after.budget if name not in self.before.budget)]
        deltas = {
            name: self.after.budget.get(name, 0.0) - self.before.budget.get(name, 0.0) for name in names
        }
        wanted = {name: delta for name, delta in deltas.items() if abs(delta) >= _LEAST_POINTS}
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
        for name in self.budget_changes():
            label = name.replace("_", " ") if name in CATEGORY_NAMES else name
            values = (self.before.budget.get(name, 0.0), self.after.budget.get(name, 0.0))
            rows.append(_row(label, *values, "{:.0%}"))
        lines = [f"{'':16}{'before':>18}{'after':>18}   change"]
        lines += [f"{name:16}{old:>18}{new:>18}   {change}".rstrip() for name, old, new, change in rows]
        lines += ["", *(self.regressions or ("No regression.",))]
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
    if lost_after > lost_before + _MAX_LOST_POINTS:
        regressions.append(
            f"Regression: {_culprit(new)} loses {lost_after:.1%} of the GPU time; before: {lost_before:.1%}."
        )
    if new.answer == "found" and old.answer == "healthy" and not regressions:
        regressions.append(f"Regression: a fault was found ({_culprit(new)}); the job was healthy before.")
    return Comparison(old, new, tuple(regressions))


def measures(report: Mapping[str, Any]) -> Measures:
    """The comparable measures of a report's JSON."""
    examined, verdicts = report["examined"], report["verdicts"]
    n_steps, seconds, n_ranks = (examined.get(name) or 0 for name in ("n_steps", "seconds", "n_ranks"))
    costs = [verdict["cost"]["gpu_seconds"] for verdict in verdicts if verdict.get("cost")]
    late = [verdict["late_ms"]["median"] for verdict in verdicts if verdict.get("late_ms")]
    worst = max(
        verdicts, key=lambda verdict: (verdict.get("cost") or {}).get("gpu_seconds") or 0.0, default=None
    )
    return Measures(
        answer=report["answer"],
        n_ranks=n_ranks,
        step_ms=seconds / n_steps * 1000 if n_steps and seconds else None,
        lost_share=min(1.0, sum(costs) / (n_ranks * seconds)) if n_ranks and seconds else None,
        late_ms=max(late, default=None),
        ranks=tuple(worst["ranks"]) if worst else (),
        cause=worst["causes"][0]["cause"] if worst and worst["causes"] else None,
        budget=(report.get("budget") or {}).get("shares") or {},
    )


def _as_json(measured: Measures) -> dict[str, Any]:
    return {
        "answer": measured.answer,
        "n_ranks": measured.n_ranks,
        "step_ms": measured.step_ms and round(measured.step_ms, 3),
        "lost_share": measured.lost_share and round(measured.lost_share, 4),
        "late_ms": measured.late_ms,
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
    elif "%" in form:
        change = f"{(after - before) * 100:+.1f} points"
    else:
        change = f"{after - before:+,.1f} ms"
    return name, old, new, change
