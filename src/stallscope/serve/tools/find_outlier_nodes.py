"""fleet.cluster.find_outlier_nodes: late ranks, or ranks and machines with an outlying metric."""

import statistics
from collections import defaultdict
from typing import Any

from pydantic import Field

from stallscope.serve.tools.node_lag import scores
from stallscope.serve.tools.tenant_context import (
    MAX_TEXT,
    Cluster,
    From,
    JobParams,
    TenantContext,
    To,
    window,
)
from stallscope.serve.tools.tool_registry import Result, Row, Tool

_FLOOR_NS = 100_000.0
"""Smaller differences between ranks do not count: clocks are no more accurate."""

_FLOOR_SHARE = 0.01
"""The same threshold for a metric, as a share of its median."""


class OutlierParams(JobParams):
    cluster: Cluster = None
    from_: From = None
    to: To = None
    metric: str | None = Field(
        default=None,
        max_length=MAX_TEXT,
        description="Compare this numeric event or metric instead of lateness.",
    )
    threshold: float = Field(default=3.5, gt=0, le=1000, description="Deviations (MAD) from the median.")
    min_late_ms: float = Field(
        default=2.0, ge=0, le=3_600_000, description="Lateness below this threshold is not reported."
    )
    limit: int = Field(default=20, ge=1, le=1000)


class OutlierRow(Row):
    cluster: str | None
    node: str | None
    rank: int | None
    score: float = Field(description="Deviations from the median of all ranks; negative: low, or early.")
    lag_ms: float | None = Field(description="Mean lateness in its rounds; null for a metric.")
    max_late_ms: float | None
    share_late: float | None = Field(description="Share of its rounds in which the rank was late, 0 to 1.")
    n_rounds: int | None
    value: float | None = Field(description="Median of the metric; null for lateness.")
    usual: float | None = Field(description="Median over all ranks; null for lateness.")


class Outliers(Result):
    summary: str
    rows: list[OutlierRow]
    n_compared: int = Field(description="Number of compared ranks (for a metric: ranks or machines).")


def find_outlier_nodes(context: TenantContext, params: OutlierParams) -> Outliers:
    """Ranks that arrive late in the rounds they share with others (not by call duration), latest rank first.

    Lateness is by the senders' clocks. A late rank is not always the culprit: fleet.cluster.verdicts follows the waits.
    With metric: machines or ranks whose median of a numeric event, such as a health score, is an outlier.
    """
    if params.metric is not None:
        return _by_metric(context, params, params.metric)
    rows = context.rows(
        "lateness",
        only=params.choice,
        cluster=params.cluster,
        min_late_ns=round(params.min_late_ms * 1e6),
        **window(params.from_, params.to),
    )
    out = []
    for members in _by_cluster(rows):
        score_list = scores([row["lag_ns"] for row in members], floor=_FLOOR_NS)
        middle = statistics.median(row["lag_ns"] for row in members)
        out += [
            _late_row(row, score, row["lag_ns"] - middle)
            for row, score in zip(members, score_list, strict=True)
            if score >= params.threshold and row["n_late"] > 0
        ]
    out.sort(key=lambda row: (-(row.lag_ms or 0), row.rank))
    return Outliers(summary=_late_summary(out, len(rows)), rows=out[: params.limit], n_compared=len(rows))


def _by_cluster(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[str | None, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["cluster_id"]].append(row)
    return list(groups.values())


def _late_row(row: dict[str, Any], score: float, lag_ns: float) -> OutlierRow:
    return OutlierRow(
        cluster=row["cluster_id"],
        node=row["node_id"],
        rank=row["rank"],
        score=round(score, 2),
        lag_ms=round(lag_ns / 1e6, 3),
        max_late_ms=round(row["max_late_ns"] / 1e6, 3),
        share_late=round(row["n_late"] / row["n_rounds"], 4),
        n_rounds=row["n_rounds"],
        value=None,
        usual=None,
    )


def _late_summary(rows: list[OutlierRow], n: int) -> str:
    if not n:
        return "No rounds are shared by several ranks."
    if not rows:
        return f"None of {n} ranks is an outlier."
    first = rows[0]
    return (
        f"{len(rows)} of {n} ranks are outliers; largest lag: rank {first.rank} on {first.node}, {first.lag_ms:g} ms on"
        f" average, late in {(first.share_late or 0) * 100:.0f} % of its rounds."
    )


def _by_metric(context: TenantContext, params: OutlierParams, metric: str) -> Outliers:
    rows = context.rows(
        "named_values",
        only=params.choice,
        cluster=params.cluster,
        metric=metric,
        **window(params.from_, params.to),
    )
    out = []
    for members in _by_cluster(rows):
        values = [row["median"] for row in members]
        usual = statistics.median(values)
        score_list = scores(values, floor=max(_FLOOR_SHARE * abs(usual), 1e-12))
        out += [
            _value_row(row, score, usual)
            for row, score in zip(members, score_list, strict=True)
            if abs(score) >= params.threshold
        ]
    out.sort(key=lambda row: (-abs(row.score), row.node or "", -1 if row.rank is None else row.rank))
    text = f"{len(out)} of {len(rows)} are outliers in {metric}." if rows else f"{metric} has no values."
    return Outliers(summary=text, rows=out[: params.limit], n_compared=len(rows))


def _value_row(row: dict[str, Any], score: float, usual: float) -> OutlierRow:
    return OutlierRow(
        cluster=row["cluster_id"],
        node=row["node_id"],
        rank=row["rank"],
        score=round(score, 2),
        lag_ms=None,
        max_late_ms=None,
        share_late=None,
        n_rounds=None,
        value=row["median"],
        usual=usual,
    )


TOOL = Tool("fleet.cluster.find_outlier_nodes", "Outlier ranks and machines", find_outlier_nodes)
