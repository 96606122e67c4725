"""GPUs that take longer than their peers for the same work between the calls of a step, in jobs whose steps vary.

The ranks of a job may have uneven work in one part of a step only: answers of random length, and then training on equal
batches. The lateness of the ranks then varies by more than the slowness of a GPU. The GPUs' own work between two
collectives varies little where it is even, so its ratio to the peers' work shows a slow GPU.
"""

import numpy as np

from stallscope.diagnose.arrays.grouping import by_group, median_of_others, medians, numbered
from stallscope.diagnose.lateness.late_steps import spread
from stallscope.diagnose.thresholds import Thresholds
from stallscope.diagnose.timeline.step_table import Cells
from stallscope.events.layout import Array

_FEWEST_GPUS = 4
_MIN_SLOWER = 0.1  # share of the peers' work by which a GPU is slower: GPUs of a model differ by up to 3 %


def longer_ns(table: Cells, own_ns: Array, program: Array, limits: Thresholds) -> Array:
    """By how much the work of a GPU in a step is longer than its peers': float64 (c,), 0 within their variation.

    own_ns: float64 (c,), the work of each GPU in a step between the same calls. program: int64 (p,), by process; peers
    have the same program. The variation is of the ratio to the peers, from step to step and between the GPUs; 0
    everywhere with fewer than four GPUs.
    """
    out, n_processes = np.zeros(len(own_ns)), len(program)
    if n_processes < _FEWEST_GPUS:
        return out
    peers_ns = median_of_others(numbered(program[table.process], table.step)[0], own_ns)
    known = np.isfinite(peers_ns) & (peers_ns > 0) & (own_ns > 0)
    cells = np.flatnonzero(known)
    ratio = np.log(own_ns[cells] / peers_ns[cells])
    in_steps = by_group(table.process[cells], ratio, n_processes, spread)
    of_gpus = by_group(table.process[cells], ratio, n_processes, medians)
    is_seen = np.isfinite(of_gpus)
    if not is_seen.any():
        return out
    noise = max(float(np.median(in_steps[is_seen])), float(spread(of_gpus[is_seen][None])[0]))
    slower = cells[ratio >= max(limits.noise_factor * noise, float(np.log1p(_MIN_SLOWER)))]
    out[slower] = own_ns[slower] - peers_ns[slower]
    return out
