"""The verdicts of the continuous diagnosis as rows of the node trace, and as lines for a journal."""

import json
import queue
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Insert = Callable[[str, Sequence[str], Iterable[Sequence[object]]], None]
"""store.node.NodeTrace.insert"""

_COLUMNS = ("made_wall_ns", "verdict")


class VerdictJournal:
    """Takes lines of live/incident_lines.py from any thread; write() stores them in the thread that owns the trace."""

    def __init__(self, note: Callable[[str], None] | None):
        """note: prints a line for each incident that opens or closes; None prints nothing."""
        self._note = note
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def take(self, line: dict[str, Any]) -> None:
        """Queue a change of an incident."""
        self._lines.put(line)

    def write(self, insert: Insert) -> None:
        """Store the changes queued since the last call, one row each."""
        lines = [self._lines.get() for _ in range(self._lines.qsize())]
        if not lines:
            return
        insert("verdicts", _COLUMNS, [(line["at_ns"], json.dumps(_stored(line))) for line in lines])
        for line in lines:
            if self._note and line["change"] != "updated":
                self._note(_sentence(line))


def _stored(line: dict[str, Any]) -> dict[str, Any]:
    """The verdict as `explain --json` prints it, with the incident's identity and state."""
    own = {name: line[name] for name in ("incident", "change", "state")}
    return line["verdict"] | own | {"closed_because": line["reason"] or None}


def _sentence(line: dict[str, Any]) -> str:
    severity = line["verdict"]["severity"]
    head = f"verdict {line['change']}" + (f" ({severity})" if severity else "")
    over = f" Over: {line['reason']}." if line["reason"] else ""
    return f"{head}: {line['summary']}{over}"
