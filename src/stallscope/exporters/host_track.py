"""Host events of a process as slices of a timeline. Events that are only counted once a second are left out."""

from collections.abc import Iterator
from typing import Any

from stallscope.events.layout import UNKNOWN, Array
from stallscope.events.names import SUMMED, HostKind, word
from stallscope.exporters.tracks import Slice, Value


def slices(rows: Array, at_ns: list[int]) -> Iterator[Slice]:
    """rows: of HOST_EVENTS, of one process; at_ns: their start times on the timeline's clock."""
    for row, at in zip(rows, at_ns, strict=True):
        if int(row["kind"]) not in SUMMED and (row["tid"] or row["by_pid"] != UNKNOWN):
            yield Slice(
                at, max(int(row["duration_ns"]), 0), word(HostKind, int(row["kind"])), _arguments(row)
            )


def _arguments(row: Any) -> dict[str, Value]:
    arguments: dict[str, Value] = {
        name: row[name].decode("utf-8", "replace") for name in ("device", "file", "detail") if row[name]
    }
    if row["by_pid"] != UNKNOWN:
        arguments["by"] = f"{row['by_comm'].decode('utf-8', 'replace')} {int(row['by_pid'])}"
    if row["value"] != UNKNOWN:
        arguments["value"] = int(row["value"])
    return arguments
