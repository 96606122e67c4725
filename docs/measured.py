"""Which measured numbers the README shows. A result that is not there leaves its row out."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Number(NamedTuple):
    """One row: where the value stands (bench/results/<benchmark>.json, keys joined by dots), and how it reads."""

    benchmark: str
    key: str
    what: str
    said: str


SHOWN = (
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
        "of 1,000 busy intervals beside a CPU hog: the account equals the thread's own CPU clock within 1 % or 1 ms",
        "{:,.0f}",
    ),
)


def rows(results: Path) -> Iterable[tuple[str, str, str]]:
    """What, how much, and on which machine; only for what was measured."""
    for number in SHOWN:
        path = results / f"{number.benchmark}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        value: Any = result
        for key in number.key.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            yield number.what, number.said.format(value), _machine(result["machine"])


def _machine(told: dict[str, Any]) -> str:
    kind = ", virtual" if told.get("is_virtual") else ""
    kernel = ".".join(str(told["kernel"]).split("-")[0].split(".")[:2])
    return f"{told['n_cpus']} x {told['cpu']}{kind}, Linux {kernel}"
