"""Verdicts that an exported timeline or incident span states, as a fact of a trace: JSON of ExportedVerdict rows."""

import json
from dataclasses import asdict, dataclass, field

EXPORTED = "exported_verdicts"
"""The key in Trace.facts."""

_MAX_VERDICTS = 10_000


@dataclass(frozen=True)
class ExportedVerdict:
    """kind: of a verdict, or "healthy". causes: name and share. gpu_seconds: None where the export has no cost."""

    kind: str
    summary: str
    ranks: list[int] = field(default_factory=list)
    confidence: float = 0.0
    causes: list[tuple[str, float]] = field(default_factory=list)
    gpu_seconds: float | None = None


def as_fact(verdicts: list[ExportedVerdict]) -> str:
    """The value of the fact."""
    return json.dumps([asdict(verdict) for verdict in verdicts[:_MAX_VERDICTS]])


def exported(fact: str) -> list[ExportedVerdict]:
    """The verdicts in a fact."""
    return [ExportedVerdict(**row) for row in json.loads(fact)]
