"""get_causal_chains: what held the calls that took far longer than usual."""

from pydantic import Field

from stallscope.assistant.asking import SINCE_S, Limit, Node, Since, rank_of, short_text
from stallscope.diagnose.views.slow_calls import chains
from stallscope.serve.tools.registry import Params, Result, Row, Tool


class ChainsParams(Params):
    since_s: Since = SINCE_S
    limit: Limit = 10


class LinkRow(Row):
    category: str = Field(description="What the calling thread was held by: preempted, io, lock, ...")
    share: float = Field(description="Of the call's duration.")
    by: str = Field(description="Who took the CPU, where known.")


class ChainRow(Row):
    pid: int
    rank: int | None
    function: str
    duration_ms: float
    usual_ms: float
    n_like: int = Field(description="Calls it was compared with.")
    links: list[LinkRow]


class Chains(Result):
    summary: str
    chains: list[ChainRow]


def get_causal_chains(asker: Node, params: ChainsParams) -> Chains:
    """CUDA and NCCL calls that took far longer than their like, each with what the calling thread was held by."""
    trace = asker.trace(params.since_s)
    ranks = rank_of(trace)
    rows = [
        ChainRow(
            pid=chain.pid,
            rank=ranks.get((trace.nodes.index(chain.node), chain.pid)),
            function=short_text(chain.function),
            duration_ms=round(chain.duration_ns / 1e6, 3),
            usual_ms=round(chain.usual_ns / 1e6, 3),
            n_like=chain.n_like,
            links=[
                LinkRow(
                    category=link.category.name.lower(), share=round(link.share, 3), by=short_text(link.by)
                )
                for link in chain.links
            ],
        )
        for chain in chains(trace, most=params.limit)
    ]
    said = f"{len(rows)} slow calls" if rows else "no call took far longer than its like"
    if rows and rows[0].links:
        said += f"; the worst, {rows[0].function}, was held by {rows[0].links[0].category}"
    return Chains(summary=said, chains=rows)


TOOL: Tool[Node] = Tool("get_causal_chains", "Slow calls, and what held them", get_causal_chains)
