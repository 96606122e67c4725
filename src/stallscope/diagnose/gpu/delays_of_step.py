"""The delay that a GPU causes in a step, over all rounds of the step.

GPUs leave a round together, so a slow GPU is late in each round. Where a step has many short rounds, each delay is
small, and their sum is not. Delays and advances of the same GPU cancel out, as uneven work varies around a mean.
"""

from dataclasses import replace

import numpy as np

from stallscope.diagnose.timeline.step_table import Cells
from stallscope.events.layout import Array


def with_sums(table: Cells, late_ns: Array) -> Cells:
    """The steps with the sum of their delays, at most the GPU's own excess in the step.

    late_ns: float64 (n,), the lateness of each row of the timeline; nan where it is unknown.
    """
    until_ns = np.concatenate([[0.0], np.cumsum(np.nan_to_num(late_ns))])
    sum_ns = until_ns[table.end_row] - until_ns[table.first_row]
    own_ns = np.clip(np.minimum(sum_ns, table.whole_excess_ns), 0.0, None)
    return replace(
        table,
        rise_ns=np.maximum(table.rise_ns, own_ns),
        excess_ns=np.maximum(table.excess_ns, own_ns),
    )
