"""A job of four ranks on emulated GPUs, as a user would start it: live_job.py FAULT SECONDS. Prints the pids."""

import sys
import time

from stallscope.demo import live_demo

if __name__ == "__main__":
    seconds = float(sys.argv[2])
    with live_demo.started(live_demo.plan_for(sys.argv[1], ranks=4, seconds=seconds)) as job:
        time.sleep(3)  # until the agent has attached
        job.go()
        print(*job.pids, flush=True)
        job.wait(10 * seconds)
