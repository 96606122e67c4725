"""The rank waits in poll, recv or send: for somebody on the network, or at the other end of a pipe."""

from stallscope.diagnose.causes.registry import Cause, Evidence, Excess, intervals
from stallscope.events.names import Category


def _evidence(excess: Excess) -> Evidence:
    return intervals(excess.off(Category.NET))


def _advice(evidence: Evidence) -> list[str]:
    return [
        "Find whom it asks: a key-value store, a remote file system, a logger; set a timeout and take it off the step.",
        "`ss -tnpi` on that host shows the peer and retransmits.",
    ]


CAUSE = Cause(
    name="network_wait",
    title="waited for an answer on a socket or pipe",
    categories=(Category.NET,),
    evidence=_evidence,
    advice=_advice,
)
