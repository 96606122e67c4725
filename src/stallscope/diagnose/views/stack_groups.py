"""The stacks of several processes, grouped by similarity, the smallest group first: an outlier is a group of its own.

Two stacks are similar if at least four fifths of their functions are the same, in the same order, line numbers apart.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from stallscope.diagnose.report.budget import LABELS
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import Category, SampleRole
from stallscope.events.trace import Trace

_SIMILAR = 0.8
_RECENT_NS = 10 * 10**9
_LINE = re.compile(r":(\d+|\?) |\+0x[0-9a-f]+")


@dataclass(frozen=True)
class ProcessStack:
    """The stack of one process, innermost frame first. state: what its thread does. rank: None where unknown."""

    node: str
    pid: int
    rank: int | None
    command: str
    state: str
    waits_for: str
    frames: tuple[str, ...]


@dataclass(frozen=True)
class StackGroup:
    """Processes with similar stacks. frames: of the first of them."""

    members: tuple[ProcessStack, ...]

    @property
    def frames(self) -> tuple[str, ...]:
        return self.members[0].frames


def groups(stacks: Sequence[ProcessStack]) -> list[StackGroup]:
    """The groups of similar stacks, the smallest first; in a group by rank and pid."""
    similar: list[tuple[tuple[str, ...], list[ProcessStack]]] = []
    for stack in sorted(
        stacks, key=lambda stack: (stack.node, UNKNOWN if stack.rank is None else stack.rank, stack.pid)
    ):
        functions = tuple(_LINE.sub(" ", frame) for frame in stack.frames)
        for known, members in similar:
            if known == functions or _are_similar(known, functions):
                members.append(stack)
                break
        else:
            similar.append((functions, [stack]))
    ordered = sorted(similar, key=lambda group: len(group[1]))
    return [StackGroup(tuple(members)) for _, members in ordered]


def _are_similar(first: tuple[str, ...], second: tuple[str, ...]) -> bool:
    return bool(first and second) and SequenceMatcher(None, first, second, autojunk=False).ratio() >= _SIMILAR


def latest_stacks(trace: Trace) -> list[ProcessStack]:
    """The most frequent recent stack of each process that was alive at the end of a trace."""
    ended = {
        (int(row["node"]), int(row["pid"]))
        for row in trace.processes
        if row["ended_ns"] != UNKNOWN and (trace.processes["ended_ns"] == UNKNOWN).any()
    }
    stacks = []
    for node, pid in sorted({*_keys(trace.samples), *_keys(trace.positions)} - ended):
        stack = _sampled(trace, node, pid) or _position(trace, node, pid)
        if stack is not None:
            number, category, waits_for = stack
            stacks.append(_stack(trace, node, pid, trace.stacks.get(number, ()), category, waits_for))
    return stacks


def _keys(rows: Array) -> set[tuple[int, int]]:
    return {(int(node), int(pid)) for node, pid in np.unique(rows[["node", "pid"]]).tolist()}


def _sampled(trace: Trace, node: int, pid: int) -> tuple[int, int, str] | None:
    rows = trace.samples
    rows = rows[(rows["node"] == node) & (rows["pid"] == pid) & (rows["role"] == SampleRole.GPU)]
    if not len(rows):
        return None
    rows = rows[rows["ts_ns"] >= rows["ts_ns"].max() - _RECENT_NS]
    counts: Counter[tuple[int, int, str]] = Counter()
    for row in rows:
        text: bytes = row["object"].item()
        counts[int(row["stack"]), int(row["category"]), text.decode("utf-8", "replace")] += int(row["n"])
    return counts.most_common(1)[0][0]


def _position(trace: Trace, node: int, pid: int) -> tuple[int, int, str] | None:
    rows = trace.positions
    rows = rows[(rows["node"] == node) & (rows["pid"] == pid)]
    main = rows[rows["tid"] == pid]
    rows = main if len(main) else rows
    if not len(rows):
        return None
    states = trace.snapshots[(trace.snapshots["node"] == node) & (trace.snapshots["pid"] == pid)]
    category = int(states["category"][states["ts_ns"].argmax()]) if len(states) else int(Category.NONE)
    return int(rows["stack"][-1]), category, ""


def _stack(
    trace: Trace, node: int, pid: int, frames: tuple[str, ...], category: int, waits_for: str
) -> ProcessStack:
    processes = trace.processes[(trace.processes["node"] == node) & (trace.processes["pid"] == pid)]
    rank = int(processes["rank"][0]) if len(processes) else UNKNOWN
    command: bytes = processes["comm"][0].item() if len(processes) else b""
    return ProcessStack(
        node=trace.nodes[node],
        pid=pid,
        rank=None if rank == UNKNOWN else rank,
        command=command.decode("utf-8", "replace"),
        state=LABELS[Category(category)] if category else "unknown",
        waits_for=waits_for,
        frames=frames,
    )
