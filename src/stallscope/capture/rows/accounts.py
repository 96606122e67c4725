"""The time ledgers of the kernel's table of processes, up to the time of the reading.

The accounts are sums of time stamps, so now has to be added to the account of a process's present state. The state of a
process is the state of its most active GPU thread, the largest byte of its word.
"""

import numpy as np

from stallscope.capture.probes.program import State, states_of_slots
from stallscope.events.layout import Array


def accounts(state: State) -> Array:
    """ns in each category: int64 (n, N_CATEGORIES)."""
    sums = state.rows["ns"].view(np.int64).copy()
    sums[np.arange(len(sums)), states_of_slots(state.rows).max(axis=1)] += state.now_ns
    return sums[:, 1:]
