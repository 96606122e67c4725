-- Question: which processes of inference engines have open requests now, and how old is the oldest request?
-- Parameters: cluster, node (NULL: any); fresh_ns: processes without a later row are left out.
-- Columns: cluster_id, node_id, pid, engine, model, ts_ns (of the report), n_open, n_full, oldest_ns, oldest_path,
--   oldest_progress_ns. The oldest request first.
WITH latest AS (
    SELECT *, row_number() OVER (PARTITION BY cluster_id, node_id, pid ORDER BY ts_ns DESC) AS position
    FROM servers
    WHERE ts_ns >= $fresh_ns::BIGINT
        AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
        AND ($node::VARCHAR IS NULL OR node_id = $node)
)
SELECT cluster_id, node_id, pid, engine, model, ts_ns, n_open, n_full, oldest_ns, oldest_path, oldest_progress_ns
FROM latest
WHERE position = 1 AND n_open > 0
ORDER BY oldest_ns, node_id, pid
LIMIT 1000
