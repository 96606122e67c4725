"""Ingest with the diagnosis on: a paced load without and with a late rank, on one machine with the hub.

The hub is the real command. Loads come from `stallscope stress`. For each load: rows that the diagnosis left out, the
time from the first late round to the verdict, and the processor time per row of the receiver with its store and per
examined row of the diagnosis. A load is sustained if no row was left out and all rows were acknowledged at the rate.

python bench/bench_diagnosis.py [--seconds S] [--only RANKS:RATE:STRAGGLER ...]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from report import report
from served_hub import ServedHub, served_hub, stress

LOADS = ("64:150000:-", "64:80000:3", "1024:150000:-", "1024:80000:3", "8:150000:-")
"""Ranks, rows per second, and the late rank. 8 ranks have no rounds long enough for a late rank at these rates."""

TARGETS = {"-": 150_000, "3": 80_000}
ASK_EVERY_S = 0.25
"""Each question uses the hub's processor time, which is part of the result."""

LATE_SHARE = 0.4
"""Lateness as a share of the round time."""


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", nargs="*", metavar="RANKS:RATE:STRAGGLER")
    asked = parser.parse_args()
    loads = []
    for load in asked.only or LOADS:
        loads.append(measured(load, seconds=asked.seconds))
        print(json.dumps(loads[-1]), flush=True)
    if not asked.only:
        report("diagnosis", {"loads": loads})


def measured(load: str, *, seconds: float) -> dict[str, Any]:
    """One hub, one load."""
    ranks, rate, straggler = load.split(":")
    n_events = int(int(rate) * seconds)
    late_ms = LATE_SHARE * int(ranks) / int(rate) * 1e3
    words = ["--ranks", ranks, "--rate", rate, "--events", str(n_events), "--batch", "5000"]
    if straggler != "-":
        words += ["--straggler", straggler, "--late-ms", f"{late_ms:.3f}"]
    with tempfile.TemporaryDirectory() as name, served_hub(Path(name)) as hub:
        before = hub.cpu_s()
        begin_s = time.time()
        sender = stress(hub, *words)
        opened_s = first_verdict_s(hub, sender, begin_s) if straggler != "-" else None
        sent = json.loads(sender.communicate()[0])
        time.sleep(2.0)
        after, numbers = hub.cpu_s(), hub.numbers()
        n_verdicts = len(hub.ask("fleet.cluster.verdicts")["rows"])
        memory_mb = hub.memory_mb()
    left_out = int(numbers["diagnosis_rows_left_out_total"])
    return {
        "ranks": int(ranks),
        "rate": int(rate),
        "straggler": None if straggler == "-" else int(straggler),
        "target_rows_per_s": TARGETS[straggler],
        "acknowledged_per_s": sent["acknowledged_per_s"],
        "rows": sent["acknowledged"],
        "rows_left_out": left_out,
        "ack_p99_ms": sent["ack_p99_ms"],
        "verdict_s": opened_s,
        "n_verdicts": n_verdicts,
        "storage_cpu_us_per_row": round((after["hub"] - before["hub"]) / n_events * 1e6, 2),
        "diagnosis_cpu_us_per_row": round(
            (after["diagnosis"] - before["diagnosis"]) / max(n_events - left_out, 1) * 1e6, 2
        ),
        "memory_mb": memory_mb,
    }


def first_verdict_s(hub: ServedHub, sender: Any, begin_s: float) -> float | None:
    """Seconds from the start of the load to the first straggler, None without any."""
    while sender.poll() is None:
        if hub.ask("fleet.cluster.verdicts", kind="straggler")["rows"]:
            return round(time.time() - begin_s, 2)
        time.sleep(ASK_EVERY_S)
    return None


if __name__ == "__main__":
    main()
