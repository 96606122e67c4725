"""The traces of several machines as one trace, with clocks aligned by probes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stallscope.errors import StallscopeError, Unreachable
from stallscope.events.trace import Clock, Trace
from stallscope.query.fanout import distinct_names
from stallscope.query.remote_nodes import Access, Failure, Reply, ask_all
from stallscope.query.wire_format import together, unpacked

BOOT = "boot_id"
"""Fact of a live trace: the boot of the machine that made it."""


@dataclass(frozen=True)
class FleetTrace:
    """The trace, the nodes that did not answer, and the clocks of the nodes that did."""

    trace: Trace
    failures: list[Failure]
    replies: list[Reply[Any]]


def asked_of(nodes: Sequence[str], access: Access, *, since_ns: int | None = None) -> FleetTrace:
    """Request the traces of all nodes. Raises Unreachable if no node answers."""
    query = f"?since_ns={since_ns}" if since_ns is not None else ""
    answers = ask_all(nodes, access, lambda connection: connection.get(f"/api/v1/node/trace{query}"))
    names = distinct_names(answers)
    failures, traces, replies = list(answers.failures), [], []
    for reply in answers.replies:
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
    """The trace of one node with the probe's clock offset, if the trace is from the probed boot.

    name: of the machine in the fleet; it differs from the machine's own name only if two names are equal. Its readings
    of wall time are converted to the local clock, so that times of several nodes can be compared.
    """
    if len(trace.nodes) == 1 and name != reply.name:
        trace = replace(trace, nodes=(name,))
    if reply.boot_id and trace.facts.get(BOOT) != reply.boot_id:
        return trace
    clock = reply.clock
    corrected = tuple(
        replace(reading, wall_ns=reading.wall_ns - clock.ahead_ns, error_ns=reading.error_ns + clock.error_ns)
        for reading in trace.clocks
    )
    return replace(
        trace,
        clocks=corrected,
        probed=tuple(
            Clock(node, clock.node_monotonic_ns, clock.wall_ns, clock.error_ns)
            for node in range(len(trace.nodes))
        ),
    )
