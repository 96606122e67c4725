"""The training step of each arrival, as the job annotated it (annotations with the label "step").

A step lasts from its label to the next label of the same process. Labels of a whole machine (pid 0) apply to its
processes without labels of their own.
"""

import numpy as np

from stallscope.diagnose.timeline.timeline import Timeline
from stallscope.events.layout import Array
from stallscope.events.trace import Trace


def annotated_steps(trace: Trace, timeline: Timeline) -> Array | None:
    """The number of the current label of each row of the timeline: int64 (n,), from 0; -1 before the first label.

    None where the job annotated no steps. The numbers count labels; the values of the labels are ignored.
    """
    labels = trace.annotations[trace.annotations["label"] == b"step"]
    if not len(labels):
        return None
    out = np.full(len(timeline.rows), -1, np.int64)
    for process, (node, pid) in enumerate(zip(timeline.node.tolist(), timeline.pid.tolist(), strict=True)):
        here = labels[labels["node"] == node]
        labels_of_process = here[here["pid"] == pid] if (here["pid"] == pid).any() else here[here["pid"] == 0]
        rows = slice(int(timeline.first[process]), int(timeline.first[process + 1]))
        out[rows] = (
            np.searchsorted(np.sort(labels_of_process["ts_ns"]), timeline.ts_ns[rows], side="right") - 1
        )
    return out
