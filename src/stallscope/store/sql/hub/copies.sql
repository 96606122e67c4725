-- Question: how fast are memory copies, by machine, process, function and size?
-- Parameters: cluster, node, from_ns, to_ns (NULL: any), max_rows.
-- Columns: cluster_id, node_id, rank (NULL where unknown), symbol, size_class (bytes, power of 4 at or below), n,
--   n_bytes, median_gbps, slowest_gbps, fastest_gbps (10^9 bytes a second), busy_s. Only copies with a known length.
WITH copies AS (
    SELECT e.cluster_id, e.node_id, e.pid, e.rank, e.value_text AS symbol, e.count_bytes, e.duration_ns,
        count_bytes / duration_ns AS gbps, (4 ** floor(log2(count_bytes) / 2))::BIGINT AS size_class
    FROM events e
    WHERE op = 'copy' AND count_bytes > 0 AND duration_ns > 0
        AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
        AND ($node::VARCHAR IS NULL OR node_id = $node)
        AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns)
        AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
), who AS (
    SELECT node_id, pid, any_value(rank) AS rank FROM processes WHERE rank IS NOT NULL GROUP BY ALL
)
SELECT c.cluster_id, c.node_id, coalesce(c.rank, w.rank)::INTEGER AS rank, c.symbol, c.size_class, count(*) AS n,
    sum(c.count_bytes)::BIGINT AS n_bytes, median(c.gbps) AS median_gbps, min(c.gbps) AS slowest_gbps,
    max(c.gbps) AS fastest_gbps, sum(c.duration_ns) / 1e9 AS busy_s
FROM copies c LEFT JOIN who w ON w.node_id = c.node_id AND w.pid = c.pid
GROUP BY ALL ORDER BY busy_s DESC, c.node_id, rank, c.symbol, c.size_class LIMIT $max_rows
