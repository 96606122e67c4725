"""The stages of a pipeline, which GPUs with transfers between neighbours form.

The stages of a pipeline do different work at different times, so a GPU is compared with GPUs of the same stage only.
Ranks that exchange data with many peers (experts) do the same work.
"""

import numpy as np

from stallscope.diagnose.timeline.case import Case
from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import GpuKernelFlag

_MAX_NEIGHBOURS = 2  # of a stage
_MIN_LATE = 3  # rounds among the GPUs of a stage
_AS_LATE = 0.5  # share of the lateness of a verdict


def is_late_by_stage(case: Case, kernels: Array, process: int, late_ns: float) -> bool:
    """Whether a GPU of a pipeline is late only against GPUs of other stages.

    kernels: rows of GPU_KERNELS. process: number in the case. late_ns: its typical lateness.
    """
    timeline = case.timeline
    others = _pipeline_of(timeline, kernels, process)
    if not others:
        return False
    calls = timeline.calls
    mixed = np.unique(calls.comm[np.isin(calls.process, sorted(others))])
    rows = (timeline.process == process) & ~np.isin(timeline.comm_of_round[timeline.round], mixed)
    return int((case.matched.late_ns[rows] >= _AS_LATE * late_ns).sum()) < _MIN_LATE


def _pipeline_of(timeline: Timeline, kernels: Array, process: int) -> set[int]:
    """The other processes of its pipeline; empty without a pipeline."""
    number = {(int(timeline.node[p]), int(timeline.pid[p])): p for p in range(timeline.n_processes)}
    known = np.unique(kernels[["comm_hash", "comm_rank", "node", "pid"]]).tolist()
    member = {(comm, rank): number.get((node, pid)) for comm, rank, node, pid in known}
    is_transfer = (kernels["peer_rank"] != UNKNOWN) & (kernels["flags"] & GpuKernelFlag.IS_NETWORK == 0)
    pairs = np.unique(kernels[is_transfer][["comm_hash", "comm_rank", "peer_rank"]]).tolist()
    neighbours: dict[int, set[int]] = {}
    for comm, rank, peer in pairs:
        first, second = member.get((comm, rank)), member.get((comm, peer))
        if first is not None and second is not None and first != second:
            neighbours.setdefault(first, set()).add(second)
            neighbours.setdefault(second, set()).add(first)
    if not 0 < len(neighbours.get(process, ())) <= _MAX_NEIGHBOURS:
        return set()
    found, open_ = {process}, [process]
    while open_:
        new = neighbours[open_.pop()] - found
        found |= new
        open_ += new
    return found - {process}
