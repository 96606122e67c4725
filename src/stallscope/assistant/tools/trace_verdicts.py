"""verdicts: the diagnosis of the machine's trace."""

from typing import Any

from pydantic import Field

from stallscope.assistant.node_context import Detail, Node, Since
from stallscope.diagnose import Report, Verdict, json_row, text, verdict_as_json, verdict_row
from stallscope.events.counted import counted
from stallscope.serve.tools.tool_registry import Params, Result, Tool
from stallscope.serve.tools.verdict_row import VerdictRow

_OLD_NAMES = {"victims": "waiting_ranks", "gpu_seconds": "lost_gpu_seconds", "usd": "lost_usd"}
"""Names of the previous release, included in `full` until the next release."""


class VerdictsParams(Params):
    rank: int | None = Field(
        default=None, ge=0, description="Only verdicts that concern this rank; null: all verdicts."
    )
    since_s: Since | None = Field(
        default=None, description="Only the last N seconds of the trace; null: the whole trace."
    )
    detail: Detail = "short"


class Verdicts(Result):
    summary: str
    answer: str = Field(description="healthy, inconclusive (the data cannot show health: see gaps) or found.")
    gaps: list[str] = Field(description="Why the data cannot show that the job is healthy, and the remedy.")
    rows: list[VerdictRow]


def verdicts(context: Node, params: VerdictsParams) -> Verdicts:
    """Which rank slows down the GPU job on this machine, since when, why, and at what cost; with rank: only the
    verdicts that name the rank or its wait. Start here.
    """
    report = context.diagnosed(context.trace(params.since_s))
    shown = [
        verdict
        for verdict in report.verdicts
        if params.rank is None or params.rank in (*verdict.ranks, *verdict.victims)
    ]
    return Verdicts(
        summary=_summary(report, shown, params.rank),
        answer=report.answer.value,
        gaps=[f"{gap.reason}: {gap.action}" for gap in report.gaps],
        rows=[_row(verdict, is_full=params.detail == "full") for verdict in shown],
    )


def _summary(report: Report, shown: list[Verdict], rank: int | None) -> str:
    if shown:
        role = ""
        if rank is not None:
            role = "It is the culprit: " if rank in shown[0].ranks else "It waits for other ranks: "
        more = f" ({len(shown) - 1} more)" if len(shown) > 1 else ""
        return f"{role}{shown[0].summary}{more}"
    if report.verdicts:
        return f"None of the {counted(len(report.verdicts), 'verdict')} names rank {rank}."
    return text.headline(report)


def _row(verdict: Verdict, *, is_full: bool) -> dict[str, Any]:
    row = json_row(verdict_row(verdict))
    old = {name: row[new] for new, name in _OLD_NAMES.items()}
    return row | {"full": verdict_as_json(verdict) | old if is_full else None}


TOOL: Tool[Node] = Tool("verdicts", "Verdicts on this machine's job", verdicts, aliases=("explain_rank",))
