"""Adds the owner of the named processes to the verdicts."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from stallscope.diagnose.report.verdict import Verdict
from stallscope.events.layout import Array
from stallscope.events.owner import OWNER_LABELS, column
from stallscope.events.trace import Trace

Process = tuple[int, int]
"""A process: node and pid."""


def with_owners(trace: Trace, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts with the labels that all named processes have in common; of the whole job if none is named."""
    owners = {(trace.nodes[node], pid): owner for (node, pid), owner in owners_of(trace).items()}
    if not owners:
        return list(verdicts)
    return [replace(verdict, owner=_of(verdict, owners)) for verdict in verdicts]


def owners_of(trace: Trace) -> dict[Process, dict[str, str]]:
    """The labels of each process."""
    return _annotated(trace.annotations) | owners_in(trace.owners)


def owners_in(rows: Array) -> dict[Process, dict[str, str]]:
    """The latest known labels of each process, from rows of OWNERS."""
    return {
        (int(row["node"]), int(row["pid"])): {
            label: value.decode("utf-8", "replace") for label in OWNER_LABELS if (value := row[column(label)])
        }
        for row in np.sort(rows, order="ts_ns", kind="stable")
    }


def common_owner(owners: Iterable[dict[str, str]]) -> dict[str, str]:
    """The labels with one value in all owners; owners without labels are left out."""
    first, *others = [owner for owner in owners if owner] or [{}]
    return {
        label: first[label]
        for label in OWNER_LABELS
        if first.get(label) and all(other.get(label) == first[label] for other in others)
    }


def _annotated(rows: Array) -> dict[Process, dict[str, str]]:
    """The labels of traces of earlier versions, which hold them as annotations."""
    names = {name.encode(): name for name in OWNER_LABELS}
    labels: dict[Process, dict[str, str]] = {}
    # Most annotations are steps of the job.
    for row in rows[np.isin(rows["label"], list(names))]:
        value = row["value"].decode("utf-8", "replace")
        labels.setdefault((int(row["node"]), int(row["pid"])), {})[names[row["label"]]] = value
    return labels


def _of(verdict: Verdict, owners: dict[tuple[str, int], dict[str, str]]) -> dict[str, str]:
    named = [owners.get((node, pid), {}) for node in verdict.nodes for pid in verdict.pids]
    return common_owner(named if any(named) else owners.values())
