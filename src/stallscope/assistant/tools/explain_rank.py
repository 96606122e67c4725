"""explain_rank: who drags the job, why, and what one rank did more than its peers."""

from typing import Any

from pydantic import Field

from stallscope.assistant.asking import Detail, Node, Since
from stallscope.diagnose.report import text
from stallscope.diagnose.report.verdict import Report, as_json
from stallscope.serve.tools.registry import Params, Result, Row, Tool


class ExplainParams(Params):
    rank: int | None = Field(
        default=None, ge=0, description="Only what concerns this rank; null: all verdicts."
    )
    since_s: Since | None = Field(
        default=None, description="Only the last so many seconds; null: the whole trace."
    )
    detail: Detail = "short"


class Why(Row):
    cause: str
    share: float = Field(description="Of what it did more than its peers.")


class Found(Row):
    kind: str
    summary: str
    ranks: list[int]
    nodes: list[str]
    since: str | None
    causes: list[Why]
    waiting_ranks: list[int]
    lost_gpu_seconds: float | None = Field(description="The lower end where a range is known.")
    at_most_gpu_seconds: float | None = Field(description="The upper end; null where there is no range.")
    lost_usd: float | None = Field(description="null where no price is known: it is not 0.")
    at_most_usd: float | None
    confidence: float
    advice: list[str]
    full: dict[str, Any] | None = Field(description="Everything, with detail=full.")


class Explained(Result):
    summary: str
    verdicts: list[Found]


def explain_rank(asker: Node, params: ExplainParams) -> Explained:
    """Which rank drags the GPU job on this machine, since when, why, and what it costs; or what a rank has to do
    with it.
    """
    report = asker.diagnosed(asker.trace(params.since_s))
    verdicts = [
        (told, verdict)
        for told, verdict in zip(as_json(report)["verdicts"], report.verdicts, strict=True)
        if params.rank is None or params.rank in (*verdict.ranks, *verdict.victims)
    ]
    rows = [_found(told, is_full=params.detail == "full") for told, _ in verdicts]
    return Explained(summary=_summary(report, rows, params.rank), verdicts=rows)


def _summary(report: Report, rows: list[Found], rank: int | None) -> str:
    if rows:
        role = ""
        if rank is not None:
            role = "It is the culprit: " if rank in rows[0].ranks else "It waits for others: "
        more = f" ({len(rows) - 1} more)" if len(rows) > 1 else ""
        return f"{role}{rows[0].summary}{more}"
    if report.verdicts:
        return f"Rank {rank} has no part in what was found."
    return text.headline(report)


def _found(told: dict[str, Any], *, is_full: bool) -> Found:
    cost = told["cost"]
    return Found(
        kind=told["kind"],
        summary=told["summary"],
        ranks=told["ranks"],
        nodes=told["nodes"],
        since=told["since"],
        causes=[Why(cause=part["cause"], share=part["share"]) for part in told["causes"][:3]],
        waiting_ranks=told["victims"][:32],
        lost_gpu_seconds=cost["gpu_seconds"] if cost else None,
        at_most_gpu_seconds=cost["at_most_gpu_seconds"] if cost else None,
        lost_usd=cost["usd"] if cost else None,
        at_most_usd=cost["at_most_usd"] if cost else None,
        confidence=told["confidence"],
        advice=told["advice"],
        full=told if is_full else None,
    )


TOOL: Tool[Node] = Tool("explain_rank", "Who drags the job, and why", explain_rank)
