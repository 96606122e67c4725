-- Question: how many kernels does each process launch, and how long do its slow launches take?
-- Parameters: cluster, node, from_ns, to_ns (NULL: any), max_rows.
-- Columns: cluster_id, node_id, pid, rank, n_launches: counted by the agent between its first and last collective
--   (NULL where launches are not counted), n_rounds, n_slow: launches that were kept as slow calls, slow_median_ns,
--   slow_longest_ns, slow_total_ns.
WITH counted AS (
    SELECT cluster_id, node_id, pid, any_value(rank) AS rank, count(*) AS n_rounds,
        nullif(max(n_launches) - min(n_launches), 0) AS n_launches
    FROM collectives
    WHERE pid IS NOT NULL AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
        AND ($node::VARCHAR IS NULL OR node_id = $node)
        AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns) AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
    GROUP BY cluster_id, node_id, pid
), slow AS (
    SELECT cluster_id, node_id, pid, any_value(rank) AS rank, count(*) AS n_slow, median(duration_ns) AS slow_median_ns,
        max(duration_ns) AS slow_longest_ns, sum(duration_ns) AS slow_total_ns
    FROM events
    WHERE op IN ('launch', 'graph_launch') AND duration_ns IS NOT NULL
        AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
        AND ($node::VARCHAR IS NULL OR node_id = $node)
        AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns) AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
    GROUP BY cluster_id, node_id, pid
)
SELECT coalesce(c.cluster_id, s.cluster_id) AS cluster_id, coalesce(c.node_id, s.node_id) AS node_id,
    coalesce(c.pid, s.pid) AS pid, coalesce(c.rank, s.rank)::INTEGER AS rank, n_launches::BIGINT AS n_launches,
    coalesce(n_rounds, 0) AS n_rounds, coalesce(n_slow, 0) AS n_slow, slow_median_ns, slow_longest_ns,
    slow_total_ns::BIGINT AS slow_total_ns
FROM counted c FULL JOIN slow s
    ON s.cluster_id IS NOT DISTINCT FROM c.cluster_id AND s.node_id IS NOT DISTINCT FROM c.node_id
    AND s.pid IS NOT DISTINCT FROM c.pid
WHERE n_launches IS NOT NULL OR n_slow IS NOT NULL
ORDER BY slow_total_ns DESC NULLS LAST, n_launches DESC NULLS LAST, node_id, pid LIMIT $max_rows
