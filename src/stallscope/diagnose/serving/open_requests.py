"""The open requests of each process of an engine, and where its oldest request is."""

from dataclasses import dataclass

import numpy as np

from stallscope.diagnose.processes.code_locations import user_line
from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.trace import Trace

_CURRENT_NS = 2_500_000_000
"""A process reports its open requests every second."""


@dataclass(frozen=True)
class OpenRequests:
    """n_full: requests whose client does not take data. oldest_*: of the oldest other request; age_s None without it.

    awaits: the first token or the next token. line: of its process, where the thread has been blocked for 2 s.
    """

    node: str
    pid: int
    engine: str
    model: str
    n_open: int
    n_full: int
    oldest_path: str
    age_s: float | None
    still_s: float | None
    awaits: str
    line: str


def open_requests(trace: Trace) -> list[OpenRequests]:
    """The processes with open requests at the end of the trace, the oldest request first."""
    rows = trace.servers
    out = []
    for key in np.unique(rows[["node", "pid"]]):
        own = rows[(rows["node"] == key["node"]) & (rows["pid"] == key["pid"])]
        row = own[own["ts_ns"].argmax()]
        node = int(row["node"])
        end_ns = max(int(rows["ts_ns"][rows["node"] == node].max()), _end_ns(trace, node))
        if row["n_open"] > 0 and end_ns - row["ts_ns"] < _CURRENT_NS:
            out.append(_open(trace, row))
    return sorted(out, key=lambda each: -(each.age_s or 0.0))


def _end_ns(trace: Trace, node: int) -> int:
    return trace.ends_ns[node] if node < len(trace.ends_ns) else UNKNOWN


def _open(trace: Trace, row: Array) -> OpenRequests:
    engine, model, path = (
        row[name].decode("utf-8", "replace") for name in ("engine", "model", "oldest_path")
    )
    at_ns, oldest_ns, progress_ns = (int(row[name]) for name in ("ts_ns", "oldest_ns", "oldest_progress_ns"))
    has_oldest = oldest_ns != UNKNOWN
    return OpenRequests(
        node=trace.nodes[int(row["node"])],
        pid=int(row["pid"]),
        engine=engine,
        model=model,
        n_open=int(row["n_open"]),
        n_full=int(row["n_full"]),
        oldest_path=path,
        age_s=round((at_ns - oldest_ns) / 1e9, 3) if has_oldest else None,
        still_s=round((at_ns - progress_ns) / 1e9, 3) if has_oldest else None,
        awaits=("the first token" if progress_ns == oldest_ns else "the next token") if has_oldest else "",
        line=_line(trace, row, progress_ns) if has_oldest else "",
    )


def _line(trace: Trace, row: Array, since_ns: int) -> str:
    """The line of the user's code at which a thread of the process was last blocked; empty without a stack."""
    rows = trace.positions
    rows = rows[(rows["node"] == row["node"]) & (rows["pid"] == row["pid"]) & (rows["ts_ns"] >= since_ns)]
    lines = [user_line(trace.stacks.get(int(each["stack"]), ())) for each in rows[::-1]]
    inner = [line for line in lines if line and not line.endswith(("<module>", " main"))]
    return next(iter(inner), "")
