"""The connections over which NCCL's proxies send: the connections that take far longer than the others.

Each row is the time for which the network held the data that a rank sent to a peer, on one channel of a collective. A
wait for a late GPU is not part of this time. The connections of one collective transfer similar amounts, so each is
compared with the other connections of the same round. All connections of a rank with a slow network interface are slow;
a slow path between two ranks concerns these two only.
"""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, median_of_others, numbered
from stallscope.diagnose.thresholds import Thresholds
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import GpuKernelFlag
from stallscope.events.trace import Trace

_TIMES_AS_LONG = 2.0  # times the other connections of the round
_MIN_CONNECTIONS = 3  # in a round: with two, either may be the fast one
_MIN_ROUNDS = 8
_LASTING = 0.25
"""Share of the rounds since the first slow round that must be slow: a path may be slow in bursts."""
_PAUSE_NS = 1_000_000_000  # a longer time without rounds is a pause of the plugin


@dataclass(frozen=True)
class SlowConnections:
    """sender, receiver: int64 (n,), ranks of the job. node: int64 (n, 2), nodes of both ends, UNKNOWN if not traced.
    excess_ns: in a slow round (median). times: the length of its transfers, as a multiple of the other connections'.
    n_slow, n_rounds: rounds in which a connection was slow, and rounds examined. comm_hash, seq: of the first slow
    round. since_ns: its time on the clock of since_node. share: of the time of the rounds that the excess takes.
    """

    sender: Array
    receiver: Array
    node: Array
    excess_ns: float
    times: float
    n_slow: int
    n_rounds: int
    comm_hash: int
    seq: int
    since_ns: int
    since_node: int
    share: float

    @property
    def common_ranks(self) -> list[int]:
        """The ranks at an end of all connections: one has a slow interface, two have a slow path between them."""
        ends = [{int(a), int(b)} for a, b in zip(self.sender, self.receiver, strict=True)]
        return sorted(set.intersection(*ends))

    @property
    def common_nodes(self) -> list[int]:
        """The nodes at an end of all connections."""
        known = [{int(node) for node in pair if node != UNKNOWN} for pair in self.node]
        return sorted(set.intersection(*known))


def slow_connections(trace: Trace, limits: Thresholds) -> SlowConnections | None:
    """The connections that are slow in a lasting share of the rounds; None where no connection is slow, or the network
    was not recorded.
    """
    sends = _sends(trace.gpu_kernels)
    if not len(sends):
        return None
    sends = sends[np.argsort(sends["ts_ns"], kind="stable")]
    connection, n_connections = numbered(sends["comm_hash"], sends["comm_rank"], sends["peer_rank"])
    number, n_rounds = numbered(sends["comm_hash"], sends["op"], sends["seq"])
    # The mean over the channels: a connection may have more channels than others.
    cell, n_cells = numbered(number, connection)
    mean_ns = by_group(cell, sends["network_ns"], n_cells, lambda table: table.mean(axis=1))
    # By time: numbers follow the operation first.
    first = np.sort(np.unique(cell, return_index=True)[1])
    took_ns = mean_ns[cell[first]]
    number, connection, sends = number[first], connection[first], sends[first]
    is_compared = (np.bincount(number, minlength=n_rounds) >= _MIN_CONNECTIONS)[number]
    number, connection, sends, took_ns = (
        column[is_compared] for column in (number, connection, sends, took_ns)
    )
    if not len(sends):
        return None
    typical_ns = median_of_others(number, took_ns)
    excess_ns = took_ns - typical_ns
    is_slow = (took_ns >= _TIMES_AS_LONG * typical_ns) & (excess_ns >= limits.min_late_ns)
    lasting = [each for each in range(n_connections) if _lasts(is_slow[connection == each])]
    slow = is_slow & np.isin(connection, lasting)
    if not slow.any():
        return None
    # A round is as late as its slowest connection: the connections of a round transfer at the same time.
    of_round = np.zeros(n_rounds)
    np.maximum.at(of_round, number[slow], excess_ns[slow])
    share = float(of_round.sum()) / max(_recorded_ns(sends["ts_ns"]), 1.0)
    if share < limits.late_step_share:
        return None
    ends = sends[slow][np.unique(connection[slow], return_index=True)[1]]
    start = sends[slow][np.argmin(sends["ts_ns"][slow])]
    rank_of, node_of = _members(trace)
    senders, receivers = (
        [(int(row["comm_hash"]), int(row[name])) for row in ends] for name in ("comm_rank", "peer_rank")
    )
    return SlowConnections(
        sender=np.array([rank_of.get(end, end[1]) for end in senders]),
        receiver=np.array([rank_of.get(end, end[1]) for end in receivers]),
        node=np.array(
            [[node_of.get(end, UNKNOWN) for end in pair] for pair in zip(senders, receivers, strict=True)]
        ),
        excess_ns=float(np.median(of_round[of_round > 0])),
        times=float(np.median(took_ns[slow] / np.maximum(typical_ns[slow], 1.0))),
        n_slow=int((of_round > 0).sum()),
        n_rounds=len(np.unique(number)),
        comm_hash=int(start["comm_hash"]),
        seq=int(start["seq"]),
        since_ns=int(start["ts_ns"]),
        since_node=int(start["node"]),
        share=share,
    )


def _sends(kernels: Array) -> Array:
    """The transfers of collectives, by the side that sends: the side that receives also waits for a late sender."""
    flags = kernels["flags"]
    is_send = (flags & GpuKernelFlag.IS_NETWORK != 0) & (flags & GpuKernelFlag.IS_SEND != 0)
    is_known = (kernels["network_ns"] != UNKNOWN) & (kernels["peer_rank"] != UNKNOWN)
    # A transfer between two ranks (send, recv) has no number.
    return kernels[is_send & is_known & (kernels["seq"] != UNKNOWN) & (kernels["comm_rank"] != UNKNOWN)]


def _lasts(is_slow: Array) -> bool:
    """Whether a connection is slow in a lasting share of its rounds since the first slow round.

    is_slow: bool (n,), by time.
    """
    slow = np.flatnonzero(is_slow)
    return len(slow) >= _MIN_ROUNDS and len(slow) >= _LASTING * (len(is_slow) - slow[0])


def _recorded_ns(ts_ns: Array) -> float:
    """The time in which the plugin recorded."""
    between_ns = np.diff(np.sort(ts_ns))
    return float(between_ns[between_ns < _PAUSE_NS].sum())


def _members(trace: Trace) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """The rank in the job and the node of each rank of a communicator, where traced."""
    ranks, rank_of, node_of = trace.launcher_ranks(), {}, {}
    for comm_hash, comm_rank, node, pid in np.unique(
        trace.gpu_kernels[["comm_hash", "comm_rank", "node", "pid"]]
    ).tolist():
        node_of[comm_hash, comm_rank] = node
        rank_of[comm_hash, comm_rank] = ranks.get((node, pid), comm_rank)
    return rank_of, node_of
