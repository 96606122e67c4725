"""The incidents that only the diagnosis on the machine can judge, for a hub: rows of NODE_VERDICTS.

Open incidents are repeated every minute, so that the hub can end the incidents of a machine that is gone.
"""

import json
import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stallscope.events import layout
from stallscope.events.layout import Array
from stallscope.events.verdict_fields import FIELDS, NODE_KINDS

_AGAIN_NS = 60_000_000_000
_MAX_BYTES = 16_384
"""The length of the column."""


@dataclass
class NodeVerdicts:
    """Takes lines of live/incident_lines.py from any thread."""

    _lines: "queue.SimpleQueue[dict[str, Any]]" = field(default_factory=queue.SimpleQueue)
    _open: dict[str, dict[str, Any]] = field(default_factory=dict)
    _again_ns: int = 0

    def take(self, line: dict[str, Any]) -> None:
        """Queue a change of an incident; changes of other kinds are left out: the hub judges them itself."""
        if line["kind"] in NODE_KINDS:
            self._lines.put(line)

    def rows(self, now_ns: int) -> Array:
        """The changes since the last call, and from time to time all open incidents."""
        lines = [self._lines.get() for _ in range(self._lines.qsize())]
        for line in lines:
            self._open[line["incident"]] = line
        if now_ns >= self._again_ns:
            self._again_ns = now_ns + _AGAIN_NS
            changed = {line["incident"] for line in lines}
            lines += [line for incident, line in self._open.items() if incident not in changed]
        self._open = {incident: line for incident, line in self._open.items() if line["state"] == "open"}
        return _rows(lines, now_ns)


def _rows(lines: Sequence[dict[str, Any]], now_ns: int) -> Array:
    out = layout.empty(layout.NODE_VERDICTS, len(lines))
    out["ts_ns"] = now_ns
    for row, line in zip(out, lines, strict=True):
        row["incident"], row["change"], row["verdict"] = line["incident"], line["change"], _text(line)
    return out


def _text(line: dict[str, Any]) -> bytes:
    """The verdict as JSON. A verdict that is too long for the column loses its details."""
    known = {field.name: line["attributes"].get(f"stallscope.{field.name}") for field in FIELDS}
    row = known | {"summary": line["summary"], "since_ns": line["begin_ns"], "until_ns": line["end_ns"]}
    details: tuple[dict[str, Any], ...] = (line["verdict"], {})
    for verdict in details:
        text = json.dumps({"row": row, "verdict": verdict, "reason": line["reason"]}).encode()
        if len(text) <= _MAX_BYTES:
            return text
    return json.dumps({"row": row | {"advice": None}, "verdict": {}, "reason": ""}).encode()
