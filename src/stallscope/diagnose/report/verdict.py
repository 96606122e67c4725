"""The answer as data: a report with its verdicts. report.schema.json in this folder is the contract."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from stallscope.diagnose import evidence_fields
from stallscope.diagnose.causes import Explained
from stallscope.diagnose.evidence_fields import VerdictEvidence
from stallscope.diagnose.report.budget import Budget
from stallscope.diagnose.report.evidence import Evidence
from stallscope.diagnose.report.recommendation import recommendation
from stallscope.events.clock_text import iso_utc
from stallscope.events.trace import Gap


@dataclass(frozen=True)
class VerdictCost:
    """The cost of a verdict's fault. usd and usd_per_hour (of the examined time) only where a price is known.

    gpu_hours_per_day: the cost at the rate of the examined time.
    is_lower_bound: the cost is at least this much. at_most_gpu_seconds: upper bound, at_most_usd its price; None where
    the bound is unknown.
    """

    gpu_seconds: float
    usd: float | None
    usd_per_hour: float | None
    is_lower_bound: bool
    at_most_gpu_seconds: float | None = None
    at_most_usd: float | None = None
    gpu_hours_per_day: float | None = None

    @classmethod
    def of(
        cls,
        gpu_seconds: float,
        usd_per_gpu_hour: float | None,
        *,
        is_lower_bound: bool,
        observed_ns: float,
    ) -> "VerdictCost":
        """The cost of GPU seconds with their price, in total and per hour of the observed time."""
        price, hours = usd_per_gpu_hour, observed_ns / 3.6e12
        usd = None if price is None else gpu_seconds / 3600 * price
        return cls(
            gpu_seconds=round(float(gpu_seconds), 3),
            usd=None if usd is None else round(usd, 4),
            usd_per_hour=round(usd / hours, 4) if usd is not None and hours > 0 else None,
            is_lower_bound=is_lower_bound,
            gpu_hours_per_day=round(gpu_seconds / 3600 / hours * 24, 2) if hours > 0 else None,
        )

    def times(self, share: float) -> "VerdictCost":
        """A share of the cost, such as the share of the ranks that are not named."""
        values = (self.gpu_seconds, self.usd, self.usd_per_hour, self.at_most_gpu_seconds, self.at_most_usd)
        seconds, usd, by_hour, most, max_usd = (None if each is None else each * share for each in values)
        return VerdictCost(round(seconds or 0.0, 3), usd, by_hour, self.is_lower_bound, most, max_usd)

    @property
    def may_be_gpu_seconds(self) -> float:
        """The upper end of the cost, or the cost itself without a range."""
        return self.gpu_seconds if self.at_most_gpu_seconds is None else self.at_most_gpu_seconds


@dataclass(frozen=True)
class Verdict:
    """A fault, or a symptom whose fault cannot be named.

    kind: straggler, hang, mismatch, imbalance, device, process (a process without peers),
    failure (of a CUDA call, of a process), change (all ranks became slower), link (slow
    collectives of a group), idle (GPUs held without use), inconclusive.
    ranks: the ranks with the fault, none for imbalance.
    pids: process ids, one for each of ranks; empty where the source has none. first_step: the first late step.
    owner: labels of events/owner.py that the named processes share.
    Times are wall-clock ns since 1970, None where no clock was recorded. late_ms: median, max over late steps.
    """

    kind: str
    summary: str
    ranks: list[int] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    comm_hash: str | None = None
    first_round: int | None = None
    last_round: int | None = None
    n_late_rounds: int = 0
    n_rounds: int = 0
    late_ms: dict[str, float] | None = None
    period_steps: int | None = None
    since_ns: int | None = None
    until_ns: int | None = None
    n_incidents: int = 0
    causes: list[Explained] = field(default_factory=list)
    confidence: float = 0.0
    victims: list[int] = field(default_factory=list)
    cost: VerdictCost | None = None
    advice: list[str] = field(default_factory=list)
    abstained_because: str | None = None
    evidence: VerdictEvidence = field(default_factory=VerdictEvidence)
    severity: str = ""
    pids: list[int] = field(default_factory=list)
    first_step: int | None = None
    owner: dict[str, str] = field(default_factory=dict)


class Answer(StrEnum):
    """The three answers of a report, with the exit codes of `explain`."""

    HEALTHY = "healthy"
    FOUND = "found"
    INCONCLUSIVE = "inconclusive"

    @property
    def exit_code(self) -> int:
        """Beyond the exit codes of errors, which end at 19."""
        return {Answer.HEALTHY: 0, Answer.FOUND: 20, Answer.INCONCLUSIVE: 21}[self]


@dataclass(frozen=True)
class Report:
    """The verdicts on a trace, and the evidence for the answer.

    source: the kind of events. examined: counts of the examined data. benign: remarks that need no action.
    evidence: how complete the data is. gaps: why the answer is inconclusive if no fault is reported, and
    may hide a further fault otherwise.
    budget: the job's time by category of the time ledger.
    activity: the time budget of each process as data, see processes/budget_summary.py.
    """

    source: str
    examined: dict[str, Any]
    verdicts: list[Verdict]
    benign: list[dict[str, object]] = field(default_factory=list)
    evidence: Evidence | None = None
    gaps: tuple[Gap, ...] = ()
    budget: Budget | None = None
    activity: list[dict[str, Any]] = field(default_factory=list)

    @property
    def answer(self) -> Answer:
        if any(verdict.kind != "inconclusive" for verdict in self.verdicts):
            return Answer.FOUND
        return Answer.INCONCLUSIVE if self.verdicts or self.gaps else Answer.HEALTHY

    @property
    def healthy(self) -> bool:
        """Whether the data shows that no fault slows down the job; an inconclusive answer is not healthy."""
        return self.answer is Answer.HEALTHY


def as_json(report: Report) -> dict[str, Any]:
    """The report as the JSON Schema report.schema.json describes it."""
    return {
        "answer": report.answer.value,
        "healthy": report.healthy,
        "source": report.source,
        "examined": report.examined,
        "looked_at": report.examined,  # until the next release
        "evidence": report.evidence.as_json() if report.evidence else None,
        "gaps": [asdict(gap) for gap in report.gaps],
        "budget": report.budget.as_json() if report.budget else None,
        "benign": report.benign,
        "activity": report.activity,
        "verdicts": [verdict_as_json(verdict) for verdict in report.verdicts],
    }


def verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as in the JSON of a report."""
    out = {
        name: getattr(verdict, name)
        for name in Verdict.__dataclass_fields__
        if name not in ("since_ns", "until_ns", "causes", "cost", "evidence")
    }
    out["evidence"] = evidence_fields.as_json(verdict.evidence)
    out["since"], out["until"] = wall_text(verdict.since_ns), wall_text(verdict.until_ns)
    out["causes"] = [
        {
            "cause": part.cause.name,
            "share": round(part.share, 4),
            "excess_ms": round(part.excess_ns / 1e6, 3),
            "evidence": evidence_fields.as_json(part.evidence),
        }
        for part in verdict.causes
    ]
    out["cost"] = asdict(verdict.cost) if verdict.cost else None
    out["recommendation"] = recommendation(verdict).as_json()
    return out


def wall_text(wall_ns: int | None) -> str | None:
    """ISO 8601 in UTC with milliseconds, e.g. 2026-11-27T21:32:16.223Z."""
    return None if wall_ns is None else iso_utc(wall_ns)
