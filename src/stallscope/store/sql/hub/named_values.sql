-- Question: what are the values of a numeric record or metric, by machine and rank?
-- Parameters: metric: its name; cluster, from_ns, to_ns (NULL: any).
-- Columns: cluster_id, node_id, rank (NULL where it is of a machine), n, median, lowest, highest.
SELECT cluster_id, node_id, rank, count(*) AS n, median(value_double) AS median, min(value_double) AS lowest,
    max(value_double) AS highest
FROM events
WHERE name = $metric AND value_double IS NOT NULL AND isfinite(value_double)
    AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
    AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns)
    AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
GROUP BY ALL ORDER BY cluster_id, node_id, rank
