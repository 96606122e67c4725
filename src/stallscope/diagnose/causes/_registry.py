"""The list of causes, and the part of an excess that each of them explains."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np

from stallscope.diagnose.evidence_fields import CauseEvidence
from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.names import N_CATEGORIES, Category, HostKind, Op


@dataclass(frozen=True)
class Excess:
    """The additional time and calls of a late rank relative to its peers, summed over its late steps.

    total_ns: its self time beyond theirs. ledger_ns: the same by category (N_CATEGORIES,), may be negative.
    n_syncs, n_allocs, n_copies, n_launches: calls beyond theirs. n_steps: late steps.
    calls, offcpu, host: the rank's own rows of these tables (host_events) within the late intervals.
    knows_syscalls: the source distinguishes off-CPU time by system call. knows_blocking: it distinguishes time off the
    CPU from time that it does not record. symbols: names by number, for calls. samples: of the rank's GPU threads, in
    the seconds of the late intervals. stacks: frames by the number in `stack` columns.
    """

    total_ns: float
    ledger_ns: Array
    n_steps: int
    n_syncs: float = 0.0
    n_allocs: float = 0.0
    n_copies: float = 0.0
    n_launches: float = 0.0
    calls: Array = field(default_factory=lambda: layout.empty(layout.CALLS))
    offcpu: Array = field(default_factory=lambda: layout.empty(layout.OFFCPU))
    host: Array = field(default_factory=lambda: layout.empty(layout.HOST_EVENTS))
    knows_syscalls: bool = True
    knows_blocking: bool = True
    symbols: tuple[str, ...] = ("",)
    samples: Array = field(default_factory=lambda: layout.empty(layout.SAMPLES))
    stacks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def ns(self, *categories: Category) -> float:
        """Excess time in these categories, never negative."""
        return float(sum(max(self.ledger_ns[category - 1], 0.0) for category in categories))

    def off(self, category: Category) -> Array:
        """The rank's off-CPU intervals of one category."""
        return self.offcpu[self.offcpu["category"] == category]

    def on_host(self, *kinds: HostKind) -> Array:
        """The host events of these kinds on the rank within the late intervals."""
        return self.host[np.isin(self.host["kind"], kinds)]

    def made(self, *ops: Op) -> Array:
        """The rank's slow calls of these operations."""
        return self.calls[np.isin(self.calls["op"], ops)]


def _no_evidence(_excess: Excess) -> CauseEvidence:
    return CauseEvidence()


@dataclass(frozen=True)
class Cause:
    """A reason for lateness.

    name: as in the report. title: in words, after "because it". categories: ledger categories it claims.
    state: the same as a clause for a headline, "30 ms late, asleep in nanosleep". noun: the same for a list of causes.
    because: the state with the evidence's detail; empty where the evidence adds none.
    claims_ns: the part of an excess it explains; None: the whole time of its categories.
    evidence: facts for the report, short. advice: one or two next steps that fit the evidence.
    """

    name: str
    title: str
    categories: tuple[Category, ...]
    advice: Callable[[CauseEvidence], list[str]]
    evidence: Callable[[Excess], CauseEvidence] = _no_evidence
    claims_ns: Callable[[Excess], float] | None = None
    because: Callable[[CauseEvidence], str] | None = None
    state: str = ""
    noun: str = ""


@dataclass(frozen=True)
class Explained:
    """One cause's part of an excess; share of the whole, 0..1."""

    cause: Cause
    share: float
    excess_ns: float
    evidence: CauseEvidence = field(default_factory=CauseEvidence)

    @property
    def title(self) -> str:
        """The cause in words, after "because it"."""
        return self.cause.title

    @property
    def state(self) -> str:
        """The cause as a clause of a headline, with the evidence's detail."""
        detail = self.cause.because(self.evidence) if self.cause.because else ""
        return detail or self.cause.state or f"because it {self.cause.title}"

    @property
    def noun(self) -> str:
        """The cause as an entry of a list."""
        return self.cause.noun or self.cause.title


_MIN_SHARE = 0.05
_SEPARATE_SHARE = 0.35


def all_causes() -> list[Cause]:
    """Every cause, by name."""
    import stallscope.diagnose.causes as package

    modules = [import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return sorted((m.CAUSE for m in modules if hasattr(m, "CAUSE")), key=lambda cause: cause.name)


def cause(name: str) -> Cause:
    """One cause by name. Raises KeyError."""
    return {cause.name: cause for cause in all_causes()}[name]


def explained(excess: Excess, cause_share: float = 0.8) -> list[Explained]:
    """The causes of an excess, largest first; those under 5 % are left out.

    A cause with claims_ns takes its part of the categories before the causes that claim whole categories. The
    unexplained part is the cause "unknown" if the causes explain at most cause_share of the whole.
    """
    remaining = np.maximum(excess.ledger_ns[:N_CATEGORIES], 0.0)
    remaining[Category.WAIT_GPU - 1] = 0.0
    whole = max(excess.total_ns, float(remaining.sum()), 1.0)
    parts = []
    for candidate in sorted(all_causes(), key=lambda each: each.claims_ns is None):
        available = float(sum(remaining[category - 1] for category in candidate.categories))
        claimed = available if candidate.claims_ns is None else min(candidate.claims_ns(excess), available)
        if claimed <= 0:
            continue
        for category in candidate.categories:
            remaining[category - 1] *= 1 - claimed / available
        parts.append(Explained(candidate, claimed / whole, claimed, candidate.evidence(excess)))
    missing = 1.0 - sum(part.share for part in parts)
    if missing >= 1 - cause_share:
        unknown = cause("unknown")
        parts.append(Explained(unknown, missing, missing * whole, unknown.evidence(excess)))
    kept = [part for part in parts if part.share >= _MIN_SHARE]
    return sorted(kept, key=lambda part: -part.share)


def leading(parts: list[Explained]) -> list[Explained]:
    """The largest part, and further parts that are large enough to be separate causes."""
    return parts[:1] + [
        part for part in parts[1:] if part.share >= _SEPARATE_SHARE and part.cause.name != "unknown"
    ]


def intervals(rows: Array) -> CauseEvidence:
    """The number of off-CPU intervals, and the longest."""
    if not len(rows):
        return CauseEvidence()
    return CauseEvidence(n_intervals=len(rows), longest_ms=round(float(rows["duration_ns"].max()) / 1e6, 3))


def most_of(rows: Array, column: str) -> Array:
    """The distinct values of a column, those with the longest total duration first."""
    values, inverse = np.unique(rows[column], return_inverse=True)
    total = np.bincount(inverse, weights=np.maximum(rows["duration_ns"], 0), minlength=len(values))
    return values[np.argsort(-total)]


def slow_calls(rows: Array, excess: Excess) -> CauseEvidence:
    """The number of slow calls, the longest, and the functions."""
    if not len(rows):
        return CauseEvidence()
    names = [excess.symbols[int(i)] for i in most_of(rows, "symbol")[:3] if int(i) < len(excess.symbols)]
    longest_ms = round(float(rows["duration_ns"].max()) / 1e6, 3)
    return CauseEvidence(n_slow_calls=len(rows), longest_ms=longest_ms, functions=names)
