"""A verdict as a flat row, for the tools that show some."""

from __future__ import annotations

from pydantic import Field

from stallscope.serve.tools.asking import Asker, said
from stallscope.serve.tools.registry import Row


class Found(Row):
    """What the standing diagnosis found."""

    verdict_id: str
    cluster: str | None
    state: str = Field(description="open or closed")
    kind: str = Field(description="straggler, hang, mismatch, imbalance, device, process or inconclusive")
    node: str | None = Field(description="Machine of the first rank named.")
    rank: int | None = Field(description="The first rank named; null where none is.")
    cause: str | None
    cause_share: float | None = Field(description="Of the excess time, 0 to 1.")
    confidence: float | None
    late_ms: float | None = Field(description="Median over the late steps.")
    since: str | None
    until: str | None
    gpu_seconds: float | None = Field(description="GPU time lost; the lower end where a range is known.")
    is_lower_bound: bool = Field(description="At least so much was lost.")
    at_most_gpu_seconds: float | None = Field(
        description="And at most so much; null where that is not known."
    )
    summary: str | None


def found(
    asker: Asker,
    *,
    cluster: str | None = None,
    node: str | None = None,
    rank: int | None = None,
    kind: str | None = None,
    state: str | None = None,
    from_ns: int | None = None,
    to_ns: int | None = None,
    max_rows: int,
) -> list[Found]:
    """The verdicts that fit, open ones first, then the newest."""
    rows = asker.rows(
        "found_verdicts",
        cluster=cluster,
        node=node,
        rank=rank,
        kind=kind,
        state=state,
        verdict_id=None,
        from_ns=from_ns,
        to_ns=to_ns,
        max_rows=max_rows,
    )
    return [flat(row) for row in rows]


def flat(row: dict[str, object]) -> Found:
    """One row of the question found_verdicts."""
    same = (
        *("verdict_id", "state", "kind", "rank", "cause", "cause_share", "confidence"),
        *("late_ms", "gpu_seconds", "at_most_gpu_seconds", "summary"),
    )
    return Found.model_validate(
        {
            **{name: row[name] for name in same},
            "cluster": row["cluster_id"],
            "node": row["node_id"],
            "since": said(row["since_ns"]),  # type: ignore[arg-type]
            "until": said(row["until_ns"]),  # type: ignore[arg-type]
            "is_lower_bound": bool(row["is_lower_bound"]),
        }
    )
