"""The traces of several machines as one, their clocks tied by probes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stallscope.errors import StallscopeError, Unreachable
from stallscope.events.trace import Clock, Trace
from stallscope.query.fanout import distinct_names
from stallscope.query.nodes import Access, Failure, Reply, ask_all
from stallscope.query.wire_format import together, unpacked

BOOT = "boot_id"
"""Fact of a live trace: in which boot of its machine it was made."""


@dataclass(frozen=True)
class FleetTrace:
    """The trace, who did not answer, and the clocks of those who did."""

    trace: Trace
    failures: list[Failure]
    replies: list[Reply[Any]]


def asked_of(nodes: Sequence[str], access: Access, *, since_ns: int | None = None) -> FleetTrace:
    """Ask all nodes for their traces. Raises Unreachable where none answers."""
    query = f"?since_ns={since_ns}" if since_ns is not None else ""
    found = ask_all(nodes, access, lambda connection: connection.get(f"/api/v1/node/trace{query}"))
    names = distinct_names(found)
    failures, traces, replies = list(found.failures), [], []
    for reply in found.replies:
        try:
            trace = unpacked(reply.answer)
        except StallscopeError as error:
            failures.append(Failure(reply.address, str(error)))
            continue
        traces.append(tied(trace, reply, names[reply.address]))
        replies.append(reply)
    if not traces:
        raise Unreachable(f"no node answered: {'; '.join(f'{f.address}: {f.reason}' for f in failures)}")
    return FleetTrace(together(traces), failures, list(replies))


def tied(trace: Trace, reply: "Reply[Any]", name: str) -> Trace:
    """The trace of one node with what the probe tells of its clocks, where it is of the clock that was probed.

    name: of its machine among the others, another one than it gives itself only where two are alike. Its readings of
    wall time are put on our clock, so that times of several nodes can be compared.
    """
    if len(trace.nodes) == 1 and name != reply.name:
        trace = replace(trace, nodes=(name,))
    if reply.boot_id and trace.facts.get(BOOT) != reply.boot_id:
        return trace
    clock = reply.clock
    corrected = tuple(
        replace(one, wall_ns=one.wall_ns - clock.ahead_ns, error_ns=one.error_ns + clock.error_ns)
        for one in trace.clocks
    )
    return replace(
        trace,
        clocks=corrected,
        probed=tuple(
            Clock(node, clock.node_monotonic_ns, clock.wall_ns, clock.error_ns)
            for node in range(len(trace.nodes))
        ),
    )
