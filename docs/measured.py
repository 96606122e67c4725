"""The measurements in the README. A missing result omits its row."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Number(NamedTuple):
    """One row: the location of the value (bench/results/<benchmark>.json, keys joined by dots) and its wording.

    A file with a list of results gives one row for each. `what` may name other keys of the result in braces.
    """

    benchmark: str
    key: str
    what: str
    wording: str


SHOWN = (
    Number(
        "slowdown",
        "slowdown_percent",
        "{description}: slowdown while traced, +- {spread_percent:.1f} points (95 % interval)",
        "{:.1f} %",
    ),
    Number(
        "slowdown",
        "restarted_slowdown_percent",
        "{description}: slowdown by a second method, the agent started and stopped {n_restarts} times, "
        "+- {restarted_spread_percent:.1f} points",
        "{:.1f} %",
    ),
    Number(
        "agent",
        "sum_cpu_percent",
        "CPU of the agent on a node with 8 ranks and 2,000 collectives a second, kernel programs included",
        "{:.1f} % of one core",
    ),
    Number("agent", "peak_rss_mb", "memory of the agent", "{:.0f} MB"),
    Number("agent", "trace_bytes_per_collective", "size of one collective in the node trace", "{:.0f} bytes"),
    Number(
        "hook_cost",
        "added_ns_per_call.session.collective",
        "time that tracing adds to one collective call of one rank",
        "{:,.0f} ns",
    ),
    Number("drain", "full_ring.drained_per_s", "records drained on one core", "{:,.0f} a second"),
    Number(
        "on_cpu",
        "n_right",
        "intervals, of {n_intervals:,} with a CPU hog on the same CPU, in which the time ledger equals the thread's "
        "own CPU clock within 1 % or 1 ms",
        "{:,.0f}",
    ),
    Number("import", "events_per_s", "imported events of recordings", "{:,.0f} a second"),
    Number(
        "explain",
        "sizes.2.explain_cpu_s",
        "processor time to explain {sizes[2][n_collectives]:,} collectives, from file to answer",
        "{:.1f} s",
    ),
    Number(
        "explain",
        "sizes.2.read_cpu_us_per_collective",
        "of which, per collective, to read it from the file",
        "{:.1f} us",
    ),
    Number(
        "scale",
        "sizes.3.diagnose_s",
        "time to diagnose {sizes[3][ranks]:,} ranks x {rounds:,} rounds ({sizes[3][rows]:,} collectives in memory)",
        "{:.1f} s",
    ),
    Number(
        "scale", "sizes.3.peak_rss_mib", "peak memory of that diagnosis, the trace included", "{:,.0f} MiB"
    ),
    Number(
        "verdict_latency",
        "median_s",
        "median time from the third late round to the hub's verdict",
        "{:.1f} s",
    ),
    Number(
        "ingest",
        "loads.6.rows_per_s",
        "uniform OTLP log records that a hub stores durably before it answers, in requests of "
        "{loads[6][rows_a_request]:,}, senders on the same machine",
        "{:,.0f} a second",
    ),
    Number(
        "ingest",
        "loads.14.rows_per_s",
        "rows of agents that a hub stores the same way, in requests of {loads[14][rows_a_request]:,}",
        "{:,.0f} a second",
    ),
    Number(
        "ingest",
        "loads.9.rows_per_s",
        "the same in requests of {loads[9][rows_a_request]:,}, from {loads[9][senders]} senders",
        "{:,.0f} a second",
    ),
    Number(
        "ingest",
        "agents.0.answer_ms_p99",
        "99 % of the answers to {agents[0][agents]} agents with a request of 100 rows a second each, "
        "{agents[0][refused]:,} refused (OTLP)",
        "within {:,.0f} ms",
    ),
    Number(
        "ingest",
        "agents.1.answer_ms_p99",
        "the same on the Arrow endpoint, {agents[1][refused]:,} of {agents[1][requests]:,} refused",
        "within {:,.0f} ms",
    ),
    Number(
        "diagnosis",
        "loads.2.acknowledged_per_s",
        "rows of {loads[2][ranks]:,} ranks without a late rank that a hub stores and diagnoses, "
        "{loads[2][rows_left_out]:,} of {loads[2][rows]:,} rows left out, senders on the same machine",
        "{:,.0f} a second",
    ),
    Number(
        "diagnosis",
        "loads.3.acknowledged_per_s",
        "rows of {loads[3][ranks]:,} ranks with a straggler that a hub stores and diagnoses, "
        "{loads[3][rows_left_out]:,} rows left out, senders on the same machine",
        "{:,.0f} a second",
    ),
    Number(
        "diagnosis",
        "loads.3.storage_cpu_us_per_row",
        "processor time of a hub to store one of these rows",
        "{:.1f} us",
    ),
    Number(
        "diagnosis",
        "loads.3.diagnosis_cpu_us_per_row",
        "processor time to diagnose one of the examined rows",
        "{:.1f} us",
    ),
    Number(
        "tools",
        "during_ingest_of_100000_rows_per_s.explain_rank_s",
        "time to explain a rank of {n_records:,} records while 100,000 rows a second arrive",
        "{:.2f} s",
    ),
    Number(
        "overload",
        "lost_rows",
        "acknowledged rows lost in {duration_s:,} s of {offered_to_sustained} times the sustained load",
        "{:,.0f}",
    ),
)


def rows(results: Path) -> Iterable[tuple[str, str, str]]:
    """Quantity, value and machine of each result that exists."""
    for number in SHOWN:
        path = results / f"{number.benchmark}.json"
        content = json.loads(path.read_text()) if path.exists() else []
        for result in content if isinstance(content, list) else [content]:
            value = _value(result, number.key)
            if value is not None:
                of = "restarted_machine" if number.key.startswith("restarted") else "machine"
                yield (
                    number.what.format_map(result),
                    number.wording.format(value),
                    _machine(result.get(of) or result["machine"]),
                )


def _value(result: Any, key: str) -> Any:
    """The value at the end of the keys; None where a key is missing."""
    for word in key.split("."):
        if isinstance(result, list):
            result = result[int(word)] if result else None
        else:
            result = result.get(word) if isinstance(result, dict) else None
    return result


def _machine(machine: dict[str, Any]) -> str:
    gpus = machine.get("gpus")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} x {gpus[0].split(',')[0]}"
    kind = ", virtual" if machine.get("is_virtual") else ""
    kernel = ".".join(str(machine["kernel"]).split("-")[0].split(".")[:2])
    emulated = ", emulated GPUs" if gpus == "emulated" else ""
    return f"{machine['n_cpus']} x {machine['cpu']}{kind}, Linux {kernel}{emulated}"


def files_table(results: Path) -> str:
    """The answers on generated files, by format; empty without results."""
    if not (file := results / "files.json").is_file():
        return ""
    lines = [
        "| format | follows | cases | right | of these open | inconclusive | wrong |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in json.loads(file.read_text())["formats"]:
        right = row["n_named"] + row["n_open"]
        lines.append(
            f"| {row['format']} | {row['source']} | {row['n_cases']} | {right} | {row['n_open']} | "
            f"{row['n_inconclusive']} | {row['n_wrong']} |"
        )
    return "\n".join(lines) + "\n"


def comparison(results: Path) -> str:
    """The answers of other analysers and of stallscope on the same files; empty without results."""
    if not (file := results / "compare_analysers.json").is_file():
        return ""
    rows = json.loads(file.read_text())["rows"]
    lines = ["| files | shape | analyser | right | open | wrong | error |", "|---|---|---|--:|--:|--:|--:|"]
    for row in rows:
        counts = [row["answers"].count(answer) or "" for answer in ("right", "open", "wrong", "error")]
        shape = row["shape"].replace("_", " ")
        lines.append(
            f"| {row['files']} | {shape} | {row['analyser']} | " + " | ".join(map(str, counts)) + " |"
        )
    return "\n".join(lines) + "\n"
