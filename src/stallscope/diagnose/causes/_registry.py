"""The list of causes, and what each explains of an excess."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np

from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.names import N_CATEGORIES, Category, HostKind, Op


@dataclass(frozen=True)
class Excess:
    """What a late rank did more than its peers, summed over its late steps.

    total_ns: its self time beyond theirs. ledger_ns: the same by category (N_CATEGORIES,), may be negative.
    n_syncs, n_allocs, n_copies, n_launches: calls beyond theirs. n_steps: late steps.
    calls, offcpu, host: the rank's own rows of these tables (host_events) within the late intervals.
    knows_syscalls: off-CPU time is told apart by system call. knows_blocking: time off the CPU is told apart from time
    that the source does not record. symbols: names by number, for calls. samples: of the rank's GPU threads, in
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
        """What the machine did to the rank meanwhile, of these kinds."""
        return self.host[np.isin(self.host["kind"], kinds)]

    def made(self, *ops: Op) -> Array:
        """The rank's slow calls of these operations."""
        return self.calls[np.isin(self.calls["op"], ops)]


Evidence = dict[str, object]


@dataclass(frozen=True)
class Cause:
    """name: as in the report. title: in words, after "because it". categories: ledger categories it claims.
    state: the same as a clause for a headline, "30 ms late, asleep in nanosleep". noun: the same for a list of causes.
    because: the state with the evidence's detail; empty where the evidence adds none.
    claims_ns: the part of an excess it explains, when that is not just its categories' time.
    evidence: facts for the report, short. advice: one or two next steps that fit the evidence.
    """

    name: str
    title: str
    categories: tuple[Category, ...]
    evidence: Callable[[Excess], Evidence]
    advice: Callable[[Evidence], list[str]]
    claims_ns: Callable[[Excess], float] | None = None
    because: Callable[[Evidence], str] | None = None
    state: str = ""
    noun: str = ""


@dataclass(frozen=True)
class Explained:
    """One cause's part of an excess; share of the whole, 0..1."""

    cause: Cause
    share: float
    excess_ns: float
    evidence: Evidence

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


_LEAST_SHARE = 0.05
_OWN_SHARE = 0.35


def causes() -> list[Cause]:
    """Every cause, by name."""
    import stallscope.diagnose.causes as package

    modules = [import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return sorted((m.CAUSE for m in modules if hasattr(m, "CAUSE")), key=lambda cause: cause.name)


def cause(name: str) -> Cause:
    """One cause by name. Raises KeyError."""
    return {one.name: one for one in causes()}[name]


def explained(excess: Excess, cause_share: float = 0.8) -> list[Explained]:
    """The causes of an excess, largest first; those under 5 % are left out.

    A cause with a claim of its own comes before those that claim categories only, and takes its part from them.
    What no cause explains is the cause "unknown", when the causes explain no more than cause_share of the whole.
    """
    left = np.maximum(excess.ledger_ns[:N_CATEGORIES], 0.0)
    left[Category.WAIT_GPU - 1] = 0.0
    whole = max(excess.total_ns, float(left.sum()), 1.0)
    parts = []
    for one in sorted(causes(), key=lambda each: each.claims_ns is None):
        available = float(sum(left[category - 1] for category in one.categories))
        wanted = available if one.claims_ns is None else min(one.claims_ns(excess), available)
        if wanted <= 0:
            continue
        for category in one.categories:
            left[category - 1] *= 1 - wanted / available
        parts.append(Explained(one, wanted / whole, wanted, one.evidence(excess)))
    missing = 1.0 - sum(part.share for part in parts)
    if missing >= 1 - cause_share:
        unknown = cause("unknown")
        parts.append(Explained(unknown, missing, missing * whole, unknown.evidence(excess)))
    kept = [part for part in parts if part.share >= _LEAST_SHARE]
    return sorted(kept, key=lambda part: -part.share)


def leading(parts: list[Explained]) -> list[Explained]:
    """The largest part, and those beside it that are too much to be left unsaid: two causes of their own, likely."""
    return parts[:1] + [one for one in parts[1:] if one.share >= _OWN_SHARE and one.cause.name != "unknown"]


def intervals(rows: Array) -> Evidence:
    """How many off-CPU intervals, and the longest."""
    if not len(rows):
        return {}
    return {"n_intervals": len(rows), "longest_ms": round(float(rows["duration_ns"].max()) / 1e6, 3)}


def most_of(rows: Array, column: str) -> Array:
    """The distinct values of a column, those with the longest total duration first."""
    values, inverse = np.unique(rows[column], return_inverse=True)
    total = np.bincount(inverse, weights=np.maximum(rows["duration_ns"], 0), minlength=len(values))
    return values[np.argsort(-total)]


def slow_calls(rows: Array, excess: Excess) -> Evidence:
    """How many slow calls, the longest, and the functions."""
    if not len(rows):
        return {}
    names = [excess.symbols[int(i)] for i in most_of(rows, "symbol")[:3] if int(i) < len(excess.symbols)]
    longest_ms = round(float(rows["duration_ns"].max()) / 1e6, 3)
    return {"n_slow_calls": len(rows), "longest_ms": longest_ms, "functions": names}
