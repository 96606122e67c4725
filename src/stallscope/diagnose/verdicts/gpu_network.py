"""The verdict on slow connections between machines, from the transfers that NCCL's proxies reported to its plugin."""

from stallscope.diagnose.evidence_fields import VerdictEvidence
from stallscope.diagnose.gpu.network_edges import SlowConnections, slow_connections
from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.diagnose.verdicts._late import between
from stallscope.events.layout import UNKNOWN
from stallscope.events.trace import Trace

_CONFIDENCE = 0.8  # the transfer itself is slow; which end, or which switch, is not known
_CHECK_INTERFACE = "Look for errors, drops and the link speed of the network interface that NCCL uses there: "
_TOOLS = "ethtool -S and ip -s link for Ethernet, ibstat and perfquery for InfiniBand, NCCL_DEBUG=INFO for its name."
_PATH = "Compare with other pairs of these machines: cable, switch port, routing, congestion by other jobs."


def verdicts(trace: Trace, case: Case) -> list[Verdict]:
    """The verdict on slow connections; empty if no connection is slow, or the network was not recorded."""
    slow = slow_connections(trace, case.limits)
    return [_verdict(trace, case, slow)] if slow else []


def _verdict(trace: Trace, case: Case, slow: SlowConnections) -> Verdict:
    common = slow.common_ranks
    ranks = common if len(common) == 1 else []
    ends = sorted({*slow.sender.tolist(), *slow.receiver.tolist()})
    excess_ms = round(slow.excess_ns / 1e6, 3)
    most = slow.excess_ns * slow.n_slow * case.timeline.n_processes / 1e9
    return Verdict(
        kind="link",
        summary="",
        ranks=ranks,
        nodes=_nodes(trace, slow, ranks),
        comm_hash=f"{slow.comm_hash:016x}",
        first_round=slow.seq,
        n_late_rounds=slow.n_slow,
        n_rounds=slow.n_rounds,
        late_ms={"median": excess_ms, "max": excess_ms},
        since_ns=wall_ns(trace, slow.since_node, slow.since_ns),
        n_incidents=1,
        confidence=_CONFIDENCE,
        cost=between(case, 0.0, most, observed_ns=case.observed_ns),
        abstained_because=None if ranks else "the network between these ranks is slow",
        advice=[_CHECK_INTERFACE + _TOOLS, _PATH],
        evidence=VerdictEvidence(
            suspects=common if len(common) > 1 else ends,
            times_as_long=round(slow.times, 2),
            n_late_steps=slow.n_slow,
            n_steps=slow.n_rounds,
            sends=[f"{a} to {b}" for a, b in zip(slow.sender.tolist(), slow.receiver.tolist(), strict=True)],
        ),
    )


def _nodes(trace: Trace, slow: SlowConnections, ranks: list[int]) -> list[str]:
    """The node with the slow interface, or the nodes of both ends."""
    if ranks:
        is_there = slow.node[(slow.sender == ranks[0]), 0].tolist()
        is_there += slow.node[(slow.receiver == ranks[0]), 1].tolist()
        numbers = set(is_there)
    else:
        numbers = set(slow.common_nodes) or set(slow.node.ravel().tolist())
    return sorted({trace.nodes[number] for number in numbers if number != UNKNOWN})
