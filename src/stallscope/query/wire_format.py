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

_METADATA = "about"


def packed(trace: Trace) -> bytes:
    """The trace in numpy's npz format, compressed: an array per table, and all other data as JSON."""
    metadata = {
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
    arrays[_METADATA] = np.frombuffer(json.dumps(metadata).encode(), np.uint8)
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def unpacked(content: bytes) -> Trace:
    """The trace in bytes made by packed(). Raises BadTrace."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            metadata = json.loads(arrays[_METADATA].tobytes())
            tables = {table.name: arrays[table.name] for table in ARRAYS}
        for table in ARRAYS:
            if tables[table.name].dtype != layout.dtype(table):
                raise BadTrace(
                    "the node runs another version of stallscope: install the same version on both machines"
                )
        return Trace(
            **tables,
            nodes=tuple(metadata["nodes"]),
            symbols=tuple(metadata["symbols"]),
            stacks={int(number): tuple(frames) for number, frames in metadata["stacks"]},
            clocks=tuple(Clock(**clock) for clock in metadata["clocks"]),
            lost=metadata["lost"],
            ends_ns=tuple(metadata["ends_ns"]),
            source=metadata["source"],
            facts=metadata["facts"],
            coverage=Coverage.from_text(metadata.get("coverage", "")),
        )
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise BadTrace(
            f"the node's answer is not a trace ({error}): update stallscope on the node or here"
        ) from error


def together(traces: Sequence[Trace]) -> Trace:
    """One trace of several, each of other machines. Nodes and symbols get new numbers; other data does not change."""
    nodes: list[str] = []
    symbols: list[str] = [""]
    rows_by_table: dict[str, list[layout.Array]] = {table.name: [] for table in ARRAYS}
    clocks: list[Clock] = []
    probed: list[Clock] = []
    ends: list[int] = []
    lost: dict[str, int] = {}
    stacks: dict[int, tuple[str, ...]] = {}
    for trace in traces:
        first_node = len(nodes)
        nodes += trace.nodes
        new_stacks = {old: new for new, old in enumerate(trace.stacks, len(stacks) + 1)}
        stacks |= {new_stacks[old]: frames for old, frames in trace.stacks.items()}
        number = np.array([_symbol_number(symbols, name) for name in trace.symbols], np.int64)
        for table in ARRAYS:
            rows = getattr(trace, table.name).copy()
            rows["node"] += first_node
            if "symbol" in (rows.dtype.names or ()):
                rows["symbol"] = number[rows["symbol"]]
            if "stack" in (rows.dtype.names or ()):
                rows["stack"] = [new_stacks.get(old, layout.UNKNOWN) for old in rows["stack"].tolist()]
            rows_by_table[table.name].append(rows)
        clocks += [replace(clock, node=clock.node + first_node) for clock in trace.clocks]
        probed += [replace(clock, node=clock.node + first_node) for clock in trace.probed]
        ends += [*trace.ends_ns, *[-1] * (len(trace.nodes) - len(trace.ends_ns))]
        for kind, n in trace.lost.items():
            lost[kind] = lost.get(kind, 0) + n
    return Trace(
        **{name: np.concatenate(rows) for name, rows in rows_by_table.items()},
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


def _symbol_number(symbols: list[str], name: str) -> int:
    if name not in symbols:
        symbols.append(name)
    return symbols.index(name)
