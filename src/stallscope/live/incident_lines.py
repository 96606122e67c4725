"""The sidecar process of an agent that finds incidents: it reads the rows that the agent commits, and prints a JSON
line for each incident that opens, changes or closes.

exporters/incident_finder.py starts it. The end of standard input means that the agent ended; open incidents then close.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stallscope.alerts.incident import from_agent
from stallscope.diagnose import (
    TRACE_ENDED,
    Change,
    Stream,
    Thresholds,
    is_undecided,
    verdict_as_json,
    verdict_row,
)
from stallscope.errors import StallscopeError
from stallscope.events.trace import Trace
from stallscope.events.verdict_fields import FIELDS
from stallscope.live.stall_verdict import Standstill
from stallscope.live.tail import TraceTail
from stallscope.store import node

if TYPE_CHECKING:
    from stallscope.alerts.service import AgentAlerts

_EVERY_S = 1.0
_NICE = 10  # the traced job has priority

_RENAMED = {
    "stallscope.kind": "stallscope.verdict.kind",
    "stallscope.victims": "stallscope.waiting_ranks",
    "stallscope.gpu_seconds": "stallscope.lost_gpu_seconds",
    "stallscope.comm_hash": "nccl.comm_hash",
}
"""Names of the previous release, sent in addition until the next release."""

_SPAN_FIELDS = ("summary", "since_ns", "until_ns")
ATTRIBUTES = {"stallscope.incident": "id of the incident, constant while the incident lasts"} | {
    f"stallscope.{field.name}": field.meaning for field in FIELDS if field.name not in _SPAN_FIELDS
}
"""Attributes of an incident's span; an attribute without a value is left out."""


def incident_line(change: Change) -> dict[str, Any]:
    """The change of an incident for the agent, which stores and exports it. Times are wall-clock ns.

    The item `attributes` has the attributes of the incident's span.
    """
    row = verdict_row(change.verdict)
    begin_ns = row["since_ns"] if row["since_ns"] is not None else change.at_ns
    values = {f"stallscope.{name}": value for name, value in row.items() if name not in _SPAN_FIELDS}
    attributes = {"stallscope.incident": change.incident_id} | {
        name: value for name, value in values.items() if value not in (None, "")
    }
    attributes |= {old: attributes[new] for new, old in _RENAMED.items() if new in attributes}
    return {
        "change": change.kind,
        "incident": change.incident_id,
        "state": change.state,
        "reason": change.reason,
        "is_resolved": change.is_resolved,
        "needs_gpu_times": change.state == "open" and is_undecided(change.verdict),
        "kind": row["kind"],
        "cause": row["cause"] or "unknown",
        "at_ns": change.at_ns,
        "begin_ns": begin_ns,
        "end_ns": max(row["until_ns"] or change.at_ns, begin_ns),
        "summary": row["summary"],
        "attributes": attributes,
        "verdict": verdict_as_json(change.verdict),
    }


class Diagnosis:
    """The continuous diagnosis of one trace: batches of its rows in, changes of incidents out."""

    def __init__(
        self,
        db: Path,
        limits: Thresholds,
        usd_per_gpu_hour: float | None = None,
        *,
        clock: Callable[[], int] = time.time_ns,
    ):
        self._stream = Stream(limits=limits, usd_per_gpu_hour=usd_per_gpu_hour, clock=clock)
        self._standstill = Standstill(db, limits)
        self._has_rounds = False
        self._standstills: dict[str, Change] = {}

    def changes(self, batch: Trace) -> list[Change]:
        """The changes after these rows and the passed time. Raises StallscopeError."""
        self._has_rounds |= len(batch.collectives) > 0
        standstills = self._standstill.changes(has_rounds=self._has_rounds)
        for change in standstills:
            self._standstills[change.incident_id] = change
        return [*standstills, *self._stream.feed(batch), *self._stream.tick()]

    def end(self) -> list[Change]:
        """The last changes: the remaining rows are examined, and open incidents close."""
        reason, at_ns = TRACE_ENDED, time.time_ns()
        standstills = [change for change in self._standstills.values() if change.state == "open"]
        return [
            *(replace(change, kind="closed", at_ns=at_ns, reason=reason) for change in standstills),
            *self._stream.finish(),
        ]


def find(
    db: Path,
    since_ns: int,
    limits: Thresholds,
    *,
    usd_per_gpu_hour: float | None,
    is_over: threading.Event,
    alerts: Path | None = None,
) -> None:
    """Follow a trace until `is_over` is set. since_ns: ignore older rows, monotonic. Raises StallscopeError.

    alerts: the file of alerts; None sends no alerts.
    """
    diagnosis = Diagnosis(db, limits, usd_per_gpu_hour)
    with ExitStack() as stack:
        connection = stack.enter_context(node.reading(db))
        agent_alerts = stack.enter_context(closing(_alerts(db, alerts))) if alerts else None
        tail = TraceTail(connection, since_ns)
        is_last = False
        while not is_last:
            is_last = is_over.wait(_EVERY_S)
            for change in diagnosis.changes(tail.with_changes(tail.batch())):
                _report(change, agent_alerts)
        for change in diagnosis.end():
            _report(change, agent_alerts)


def _alerts(db: Path, config: Path) -> "AgentAlerts":
    """Raises NotFound, BadInput, StorageFailed."""
    from stallscope.alerts.config import load  # most agents do not need pydantic
    from stallscope.alerts.service import AgentAlerts

    return AgentAlerts(db, load(config))


def _report(change: Change, alerts: "AgentAlerts | None") -> None:
    line = incident_line(change)
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    if alerts:
        alerts.take(from_agent(line))


def main() -> None:
    """Find incidents until the agent ends. Ctrl-C is ignored: the agent handles it and then ends this process."""
    os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    is_over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait, daemon=True, name="agent").start()
    try:
        task = json.loads(sys.argv[1])
        find(
            Path(task["db"]),
            task["since_ns"],
            Thresholds(**task["thresholds"]),
            usd_per_gpu_hour=task["usd_per_gpu_hour"],
            is_over=is_over,
            alerts=Path(task["alerts"]) if task.get("alerts") else None,
        )
    except BrokenPipeError:  # the agent was killed; a flush at exit would raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except StallscopeError as error:
        print(f"stallscope: the continuous diagnosis ended: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
