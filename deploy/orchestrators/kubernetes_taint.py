#!/usr/bin/env python3
"""Taints and labels the Kubernetes node of a machine that stallscope recommends to drain, or whose GPU to replace.

    kubernetes_taint.py [--act] [--socket PATH] [--once]

Run it next to the agent, with a service account that may patch nodes. Without --act it prints the commands. NoSchedule
keeps the running pods: a person decides about them. The taint stays after the incident; remove it after the repair:

    kubectl taint nodes NODE stallscope.io/slow-gpu-
"""

import argparse
import json
import shlex
import socket
import subprocess

ACTIONS = ("drain_node", "replace_gpu")


def commands(event: dict) -> list[list[str]]:
    """The kubectl commands for a message of the event socket."""
    recommended = event["recommendation"]
    if event["type"] in ("resolved", "ended") or recommended["action"] not in ACTIONS:
        return []
    label = recommended["action"].replace("_", "-")
    return [
        command
        for node in recommended["nodes"]
        for command in (
            ["kubectl", "taint", "nodes", node, "stallscope.io/slow-gpu=true:NoSchedule", "--overwrite"],
            ["kubectl", "label", "nodes", node, f"stallscope.io/recommendation={label}", "--overwrite"],
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--act", action="store_true", help="run the commands; otherwise only print them")
    parser.add_argument("--socket", default="/run/stallscope/events.sock")
    parser.add_argument("--once", action="store_true", help="end after the first recommended node")
    options = parser.parse_args()
    tainted: set[tuple[str, ...]] = set()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(options.socket)
        for line in connection.makefile("rb"):
            for command in commands(json.loads(line)):
                if tuple(command) in tainted:
                    continue
                print(shlex.join(command), flush=True)
                if options.act:
                    subprocess.run(command, check=True)
                tainted.add(tuple(command))
            if tainted and options.once:
                return


if __name__ == "__main__":
    main()
