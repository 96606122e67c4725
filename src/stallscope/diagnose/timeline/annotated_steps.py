"""In which training step each arrival lies, as the job told it (annotations with the label "step").

A step lasts from its label to the next one of the same process. What holds for a whole machine (pid 0) counts for its
processes that told nothing themselves.
"""

import numpy as np

from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.trace import Trace


def told_steps(trace: Trace, line: Timeline) -> Array | None:
    """int64 (n,) by row of the timeline: the number of the label in force, from 0; -1 before the first one.

    None where the job told no steps. The numbers count labels, whatever values they carry.
    """
    labels = trace.annotations[trace.annotations["label"] == b"step"]
    if not len(labels):
        return None
    out = np.full(len(line.rows), -1, np.int64)
    for process, (node, pid) in enumerate(zip(line.node.tolist(), line.pid.tolist(), strict=True)):
        here = labels[labels["node"] == node]
        own = here[here["pid"] == pid] if (here["pid"] == pid).any() else here[here["pid"] == 0]
        rows = slice(int(line.first[process]), int(line.first[process + 1]))
        out[rows] = np.searchsorted(np.sort(own["ts_ns"]), line.ts_ns[rows], side="right") - 1
    return out
