"""A job of four ranks on emulated GPUs, as a user would start it: live_job.py FAULT SECONDS LOG. Prints the pids.

The job begins when the agent, whose output is in LOG, has attached to both libraries of the job.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from stallscope.demo import build, live_demo
from stallscope.demo.traced import MIN_OCCURRENCES

_ATTACH_S = 300.0


def await_attached(log: Path) -> None:
    """Wait for the agent's notes on both libraries. Raises SystemExit with the last note."""
    end_s = time.monotonic() + _ATTACH_S
    while True:
        lines = log.read_text().splitlines() if log.exists() else []
        attached = [line for line in lines if "attached" in line]
        if all(any(library in line for line in attached) for library in build.LIBRARIES):
            return
        if time.monotonic() > end_s:
            raise SystemExit(f"live_job: the agent does not attach: {lines[-1:]}")
        time.sleep(live_demo.POLL_S)


if __name__ == "__main__":
    seconds = float(sys.argv[2])
    plan = live_demo.plan_for(sys.argv[1], ranks=4, seconds=seconds)
    with live_demo.started(replace(plan, min_occurrences=MIN_OCCURRENCES)) as job:
        await_attached(Path(sys.argv[3]))
        job.go()
        print(*job.pids, flush=True)
        job.wait(10 * seconds)
