"""get_stacks: where in the code the traced threads were, where stacks were recorded."""

import json
from collections import Counter

from pydantic import Field

from stallscope.assistant.asking import SINCE_S, Limit, Node, Since, short_text
from stallscope.serve.tools.registry import Params, Result, Row, Tool
from stallscope.store import node as store

_MAX_FRAMES = 40
_SHORT_FRAMES = 8


class StacksParams(Params):
    pid: int | None = Field(default=None, ge=1, description="Only this process.")
    since_s: Since = SINCE_S
    limit: Limit = 5
    frames: int = Field(
        default=_SHORT_FRAMES, ge=1, le=_MAX_FRAMES, description="Frames of each, innermost first."
    )


class StackRow(Row):
    pid: int
    n: int = Field(description="Slow calls and off-CPU intervals with this stack.")
    total_ms: float
    frames: list[str]


class Stacks(Result):
    summary: str
    stacks: list[StackRow]


def get_stacks(asker: Node, params: StacksParams) -> Stacks:
    """The call stacks in which most time was spent in slow calls or off the CPU. Empty where the trace holds none."""
    trace = asker.trace(params.since_s)
    ms: Counter[tuple[int, int]] = Counter()
    n: Counter[tuple[int, int]] = Counter()
    for table in (trace.calls, trace.offcpu):
        for row in table[table["stack"] >= 0]:
            if params.pid in (None, int(row["pid"])):
                key = int(row["pid"]), int(row["stack"])
                ms[key] += max(int(row["duration_ns"]), 0)
                n[key] += 1
    texts = _texts(asker, [stack for _, stack in ms])
    rows = [
        StackRow(
            pid=pid,
            n=n[pid, stack],
            total_ms=round(ns / 1e6, 3),
            frames=texts.get(stack, ["unknown"])[: params.frames],
        )
        for (pid, stack), ns in ms.most_common(params.limit)
    ]
    said = f"{len(ms)} different stacks" if rows else "this trace holds no stacks for that time"
    return Stacks(summary=said, stacks=rows)


def _texts(asker: Node, stacks: list[int]) -> dict[int, list[str]]:
    """Frames by number of the stack."""
    with store.reading(asker.db) as db:
        found = {
            stack: db.execute("SELECT frames FROM stacks WHERE stack = ?", (stack,)).fetchone()
            for stack in set(stacks)
        }
    return {stack: _frames(row[0]) for stack, row in found.items() if row}


def _frames(text: str) -> list[str]:
    try:
        told = json.loads(text)
    except ValueError:
        told = text.splitlines()
    return [short_text(frame) for frame in told] if isinstance(told, list) else [short_text(text)]


TOOL: Tool[Node] = Tool("get_stacks", "Where threads were held", get_stacks)
