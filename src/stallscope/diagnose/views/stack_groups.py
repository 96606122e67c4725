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
from stallscope.events.layout import UNKNOWN, Array, process_keys
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
    samples = _by_process(trace.samples[trace.samples["role"] == SampleRole.GPU])
    positions = _by_process(trace.positions)
    states = _by_process(trace.snapshots)
    processes = _by_process(trace.processes)
    stacks = []
    for node, pid in sorted({*samples, *positions} - ended):
        key = node, pid
        if key in samples:
            number, category, waits_for = _sampled(samples[key])
        else:
            number, category, waits_for = _position(positions[key], pid, states.get(key))
        frames = trace.stacks.get(number, ())
        stacks.append(
            _stack(trace.nodes[node], pid, processes.get(key), frames, category=category, waits_for=waits_for)
        )
    return stacks


def _by_process(rows: Array) -> dict[tuple[int, int], Array]:
    """The rows of each process, by node and pid, in their order."""
    keys = process_keys(rows)
    order = np.argsort(keys, kind="stable")
    found, first = np.unique(keys[order], return_index=True)
    last = [*first[1:].tolist(), len(rows)]
    return {
        (int(key) >> 32, int(key) & 0xFFFFFFFF): rows[order[begin:end]]
        for key, begin, end in zip(found, first.tolist(), last[: len(found)], strict=True)
    }


def _sampled(rows: Array) -> tuple[int, int, str]:
    """The most frequent stack of the last seconds, its state and object."""
    rows = rows[rows["ts_ns"] >= rows["ts_ns"].max() - _RECENT_NS]
    counts: Counter[tuple[int, int, str]] = Counter()
    for row in rows:
        text: bytes = row["object"].item()
        counts[int(row["stack"]), int(row["category"]), text.decode("utf-8", "replace")] += int(row["n"])
    return counts.most_common(1)[0][0]


def _position(rows: Array, pid: int, states: Array | None) -> tuple[int, int, str]:
    """The last stack of the main thread, or of another thread, and the last recorded state."""
    main = rows[rows["tid"] == pid]
    rows = main if len(main) else rows
    category = Category.NONE if states is None else int(states["category"][states["ts_ns"].argmax()])
    return int(rows["stack"][-1]), int(category), ""


def _stack(
    node: str, pid: int, process: Array | None, frames: tuple[str, ...], *, category: int, waits_for: str
) -> ProcessStack:
    rank = UNKNOWN if process is None else int(process["rank"][0])
    command: bytes = b"" if process is None else process["comm"][0].item()
    return ProcessStack(
        node=node,
        pid=pid,
        rank=None if rank == UNKNOWN else rank,
        command=command.decode("utf-8", "replace"),
        state=LABELS[Category(category)] if category else "unknown",
        waits_for=waits_for,
        frames=frames,
    )
