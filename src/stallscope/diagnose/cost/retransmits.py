"""Segments that the other end of a connection retransmitted while a rank waited on its own end.

The sender counts retransmits, the receiver waits: a rank's own sockets do not show packets lost on the way to the rank.
Two ends belong to one connection if the local port of each is the peer port of the other.
"""

import numpy as np

from stallscope.diagnose.timeline.clocks import wall_ns
from stallscope.events.layout import Array
from stallscope.events.names import HostKind
from stallscope.events.trace import Trace

_SECOND_NS = 1_000_000_000  # retransmits are counted once a second

Ends = tuple[str, str]
"""The local port and the peer port, as text."""


def retransmits_to(trace: Trace, own: Array) -> Array:
    """Rows of HOST_EVENTS: the retransmits of others to a rank while it waited for them.

    own: the rank's own rows of HOST_EVENTS.
    """
    waits: dict[Ends, list[tuple[int, int]]] = {}
    for row in own[own["kind"] == HostKind.SOCKET_WAIT]:
        if ends := _ends(row):
            waits.setdefault(ends, []).append(_span(trace, row, slack_ns=0))
    if not waits:
        return own[:0]
    rows = trace.host_events
    rows = rows[rows["kind"] == HostKind.RETRANSMIT]
    is_for_own = [_is_for(trace, row, waits) for row in rows]
    return rows[np.array(is_for_own, bool)]


def _is_for(trace: Trace, row: Array, waits: dict[Ends, list[tuple[int, int]]]) -> bool:
    ends = _ends(row)
    begin, end = _span(trace, row, slack_ns=_SECOND_NS)
    return ends is not None and any(
        begin < until and since < end for since, until in waits.get(ends[::-1], ())
    )


def _ends(row: Array) -> Ends | None:
    local, peer = (row[name].item().decode("utf-8", "replace") for name in ("detail", "file"))
    return (local.rpartition(" ")[2], peer.rpartition(":")[2]) if local and ":" in peer else None


def _span(trace: Trace, row: Array, *, slack_ns: int) -> tuple[int, int]:
    """Begin and end, on the wall clock if it is known."""
    at_ns = wall_ns(trace, int(row["node"]), int(row["ts_ns"]))
    begin = int(row["ts_ns"]) if at_ns is None else at_ns
    return begin, begin + max(int(row["duration_ns"]), 0) + slack_ns
