-- Question: which rows of collectives do some processes have in a short window?
-- Parameters: cluster; pids: "machine pid"; from_ns, to_ns; max_rows.
-- Columns: those of collectives.
SELECT * FROM collectives
WHERE cluster_id = $cluster AND list_contains($pids, node_id || ' ' || pid::VARCHAR)
    AND ts_ns >= $from_ns AND ts_ns < $to_ns
ORDER BY ts_ns LIMIT $max_rows
