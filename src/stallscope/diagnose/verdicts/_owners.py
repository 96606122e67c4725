"""Adds the owner of the named processes to the verdicts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stallscope.diagnose.report.verdict import Verdict
from stallscope.events.owner import OWNER_LABELS
from stallscope.events.trace import Trace


def with_owners(trace: Trace, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts with the labels that all named processes have in common; of the whole job if none is named."""
    labels = _labels(trace)
    if not labels:
        return list(verdicts)
    return [replace(verdict, owner=_common(verdict, labels)) for verdict in verdicts]


def _labels(trace: Trace) -> dict[tuple[str, int], dict[str, str]]:
    """By machine and pid: the latest value of each label."""
    names = {name.encode(): name for name in OWNER_LABELS}
    labels: dict[tuple[str, int], dict[str, str]] = {}
    # Most annotations are steps of the job.
    for row in trace.annotations[np.isin(trace.annotations["label"], list(names))]:
        value = row["value"].decode("utf-8", "replace")
        key = (trace.nodes[int(row["node"])], int(row["pid"]))
        labels.setdefault(key, {})[names[row["label"]]] = value
    return labels


def _common(verdict: Verdict, labels: dict[tuple[str, int], dict[str, str]]) -> dict[str, str]:
    owners = [labels.get((node, pid), {}) for node in verdict.nodes for pid in verdict.pids]
    first, *others = [owner for owner in owners if owner] or list(labels.values())
    return {
        name: first[name]
        for name in OWNER_LABELS
        if first.get(name) and all(other.get(name) == first[name] for other in others)
    }
