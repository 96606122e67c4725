"""New rows and changes as JSON, one record per line."""

from collections.abc import Iterator
from typing import Any

from stallscope.diagnose import wall_text
from stallscope.events.layout import TABLES, UNKNOWN, Table
from stallscope.events.names import CATEGORY_NAMES, Category, Datatype, Op
from stallscope.events.trace import Clock, Trace

_NAMED = {"op": Op, "in_call": Op, "datatype": Datatype, "category": Category}


def records(batch: Trace, clock: Clock | None) -> Iterator[dict[str, Any]]:
    """Every row of a batch: `record` is its table; enumerated numbers become names; unknown values are null.

    clock: a clock reading that converts times to wall times.
    """
    for table in TABLES:
        for row in getattr(batch, table.name):
            yield {"record": table.name, **_row(table, row, batch, clock)}
    for kind, n in batch.lost.items():
        yield {"record": "lost", "kind": kind, "n_lost": n}


def verdict_record(at_ns: int, stored: dict[str, Any]) -> dict[str, Any]:
    """A change of an incident, with the verdict in the format of `explain --json`. stored: from the trace."""
    verdict = dict(stored)
    return {
        "record": "verdict",
        "change": verdict.pop("change"),
        "incident": verdict.pop("incident"),
        "state": verdict.pop("state"),
        "reason": verdict.pop("closed_because"),
        "time": wall_text(at_ns),
        "verdict": verdict,
    }


def _row(table: Table, row: Any, batch: Trace, clock: Clock | None) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if clock is not None:
        out["time"] = wall_text(int(row["ts_ns"]) - clock.monotonic_ns + clock.wall_ns)
    for field in table.fields:
        value = row[field.name]
        if field.format.startswith("("):
            out |= {f"{name}_ns": int(ns) for name, ns in zip(CATEGORY_NAMES, value, strict=True)}
        elif field.format.startswith("S"):
            out[field.name] = value.decode("utf-8", "replace")
        elif field.may_be_unknown and value == UNKNOWN:
            out[field.name] = None
        else:
            out[field.name] = _value(field.name, int(value), batch)
    return out


def _value(name: str, value: int, batch: Trace) -> int | str:
    if name == "node":
        return batch.nodes[value]
    if name == "symbol":
        return batch.symbols[value] if value < len(batch.symbols) else value
    if name == "comm_hash":
        return f"{value:016x}"
    if name in _NAMED:
        known = {int(member): member.name.lower() for member in _NAMED[name]}
        return known.get(value, value)
    return value
