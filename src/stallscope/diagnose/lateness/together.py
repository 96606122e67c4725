"""Ranks that are late in the same steps: the ranks of one node, or of several nodes, with one cause in common.

Such ranks are a single event: their common lateness is not evidence of chance. Ranks that share a node form a group if
they are most of the node. Nodes form a group if they are late in the same steps, for the same kind of reason; a node
may have a single rank.
"""

from collections.abc import Mapping

import numpy as np

from stallscope.diagnose.lateness.late_steps import LateStep
from stallscope.events.layout import Array
from stallscope.events.names import Category

_SAME_STEPS = 0.6  # share of the late steps of two processes in which both must be late
_MOST_OF_NODE, _FEWEST_OF_NODE = 0.75, 4  # share of a node's ranks that are named, and ranks of a node
_FEWEST_LATE = 2  # late steps of a process that belongs to a late node
_OF_NODE = 0.5  # share of a node's ranks from which the node is late


def companions(
    candidate: int, process: Array, step: Array, node: Array, *, seen: Array | None = None
) -> Array:
    """The processes late in the same steps as a candidate, on nodes with most ranks late: int64, sorted.

    process, step: int64 (k,), of the late steps. node: int64 (p,), by process. seen: int64 (p, 2), the first and the
    last step with records of each process; two processes are compared in the steps with records of both. Empty for a
    single node, or if most of the candidate's node is not late.
    """
    none = np.zeros(0, np.int64)
    if node.min() == node.max():
        return none
    own = np.unique(step[process == candidate])
    pairs = np.unique(np.stack([process, step]), axis=1)
    if seen is None:
        seen = np.stack([np.full(len(node), step.min()), np.full(len(node), step.max())], axis=1)
    first, last = seen.T
    is_seen = (pairs[1] >= first[candidate]) & (pairs[1] <= last[candidate])
    n_late = np.bincount(pairs[0][is_seen], minlength=len(node))
    n_both = np.bincount(pairs[0][is_seen & np.isin(pairs[1], own)], minlength=len(node))
    n_own = np.searchsorted(own, last, side="right") - np.searchsorted(own, first)
    is_mate = n_both >= _SAME_STEPS * np.maximum(n_late + n_own - n_both, 1)
    is_known = node >= 0
    n_ranks = np.bincount(node[is_known])
    n_mates = np.bincount(node[is_mate & is_known], minlength=len(n_ranks))
    is_late_node = (n_mates >= _OF_NODE * n_ranks) & (n_mates > 0)
    if not is_known[candidate] or not is_late_node[node[candidate]]:
        return none
    mates = np.flatnonzero(is_mate & is_known & is_late_node[node])
    return mates[mates != candidate]


def with_whole_nodes(
    named: dict[int, list[LateStep]], late_steps: list[LateStep], node: Array
) -> dict[int, list[LateStep]]:
    """The named processes, and the other processes of a node of which most are named, if they are late together.

    Each of their late steps must be a late step of a named process of the node, and they must be late at least half as
    often as the typical named process of the node. node: int64 (p,), by process.
    """
    if not len(node) or node.min() == node.max():
        return named
    of_process: dict[int, list[LateStep]] = {}
    for late in late_steps:
        of_process.setdefault(late.process, []).append(late)
    whole = dict(named)
    for number in np.unique(node[node >= 0]).tolist():
        own = np.flatnonzero(node == number).tolist()
        known = [process for process in own if process in named]
        if len(own) < _FEWEST_OF_NODE or len(known) < _MOST_OF_NODE * len(own):
            continue
        steps = {late.step for process in known for late in named[process]}
        n_least = max(_OF_NODE * float(np.median([len(named[process]) for process in known])), _FEWEST_LATE)
        for process in own:
            delays = of_process.get(process, [])
            if process not in named and len(delays) >= n_least and all(late.step in steps for late in delays):
                whole[process] = delays
    return dict(sorted(whole.items()))


def in_groups(steps: Mapping[int, Array], node: Array, category: Mapping[int, Category]) -> list[list[int]]:
    """Processes in groups, by their first process: nodes that are late together, and every other process by itself.

    steps: the steps in which each process is late. node: int64 (p,), by process of the job. category: the ledger
    category of most of each process's excess. Nodes form a group only if the first process of each has the same
    category.
    """
    if not len(node) or node.min() == node.max():
        return [[process] for process in sorted(steps)]
    late_nodes, alone = _by_node(steps, node)
    out: list[list[int]] = []
    for own in late_nodes:
        first = own[0]
        group = next((each for each in out if _are_together(each[0], first, steps, category)), None)
        if group is None:
            out.append(own)
        else:
            group.extend(own)
    return sorted([*out, *([process] for process in alone)])


def _by_node(steps: Mapping[int, Array], node: Array) -> tuple[list[list[int]], list[int]]:
    """The late processes of each node that is late as a whole, and all other late processes."""
    sizes = np.bincount(node[node >= 0], minlength=1)
    late_nodes: list[list[int]] = []
    alone: list[int] = []
    for number in np.unique(node[sorted(steps)]).tolist():
        own = [process for process in sorted(steps) if node[process] == number]
        is_whole = len(own) == sizes[number]
        is_most = len(own) >= max(_OF_NODE * sizes[number], 2)
        if is_whole or (is_most and all(_are_same(steps[own[0]], steps[process]) for process in own)):
            late_nodes.append(own)
        else:
            alone += own
    return late_nodes, alone


def _are_together(
    process: int, other: int, steps: Mapping[int, Array], category: Mapping[int, Category]
) -> bool:
    return category[process] == category[other] and _are_same(steps[process], steps[other])


def _are_same(steps: Array, others: Array) -> bool:
    n_both = len(np.intersect1d(steps, others))
    return n_both >= _SAME_STEPS * (len(np.unique(steps)) + len(np.unique(others)) - n_both)
