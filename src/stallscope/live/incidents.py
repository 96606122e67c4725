"""The process that finds incidents beside an agent: it reads what the agent commits and prints a JSON line for each
incident that opens, changes or closes.

It is started by exporters/incidents.py. The end of standard input is the agent's end; what is open then closes.
"""

import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from stallscope.diagnose.report.verdict import Verdict
from stallscope.diagnose.stream import Change, Stream
from stallscope.diagnose.thresholds import Thresholds
from stallscope.errors import StallscopeError
from stallscope.live.following import Following
from stallscope.store import node

_EVERY_S = 1.0

ATTRIBUTES = {
    "stallscope.incident": "its id: the same as long as it is the same incident",
    "stallscope.verdict.kind": "straggler, hang, mismatch, imbalance, device, process, inconclusive",
    "stallscope.cause": "the cause with the largest share; `unknown` where none is named",
    "stallscope.confidence": "0 to 1",
    "stallscope.ranks": "the ranks to look at",
    "stallscope.nodes": "their machines",
    "stallscope.waiting_ranks": "the ranks that waited for them",
    "stallscope.late_ms": "median lateness",
    "stallscope.period_steps": "it comes back every so many steps",
    "stallscope.lost_gpu_seconds": "GPU time that the others lost, the lower end where a range is known",
    "stallscope.at_most_gpu_seconds": "its upper end",
    "nccl.comm_hash": "the communicator in which it shows",
}
"""Of the span of an incident; those from stallscope.late_ms on only where they are known."""


def told(change: str, incident: str, verdict: Verdict, *, at_ns: int) -> dict[str, Any]:
    """One line. attributes: of the span that stands for the incident. Times are wall-clock ns."""
    cause = verdict.causes[0].cause.name if verdict.causes else "unknown"
    begin_ns = verdict.since_ns if verdict.since_ns is not None else at_ns
    attributes: dict[str, Any] = {
        "stallscope.incident": incident,
        "stallscope.verdict.kind": verdict.kind,
        "stallscope.cause": cause,
        "stallscope.confidence": verdict.confidence,
        "stallscope.ranks": verdict.ranks,
        "stallscope.nodes": verdict.nodes,
        "stallscope.waiting_ranks": verdict.victims,
    }
    if verdict.late_ms:
        attributes["stallscope.late_ms"] = verdict.late_ms["median"]
    if verdict.period_steps:
        attributes["stallscope.period_steps"] = verdict.period_steps
    if verdict.comm_hash:
        attributes["nccl.comm_hash"] = verdict.comm_hash
    if verdict.cost:
        attributes["stallscope.lost_gpu_seconds"] = verdict.cost.gpu_seconds
        if verdict.cost.at_most_gpu_seconds is not None:
            attributes["stallscope.at_most_gpu_seconds"] = verdict.cost.at_most_gpu_seconds
    return {
        "change": change,
        "incident": incident,
        "kind": verdict.kind,
        "cause": cause,
        "begin_ns": begin_ns,
        "end_ns": max(verdict.until_ns or at_ns, begin_ns),
        "summary": verdict.summary,
        "attributes": attributes,
    }


def find(db: Path, since_ns: int, limits: Thresholds, *, is_over: threading.Event) -> None:
    """Follow a trace until `is_over` is set. since_ns: nothing older, monotonic. Raises StallscopeError."""
    stream = Stream(limits=limits)
    open_: dict[str, Change] = {}
    with node.reading(db) as connection:
        following = Following(connection, since_ns)
        is_last = False
        while not is_last:
            is_last = is_over.wait(_EVERY_S)
            batch = following.with_changes(following.batch())
            for change in (*stream.feed(batch), *stream.tick()):
                open_[change.incident_id] = change
                if change.kind == "closed":
                    del open_[change.incident_id]
                _say(change.kind, change)
    for change in open_.values():
        _say("closed", change)


def _say(kind: str, change: Change) -> None:
    line = told(kind, change.incident_id, change.verdict, at_ns=change.at_ns)
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Find until the agent ends. Ctrl-C is the agent's affair, which then ends this."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    is_over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait, daemon=True, name="agent").start()
    try:
        db, since_ns, limits = sys.argv[1:]
        find(Path(db), int(since_ns), Thresholds(**json.loads(limits)), is_over=is_over)
    except StallscopeError as error:
        print(f"stallscope: incidents are not told: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
