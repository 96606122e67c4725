"""The same command line as job.py, on the emulated GPUs of the demo: to try the proof without a GPU.

Supports the faults of the demo, in one rank; the GPU options are accepted and ignored.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import faults
from job import POLL_S, SHAPES, WARM_STEPS

from stallscope.demo import live_demo
from stallscope.demo.faults import FAULTS
from stallscope.demo.live_demo import Job


def main() -> None:
    """Run the job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", choices=SHAPES, default="ddp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sync", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--fault", action="append", default=[], type=faults.parsed)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--gate", action="store_true")
    run(parser.parse_args())


def run(chosen: argparse.Namespace) -> None:
    """The job, from the gate to the truth."""
    names = [fault.name for fault in chosen.fault] or ["healthy"]
    if len(names) > 1 or names[0] not in FAULTS or any(fault.rank < 0 for fault in chosen.fault):
        sys.exit(f"the emulated job knows one of {', '.join(FAULTS)}, in one rank: not {' and '.join(names)}")
    chosen.fault = faults.placed(chosen.fault, chosen.ranks)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    plan = live_demo.plan_for(names[0], ranks=chosen.ranks, seconds=chosen.seconds or 3600)
    victim = chosen.fault[0].rank if chosen.fault else plan.victim
    plan = replace(plan, synchronize=chosen.sync, victim=victim, seconds=chosen.seconds or 3600)
    with live_demo.started(plan, chosen.folder) as job:
        told(job, intervals_ns=[])
        for rank in range(plan.ranks):
            (chosen.folder / f"loaded{rank}").touch()
        while chosen.gate and not (chosen.folder / "go").exists():
            time.sleep(POLL_S)
        job.go()
        await_end(job, chosen)
    intervals_ns = json.loads((chosen.folder / live_demo.TRUTH_FILE).read_text())["disturbed_from_outside_ns"]
    told(job, intervals_ns=intervals_ns)


def await_end(job: Job, chosen: argparse.Namespace) -> None:
    """Until the ranks have ended, or are to stop."""
    while not job.wait(POLL_S):
        for rank in range(job.plan.ranks):
            clock = chosen.folder / f"rank{rank}.csv"
            if clock.exists() and clock.read_text().count("\n") > WARM_STEPS:
                (chosen.folder / f"ready{rank}").touch()
        if (chosen.folder / "stop").exists():
            return


def told(job: Job, *, intervals_ns: list[tuple[int, int]]) -> None:
    """Writes the truth as job.py does."""
    fault = FAULTS[job.plan.fault]
    faulty = {
        "name": job.plan.fault,
        "cause": fault.cause,
        "rank": job.plan.victim,
        "every_steps": max(1, fault.every_steps),
    }
    truth = {
        "n_ranks": job.plan.ranks,
        "pids": job.pids,
        "faults": [faulty] if fault.cause else [],
        "stopped_ns": intervals_ns,
    }
    (job.folder / "truth.json").write_text(json.dumps(truth, indent=1))


if __name__ == "__main__":
    main()
