"""graph_frequency: replay rate of graphs with collectives, and its regularity."""

import numpy as np
from pydantic import Field

from stallscope.assistant.node_context import SINCE_S, Node, Since, rank_of
from stallscope.events.names import CollectiveFlag
from stallscope.serve.tools.tool_registry import Params, Result, Row, Tool


class FrequencyParams(Params):
    since_s: Since = SINCE_S


class FrequencyRow(Row):
    pid: int
    rank: int | None
    n_replays: int = Field(
        description="Graph launches with collectives inside: the collectives arrive at the same moment."
    )
    per_second: float
    gap_p50_ms: float
    gap_p99_ms: float


class Frequency(Result):
    summary: str
    processes: list[FrequencyRow]


def graph_frequency(context: Node, params: FrequencyParams) -> Frequency:
    """Replay rate of CUDA graphs with collectives, by process, with the gaps between replays."""
    trace = context.trace(params.since_s)
    ranks = rank_of(trace)
    replayed = trace.collectives[(trace.collectives["flags"] & CollectiveFlag.GRAPH) != 0]
    rows = []
    for node, pid in sorted(set(zip(replayed["node"].tolist(), replayed["pid"].tolist(), strict=True))):
        process_rows = replayed[(replayed["node"] == node) & (replayed["pid"] == pid)]
        at = np.unique(process_rows["ts_ns"])
        if len(at) < 2:
            continue
        gaps_ms = np.diff(at) / 1e6
        rows.append(
            FrequencyRow(
                pid=pid,
                rank=ranks.get((node, pid)),
                n_replays=len(at),
                per_second=round((len(at) - 1) / (float(at[-1] - at[0]) / 1e9), 3),
                gap_p50_ms=round(float(np.quantile(gaps_ms, 0.5)), 3),
                gap_p99_ms=round(float(np.quantile(gaps_ms, 0.99)), 3),
            )
        )
    text = f"{len(rows)} processes replay graphs" if rows else "no graph with collectives was replayed"
    return Frequency(summary=text, processes=rows)


TOOL: Tool[Node] = Tool("graph_frequency", "Replay rate of graphs", graph_frequency)
