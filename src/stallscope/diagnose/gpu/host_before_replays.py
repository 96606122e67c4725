"""What a host did in excess of its peers while it reached the replays of CUDA graphs late.

The replay of a graph that was captured before the trace began has no arrival of its host. If a rank reaches its replays
late, the cause is its host if the time ledger of the host exceeds the peers' ledgers at the same time, by as much;
otherwise its GPU. The ledgers come from the snapshots of each second: an excess counts up to the lateness in the same
interval between two snapshots. All times are compared on the common clock of the job (see clocks).
"""

import numpy as np

from stallscope.diagnose.causes import Excess
from stallscope.diagnose.timeline.clocks import Clocks
from stallscope.events.layout import Array
from stallscope.events.names import N_CATEGORIES, Category
from stallscope.events.trace import Trace

_NOT_OF_HOST = (Category.WAIT_GPU, Category.DEVICE, Category.LAUNCH)  # a host that waits for its GPU
_MIN_INTERVALS = 2


def host_excess(
    trace: Trace, process: tuple[int, int], clocks: Clocks, *, at_ns: Array, late_ns: Array
) -> Excess | None:
    """The time of a host beyond the median of its peers, in the intervals of its late replays; None without snapshots.

    process: node and pid; its peers share a communicator with it on the GPU. at_ns, late_ns: int64, float64 (n,), its
    late replays on the common clock, and their lateness.
    """
    ledgers = _ledgers(trace, process, clocks)
    if process not in ledgers or len(ledgers) < 2 or not len(at_ns):
        return None
    begin_ns = max(ts_ns[0] for ts_ns, _ in ledgers.values())
    end_ns = min(ts_ns[-1] for ts_ns, _ in ledgers.values())
    own_ns = ledgers[process][0]
    edges_ns = np.unique(
        np.concatenate([[begin_ns, end_ns], own_ns[(own_ns > begin_ns) & (own_ns < end_ns)]])
    )
    if len(edges_ns) <= _MIN_INTERVALS or end_ns <= begin_ns:
        return None
    late_by_interval_ns, _ = np.histogram(at_ns, edges_ns, weights=late_ns)
    spent = {key: _spent_ns(edges_ns, *ledger) for key, ledger in ledgers.items()}
    excess_ns = spent.pop(process) - np.median(list(spent.values()), axis=0)
    excess_ns[:, [category - 1 for category in _NOT_OF_HOST]] = 0.0
    whole_ns = np.maximum(excess_ns, 0.0).sum(axis=1)
    excess_ns *= (np.minimum(whole_ns, late_by_interval_ns) / np.maximum(whole_ns, 1.0))[:, None]
    node, pid = process
    tables = {}
    for name, rows in (("calls", trace.calls), ("offcpu", trace.offcpu), ("host", trace.host_events)):
        own = rows[(rows["node"] == node) & (rows["pid"] == pid)]
        tables[name] = own[clocks.common_times_ns(node, own["ts_ns"]) >= begin_ns]
    return Excess(
        float(late_by_interval_ns.sum()),
        excess_ns.sum(axis=0),
        len(at_ns),
        symbols=trace.symbols,
        stacks=trace.stacks,
        **tables,
    )


def _ledgers(
    trace: Trace, process: tuple[int, int], clocks: Clocks
) -> dict[tuple[int, int], tuple[Array, Array]]:
    """Times and ledgers of the snapshots of a process and of its peers: int64 (k,), (k, N_CATEGORIES).

    The times are on the common clock. Peers on nodes whose clocks cannot be compared are left out.
    """
    kernels = trace.gpu_kernels
    own = kernels[(kernels["node"] == process[0]) & (kernels["pid"] == process[1])]
    members = np.unique(kernels[np.isin(kernels["comm_hash"], own["comm_hash"])][["node", "pid"]])
    rows = trace.snapshots[np.argsort(trace.snapshots["ts_ns"], kind="stable")]
    out = {}
    for node, pid in members.tolist():
        of_member = rows[(rows["node"] == node) & (rows["pid"] == pid)]
        is_comparable = node == process[0] or clocks.are_tied(node, process[0])
        if is_comparable and len(of_member) > 1:
            out[node, pid] = clocks.common_times_ns(node, of_member["ts_ns"]), of_member["ledger_ns"]
    return out


def _spent_ns(edges_ns: Array, ts_ns: Array, ledger_ns: Array) -> Array:
    """Time by category in each interval between two edges: float64 (intervals, N_CATEGORIES)."""
    at_edges = [
        np.interp(edges_ns, ts_ns, ledger_ns[:, category].astype(np.float64))
        for category in range(N_CATEGORIES)
    ]
    return np.diff(np.array(at_edges), axis=1).T
