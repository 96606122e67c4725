"""Ranks that are late in the same steps: the ranks of one node, or of several nodes, with one cause in common.

Such ranks are one event, however many they are: they do not make each other's lateness a matter of chance. Ranks that
share a node are taken together when they make up most of it; nodes are taken together by their steps.
"""

from collections.abc import Mapping

import numpy as np

from stallscope.events.layout import Array

_SAME_STEPS = 0.6  # share of the steps in which either is late that both must be late in
_OF_NODE = 0.5  # share of a node's ranks that make it the node's lateness


def companions(candidate: int, process: Array, step: Array, node: Array) -> Array:
    """The processes late in the same steps as a candidate, on nodes most of whose ranks are: int64, sorted.

    process, step: int64 (k,), of the late steps. node: int64 (p,), by process. Empty where there is one node, or where
    the candidate is alone on its node with it.
    """
    none = np.zeros(0, np.int64)
    if node.min() == node.max():
        return none
    own = np.unique(step[process == candidate])
    pairs = np.unique(np.stack([process, step]), axis=1)
    n_late = np.bincount(pairs[0], minlength=len(node))
    n_both = np.bincount(pairs[0][np.isin(pairs[1], own)], minlength=len(node))
    is_mate = n_both >= _SAME_STEPS * np.maximum(n_late + len(own) - n_both, 1)
    is_known = node >= 0
    n_ranks = np.bincount(node[is_known])
    n_mates = np.bincount(node[is_mate & is_known], minlength=len(n_ranks))
    is_late_node = (n_mates >= _OF_NODE * n_ranks) & (n_mates > 0)
    if not is_known[candidate] or not is_late_node[node[candidate]]:
        return none
    mates = np.flatnonzero(is_mate & is_known & is_late_node[node])
    return mates[mates != candidate]


def in_groups(steps: Mapping[int, Array], node: Array) -> list[list[int]]:
    """Processes in groups, in order of their first: nodes that are late together, all other processes one by one.

    steps: the steps in which each process is late. node: int64 (p,), by process of the job.
    """
    if not len(node) or node.min() == node.max():
        return [[process] for process in sorted(steps)]
    sizes = np.bincount(node)
    late_nodes: list[list[int]] = []
    out: list[list[int]] = []
    for number in np.unique(node[sorted(steps)]).tolist():
        own = [process for process in sorted(steps) if node[process] == number]
        is_whole = len(own) == sizes[number] > 1
        is_most = len(own) >= max(_OF_NODE * sizes[number], 2)
        if is_whole or (is_most and all(_are_same(steps[own[0]], steps[process]) for process in own)):
            late_nodes.append(own)
        else:
            out.extend([process] for process in own)
    for own in late_nodes:
        group = next((one for one in out if len(one) > 1 and _are_same(steps[one[0]], steps[own[0]])), None)
        if group is None:
            out.append(own)
        else:
            group.extend(own)
    return sorted(out)


def _are_same(one: Array, other: Array) -> bool:
    n_both = len(np.intersect1d(one, other))
    return n_both >= _SAME_STEPS * (len(np.unique(one)) + len(np.unique(other)) - n_both)
