"""Runs inside the small machine: the agent beside an emulated job, as a user starts both; prints what came out."""

import csv
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

from stallscope.demo import live
from stallscope.demo.job import N_BUCKETS
from stallscope.demo.plan import Plan
from stallscope.store import node

RANKS, STEPS = 2, 100
DB, SAID = Path("/tmp/trace.db"), Path("/tmp/said")
PATIENCE_S = 240


def main() -> None:
    """One line of JSON after the word RESULT; what went wrong before it."""
    plan = live.plan_for("healthy", ranks=RANKS, seconds=60)
    with live.started(Plan(**(vars(plan) | {"steps": STEPS}))) as job:
        flags = [word for pid in job.pids for word in ("--pid", str(pid))]
        command = [sys.executable, "-P", "-c", "from stallscope.cli import main; main()"]
        with SAID.open("w") as out:
            agent = subprocess.Popen(
                [*command, "trace", "--db", str(DB), "--node", "here", *flags], stdout=out, stderr=out
            )
        try:
            ended = _traced(agent, job)
        finally:
            print(SAID.read_text())
            agent.kill()
        trace = node.read(DB)
        steps = [len(list(csv.DictReader((job.folder / f"rank{r}.csv").open()))) for r in range(RANKS)]
        of_rank = [trace.collectives[trace.collectives["pid"] == pid]["seq"].tolist() for pid in job.pids]
        result = {
            "kernel": platform.release(),
            "mode": _mode(),
            "exit_code": ended,
            "steps": steps,
            "rounds": [len(seqs) for seqs in of_rank],
            "expected": [n * (N_BUCKETS + 1) for n in steps],
            "in_order": all(seqs == list(range(len(seqs))) for seqs in of_rank),
            "n_snapshots": len(trace.snapshots),
            "lost": trace.lost,
        }
        print("RESULT", json.dumps(result), flush=True)


def _traced(agent: "subprocess.Popen[bytes]", job: live.Job) -> int:
    """Lets the job run once the agent has attached. Returns the agent's exit code."""
    end_s = time.monotonic() + PATIENCE_S
    while SAID.read_text().count("attached to") < 2 and agent.poll() is None and time.monotonic() < end_s:
        time.sleep(0.1)
    job.go()
    job.wait(PATIENCE_S)
    agent.send_signal(signal.SIGINT)
    return agent.wait(PATIENCE_S)


def _mode() -> str:
    """How functions were hooked, as the trace says."""
    with node.reading(DB) as connection:
        facts = connection.execute("SELECT facts FROM sessions").fetchone()[0]
    return str(json.loads(facts)["hooks"])


if __name__ == "__main__":
    os.chdir("/tmp")
    main()
