"""get_causal_chains: the causes of calls that took far longer than typical."""

from pydantic import Field

from stallscope.assistant.node_context import SINCE_S, Limit, Node, Since, rank_of, short_text
from stallscope.diagnose.views import chains
from stallscope.serve.tools.tool_registry import Params, Result, Row, Tool


class ChainsParams(Params):
    since_s: Since = SINCE_S
    limit: Limit = 10


class LinkRow(Row):
    category: str = Field(description="State that blocked the calling thread: preempted, io, lock, ...")
    share: float = Field(description="Share of the call's duration.")
    by: str = Field(description="The process that took the CPU, if known.")


class ChainRow(Row):
    pid: int
    rank: int | None
    function: str
    duration_ms: float
    usual_ms: float
    n_like: int = Field(description="Number of calls in the comparison.")
    links: list[LinkRow]


class Chains(Result):
    summary: str
    chains: list[ChainRow]


def get_causal_chains(context: Node, params: ChainsParams) -> Chains:
    """CUDA and NCCL calls that took far longer than typical, with the states that blocked the calling thread."""
    trace = context.trace(params.since_s)
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
    text = f"{len(rows)} slow calls" if rows else "no call took far longer than typical"
    if rows and rows[0].links:
        text += f"; the slowest, {rows[0].function}, was blocked by {rows[0].links[0].category}"
    return Chains(summary=text, chains=rows)


TOOL: Tool[Node] = Tool("get_causal_chains", "Slow calls and their causes", get_causal_chains)
