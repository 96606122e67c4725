"""The rank waits in poll, recv or send, for the other end of a socket or a pipe."""

from stallscope.diagnose.causes import on_host
from stallscope.diagnose.causes._registry import Cause, Excess, intervals
from stallscope.diagnose.evidence_fields import CauseEvidence, merged
from stallscope.events.names import Category


def _evidence(excess: Excess) -> CauseEvidence:
    return merged(intervals(excess.off(Category.NET)), on_host.connections(excess))


def _because(evidence: CauseEvidence) -> str:
    n = evidence.n_retransmits
    return (
        f"waiting for an answer on a socket, over a network that loses packets ({n} retransmits)" if n else ""
    )


def _advice(evidence: CauseEvidence) -> list[str]:
    if evidence.n_retransmits:
        return [
            "Look for errors and drops of that interface (ip -s link, ethtool -S) and of the switch port behind it."
        ]
    return [
        "Find the service at the other end: a key-value store, a remote file system, a logger. Move the call out of "
        "the step, and set a timeout.",
        "`ss -tnpi` on that host shows the peer and the retransmits.",
    ]


CAUSE = Cause(
    name="network_wait",
    title="waited for an answer on a socket or pipe",
    state="waiting for an answer on a socket or pipe",
    noun="socket or pipe",
    categories=(Category.NET,),
    evidence=_evidence,
    advice=_advice,
    because=_because,
)
