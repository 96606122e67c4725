-- Question: which rows of offcpu do some processes have in a short window?
-- Parameters: cluster; pids: "machine pid"; from_ns, to_ns; max_rows.
-- Columns: those of offcpu.
SELECT * FROM offcpu
WHERE cluster_id = $cluster AND list_contains($pids, node_id || ' ' || pid::VARCHAR)
    AND ts_ns >= $from_ns AND ts_ns < $to_ns
ORDER BY ts_ns LIMIT $max_rows
