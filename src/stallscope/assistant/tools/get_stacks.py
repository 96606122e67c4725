"""get_stacks: code locations of the traced threads, now and earlier, from the recorded stacks."""

from collections import Counter

import numpy as np
from pydantic import Field

from stallscope.assistant.node_context import SINCE_S, Limit, Node, Since, rank_of, short_text
from stallscope.diagnose.views import in_own_code
from stallscope.events.trace import Trace
from stallscope.serve.tools.tool_registry import Params, Result, Row, Tool

_MAX_FRAMES = 40
_SHORT_FRAMES = 8
_NEVER_NS = 1 << 62


class StacksParams(Params):
    pid: int | None = Field(default=None, ge=1, description="Only this process.")
    since_s: Since = SINCE_S
    limit: Limit = 5
    frames: int = Field(
        default=_SHORT_FRAMES, ge=1, le=_MAX_FRAMES, description="Frames per stack, innermost first."
    )


class StackRow(Row):
    pid: int
    n: int = Field(description="Slow calls and off-CPU intervals with this stack.")
    total_ms: float
    frames: list[str]


class PositionRow(Row):
    pid: int
    tid: int
    rank: int | None
    at_ms: int = Field(
        description="Time of the sample, in epoch milliseconds if known, otherwise ms of uptime."
    )
    n_looks: int = Field(description="Number of samples with this stack until then.")
    frames: list[str]


class Stacks(Result):
    summary: str
    positions: list[PositionRow] = Field(
        description="Last known position of each thread in processes without recent collectives: threads that make"
        " collectives first, the longest silent process first."
    )
    stacks: list[StackRow] = Field(description="Stacks with the most time in slow calls or off the CPU.")


def get_stacks(context: Node, params: StacksParams) -> Stacks:
    """Current positions of threads in silent processes (a hang), and the call stacks with the most time.

    Time counts in slow calls or off the CPU. Empty if the trace has no stacks.
    """
    trace = context.trace(params.since_s)
    ms: Counter[tuple[int, int]] = Counter()
    n: Counter[tuple[int, int]] = Counter()
    for table in (trace.calls, trace.offcpu):
        for row in table[table["stack"] >= 0]:
            if params.pid in (None, int(row["pid"])):
                key = int(row["pid"]), int(row["stack"])
                ms[key] += max(int(row["duration_ns"]), 0)
                n[key] += 1
    rows = [
        StackRow(
            pid=pid, n=n[pid, stack], total_ms=round(ns / 1e6, 3), frames=_frames(trace, stack, params.frames)
        )
        for (pid, stack), ns in ms.most_common(params.limit)
    ]
    positions = _positions(trace, params)
    return Stacks(summary=_summary(len(ms), positions), positions=positions, stacks=rows)


def _positions(trace: Trace, params: StacksParams) -> list[PositionRow]:
    """The last sample of each thread."""
    rows = trace.positions
    if params.pid is not None:
        rows = rows[rows["pid"] == params.pid]
    rows = rows[np.argsort(rows["ts_ns"], kind="stable")]
    last = {(int(row["node"]), int(row["pid"]), int(row["tid"])): row for row in rows}
    n_of_stack = Counter(rows[["node", "pid", "tid", "stack"]].tolist())
    ranks = rank_of(trace)
    ahead_ns = {clock.node: clock.wall_ns - clock.monotonic_ns for clock in trace.clocks}
    arrivals = trace.collectives[np.argsort(trace.collectives["ts_ns"], kind="stable")]
    arrived = {
        (node, pid): (ts_ns, tid)
        for node, pid, tid, ts_ns in arrivals[["node", "pid", "tid", "ts_ns"]].tolist()
    }

    def order(key: tuple[int, int, int]) -> tuple[bool, int, tuple[int, int, int]]:
        node, pid, tid = key
        ts_ns, caller = arrived.get((node, pid), (_NEVER_NS, pid))
        return tid != caller, ts_ns, key

    return [
        PositionRow(
            pid=pid,
            tid=tid,
            rank=ranks.get((node, pid)),
            at_ms=(int(row["ts_ns"]) + ahead_ns.get(node, 0)) // 1_000_000,
            n_looks=n_of_stack[node, pid, tid, int(row["stack"])],
            frames=_frames(trace, int(row["stack"]), params.frames),
        )
        for (node, pid, tid), row in ((key, last[key]) for key in sorted(last, key=order)[: params.limit])
    ]


def _summary(n_stacks: int, positions: list[PositionRow]) -> str:
    held = f"{n_stacks} distinct stacks of slow calls and waits" if n_stacks else ""
    if not positions:
        return held or "this trace has no stacks for that time"
    first = positions[0]
    subject = f"rank {first.rank}" if first.rank is not None else f"process {first.pid}"
    location = in_own_code(first.frames)
    return f"{subject} was last seen at {location}" + (f"; {held}" if held else "")


def _frames(trace: Trace, stack: int, most: int) -> list[str]:
    return [short_text(frame) for frame in trace.stacks.get(stack, ("unknown",))[:most]]


TOOL: Tool[Node] = Tool("get_stacks", "Positions of blocked threads", get_stacks)
