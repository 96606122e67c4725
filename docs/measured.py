"""Which measured numbers the README shows. A result that is not there leaves its row out."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Number(NamedTuple):
    """One row: where the value stands (bench/results/<benchmark>.json, keys joined by dots), and how it reads.

    A file may hold a list of results: one row for each. `what` may name other keys of the result in braces.
    """

    benchmark: str
    key: str
    what: str
    said: str


SHOWN = (
    Number(
        "slowdown",
        "slowdown_percent",
        "{said}: how much longer it takes while it is traced, give or take {spread_percent:.1f} (95 %)",
        "{:.1f} %",
    ),
    Number(
        "agent",
        "sum_cpu_percent",
        "the agent beside 8 ranks that make 2,000 collectives a second, its kernel programs included",
        "{:.1f} % of one core",
    ),
    Number("agent", "peak_rss_mb", "its memory", "{:.0f} MB"),
    Number(
        "agent", "trace_bytes_per_collective", "what one collective takes in the node trace", "{:.0f} bytes"
    ),
    Number(
        "hook_cost",
        "added_ns_per_call.session.collective",
        "what tracing adds to one collective call of one rank",
        "{:,.0f} ns",
    ),
    Number("drain", "full_ring.drained_per_s", "records drained on one core", "{:,.0f} a second"),
    Number(
        "on_cpu",
        "n_right",
        "of {n_intervals:,} busy intervals beside a CPU hog, those in which the account equals the thread's own "
        "CPU clock within 1 % or 1 ms",
        "{:,.0f}",
    ),
    Number("import", "events_per_s", "events of recordings imported", "{:,.0f} a second"),
    Number(
        "explain",
        "sizes.2.explain_s",
        "explaining {sizes[2][n_collectives]:,} collectives, from file to answer",
        "{:.1f} s",
    ),
    Number(
        "scale",
        "sizes.3.diagnose_s",
        "diagnosing {sizes[3][ranks]:,} ranks x {rounds:,} rounds ({sizes[3][rows]:,} collectives in memory)",
        "{:.1f} s",
    ),
    Number("scale", "sizes.3.peak_rss_mib", "its memory at most, the trace included", "{:,.0f} MiB"),
    Number("verdict_latency", "median_s", "from a third late round to the hub's verdict, median", "{:.1f} s"),
    Number(
        "ingest",
        "loads.5.rows_per_s",
        "OTLP log records of one shape that a hub stores, on disk before it answers, in requests of "
        "{loads[5][rows_a_request]:,} on the machine of their senders",
        "{:,.0f} a second",
    ),
    Number(
        "ingest",
        "loads.12.rows_per_s",
        "rows of agents in requests of {loads[12][rows_a_request]:,}, the same way",
        "{:,.0f} a second",
    ),
)


def rows(results: Path) -> Iterable[tuple[str, str, str]]:
    """What, how much, and on which machine; only for what was measured."""
    for number in SHOWN:
        path = results / f"{number.benchmark}.json"
        found = json.loads(path.read_text()) if path.exists() else []
        for result in found if isinstance(found, list) else [found]:
            value = _value(result, number.key)
            if value is not None:
                yield number.what.format_map(result), number.said.format(value), _machine(result["machine"])


def _value(result: Any, key: str) -> Any:
    """What stands at the end of the keys; None where one is missing."""
    for word in key.split("."):
        if isinstance(result, list):
            result = result[int(word)] if result else None
        else:
            result = result.get(word) if isinstance(result, dict) else None
    return result


def _machine(told: dict[str, Any]) -> str:
    gpus = told.get("gpus")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {gpus[0].split(',')[0]}"
    kind = ", virtual" if told.get("is_virtual") else ""
    kernel = ".".join(str(told["kernel"]).split("-")[0].split(".")[:2])
    emulated = ", emulated GPUs" if gpus == "emulated" else ""
    return f"{told['n_cpus']} x {told['cpu']}{kind}, Linux {kernel}{emulated}"
