"""A trace as bytes for transfer, and several traces as one."""

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from stallscope.errors import BadTrace
from stallscope.events import layout
from stallscope.events.layout import ARRAYS
from stallscope.events.trace import Clock, Coverage, Trace

_ABOUT = "about"


def packed(trace: Trace) -> bytes:
    """The trace in numpy's npz format, compressed: an array per table, and all other data as JSON."""
    about = {
        "nodes": trace.nodes,
        "symbols": trace.symbols,
        "stacks": list(trace.stacks.items()),
        "clocks": [asdict(clock) for clock in trace.clocks],
        "lost": trace.lost,
        "ends_ns": trace.ends_ns,
        "source": trace.source,
        "facts": trace.facts,
        "coverage": trace.coverage.to_text(),
    }
    out = io.BytesIO()
    arrays: dict[str, Any] = {table.name: getattr(trace, table.name) for table in ARRAYS}
    arrays[_ABOUT] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def unpacked(content: bytes) -> Trace:
    """The trace in bytes made by packed(). Raises BadTrace."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            about = json.loads(arrays[_ABOUT].tobytes())
            tables = {table.name: arrays[table.name] for table in ARRAYS}
        for table in ARRAYS:
            if tables[table.name].dtype != layout.dtype(table):
                raise BadTrace("the node runs another version of stallscope: make them the same")
        return Trace(
            **tables,
            nodes=tuple(about["nodes"]),
            symbols=tuple(about["symbols"]),
            stacks={int(number): tuple(frames) for number, frames in about["stacks"]},
            clocks=tuple(Clock(**clock) for clock in about["clocks"]),
            lost=about["lost"],
            ends_ns=tuple(about["ends_ns"]),
            source=about["source"],
            facts=about["facts"],
            coverage=Coverage.from_text(about.get("coverage", "")),
        )
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise BadTrace(
            f"the node's answer is not a trace ({error}): update stallscope on the node or here"
        ) from error


def together(traces: Sequence[Trace]) -> Trace:
    """One trace of several, each of other machines. Nodes and symbols get new numbers; other data does not change."""
    nodes: list[str] = []
    symbols: list[str] = [""]
    parts: dict[str, list[layout.Array]] = {table.name: [] for table in ARRAYS}
    clocks: list[Clock] = []
    probed: list[Clock] = []
    ends: list[int] = []
    lost: dict[str, int] = {}
    stacks: dict[int, tuple[str, ...]] = {}
    for trace in traces:
        first = len(nodes)
        nodes += trace.nodes
        numbered = {old: new for new, old in enumerate(trace.stacks, len(stacks) + 1)}
        stacks |= {numbered[old]: frames for old, frames in trace.stacks.items()}
        number = np.array([_number(symbols, name) for name in trace.symbols], np.int64)
        for table in ARRAYS:
            rows = getattr(trace, table.name).copy()
            rows["node"] += first
            if "symbol" in (rows.dtype.names or ()):
                rows["symbol"] = number[rows["symbol"]]
            if "stack" in (rows.dtype.names or ()):
                rows["stack"] = [numbered.get(old, layout.UNKNOWN) for old in rows["stack"].tolist()]
            parts[table.name].append(rows)
        clocks += [replace(clock, node=clock.node + first) for clock in trace.clocks]
        probed += [replace(clock, node=clock.node + first) for clock in trace.probed]
        ends += [*trace.ends_ns, *[-1] * (len(trace.nodes) - len(trace.ends_ns))]
        for kind, n in trace.lost.items():
            lost[kind] = lost.get(kind, 0) + n
    return Trace(
        **{name: np.concatenate(rows) for name, rows in parts.items()},
        nodes=tuple(nodes),
        symbols=tuple(symbols),
        stacks=stacks,
        clocks=tuple(clocks),
        probed=tuple(probed),
        lost=lost,
        ends_ns=tuple(ends),
        source=traces[0].source,
        facts=traces[0].facts,
        coverage=Coverage.joined(trace.coverage for trace in traces),
    )


def _number(symbols: list[str], name: str) -> int:
    if name not in symbols:
        symbols.append(name)
    return symbols.index(name)
