"""What a host did in excess of its peers while a job replays CUDA graphs.

The replay of a graph that was captured before the trace began has no arrival of its host. If a rank reaches its replays
late, the cause is its host if the time ledger of the host exceeds the peers' ledgers by as much; otherwise its GPU. The
ledgers come from the snapshots of each second, so they do not show which replays a host delayed.
"""

import numpy as np

from stallscope.diagnose.causes import Excess
from stallscope.events.layout import Array
from stallscope.events.names import Category
from stallscope.events.trace import Trace

_NOT_OF_HOST = (Category.WAIT_GPU, Category.DEVICE, Category.LAUNCH)  # a host that waits for its GPU


def host_excess(trace: Trace, process: tuple[int, int], late_ns: float, n_late: int) -> Excess | None:
    """The time of a host beyond the median of its peers, from its first to its last snapshot; None without snapshots.

    process: node and pid. late_ns: the total lateness of its n_late replays.
    """
    spent = _spent_ns(trace)
    own = spent.pop(process, None)
    if own is None or not spent:
        return None
    excess_ns = own - np.median(list(spent.values()), axis=0)
    excess_ns[[category - 1 for category in _NOT_OF_HOST]] = 0.0
    node, pid = process
    tables = {
        name: rows[(rows["node"] == node) & (rows["pid"] == pid)]
        for name, rows in (("calls", trace.calls), ("offcpu", trace.offcpu), ("host", trace.host_events))
    }
    return Excess(late_ns, excess_ns, n_late, symbols=trace.symbols, stacks=trace.stacks, **tables)


def _spent_ns(trace: Trace) -> dict[tuple[int, int], Array]:
    """By process, its time in each category between its first and its last snapshot."""
    rows = trace.snapshots[np.argsort(trace.snapshots["ts_ns"], kind="stable")]
    keys, first, n = np.unique(rows[["node", "pid"]], return_index=True, return_counts=True)
    spent = {}
    for key, begin, count in zip(keys.tolist(), first.tolist(), n.tolist(), strict=True):
        own = rows[(rows["node"] == key[0]) & (rows["pid"] == key[1])]
        if count > 1:
            spent[key] = (own["ledger_ns"][-1] - rows["ledger_ns"][begin]).astype(np.float64)
    return spent
