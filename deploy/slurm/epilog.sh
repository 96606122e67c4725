#!/bin/sh
# Epilog of slurmd (root): ends the trace of the job and writes the report next to it.
# slurm.conf: Epilog=/etc/slurm/epilog.d/stallscope
set -u

folder=${STALLSCOPE_SLURM_FOLDER:-/var/lib/stallscope/slurm}/${SLURM_JOB_ID:?}
[ -f "$folder/pid" ] || exit 0
pid=$(cat "$folder/pid")
kill -INT "$pid" 2>/dev/null
for _ in 1 2 3 4 5 6 7 8 9 10; do
    kill -0 "$pid" 2>/dev/null || break
    sleep 1
done
stallscope explain --db "$folder/trace.db" >"$folder/report.txt" 2>&1
stallscope explain --db "$folder/trace.db" --json >"$folder/report.json" 2>/dev/null
rm -f "$folder/pid"
find "${folder%/*}" -mindepth 1 -maxdepth 1 -mtime +"${STALLSCOPE_SLURM_DAYS:-14}" -exec rm -rf {} +
exit 0 # an epilog that fails drains the machine
