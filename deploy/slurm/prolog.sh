#!/bin/sh
# Prolog of slurmd (root): starts a trace of the job. slurm.conf: Prolog=/etc/slurm/prolog.d/stallscope
#
# The trace is alone in its folder, so that jobs on one node do not share it. A failure never delays the job.
set -u

folder=${STALLSCOPE_SLURM_FOLDER:-/var/lib/stallscope/slurm}/${SLURM_JOB_ID:?}
mkdir -p "$folder" && chmod 755 "$folder" || exit 0
setsid stallscope trace --quiet --db "$folder/trace.db" --max-db 2G --duration "${STALLSCOPE_SLURM_LIMIT:-7d}" \
    >"$folder/agent.log" 2>&1 </dev/null &
echo $! >"$folder/pid"
exit 0 # a prolog that fails drains the machine
