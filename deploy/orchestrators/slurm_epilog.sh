#!/bin/sh
# Epilog of slurmd: drains the machine after a job if a verdict on it recommends that (drain_node, replace_gpu).
#
# slurm.conf: Epilog=/etc/slurm/epilog.d/stallscope. The agent traces the machine into $STALLSCOPE_DB.
# Without STALLSCOPE_ACT=1 it only logs the command.
set -u

begin=${SLURM_JOB_START_TIME:+$(date -u -d "@$SLURM_JOB_START_TIME" +%Y-%m-%dT%H:%M:%S)}
report=$(stallscope explain --json ${begin:+--from "$begin"}) # exits with 20 if a fault was found
reason=$(printf '%s' "$report" | python3 -c '
import json, sys
try:
    verdicts = json.load(sys.stdin)["verdicts"]
except (ValueError, KeyError):
    verdicts = []
for verdict in verdicts:
    if verdict["recommendation"]["action"] in ("drain_node", "replace_gpu"):
        print(verdict["summary"])
        break
')
[ -n "$reason" ] || exit 0
node=${SLURMD_NODENAME:-$(hostname -s)}
logger -t stallscope "scontrol update NodeName=$node State=DRAIN Reason=stallscope: $reason"
[ "${STALLSCOPE_ACT:-}" != 1 ] || scontrol update NodeName="$node" State=DRAIN Reason="stallscope: $reason"
exit 0 # an epilog that fails drains the machine itself
