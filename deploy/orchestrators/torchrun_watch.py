#!/usr/bin/env python3
"""Starts a job, and restarts it after a hang that stallscope reports.

    torchrun_watch.py [--act] [--restarts N] [--socket PATH] -- torchrun --nproc-per-node 8 train.py

Without --act it prints the restart that it would perform. The job must resume from its last checkpoint. The exit code
is the exit code of the job.
"""

import argparse
import json
import os
import queue
import signal
import socket
import subprocess
import threading

GRACE_S = 30.0


def read_events(path: str, events: "queue.Queue[dict]") -> None:
    """Put every message of the socket into the queue."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        for line in connection.makefile("rb"):
            events.put(json.loads(line))


def stop(job: subprocess.Popen) -> None:
    """End the job's process group."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--act", action="store_true", help="restart the job; otherwise only print the action")
    parser.add_argument("--restarts", type=int, default=3, help="largest number of restarts")
    parser.add_argument("--socket", default="/run/stallscope/events.sock")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    events: queue.Queue[dict] = queue.Queue()
    threading.Thread(target=read_events, args=(options.socket, events), daemon=True).start()
    job = subprocess.Popen(command, start_new_session=True)
    n_restarts = 0
    while job.poll() is None:
        try:
            event = events.get(timeout=0.5)
        except queue.Empty:
            continue
        if event["type"] in ("resolved", "ended") or event["recommendation"]["action"] != "restart_job":
            continue
        print(f"restart_job: {event['summary']}", flush=True)
        if options.act and n_restarts < options.restarts:
            n_restarts += 1
            stop(job)
            job = subprocess.Popen(command, start_new_session=True)
    return job.returncode


if __name__ == "__main__":
    raise SystemExit(main())
