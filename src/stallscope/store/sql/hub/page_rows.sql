-- Question: which arrivals does the page keep in memory?
-- Parameters: from_ns: of the first; max_rows: the newest of them.
-- Columns: the columns of collectives that page/job_cells.py reads.
SELECT cluster_id, node_id, pid, comm_hash, nranks, comm_rank, rank, op, seq, ts_ns, wait_enter_ns, wait_leave_ns
FROM collectives
WHERE ts_ns >= $from_ns
ORDER BY ts_ns DESC LIMIT $max_rows
