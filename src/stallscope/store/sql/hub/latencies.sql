-- Question: how long do requests to inference engines take?
-- Parameters: cluster, node (NULL: any); from_ns, to_ns (NULL: unbounded).
-- Columns: cluster_id, engine, model, path, n, n_failed, n_aborted, n_tokens, begin_ns, end_ns (intervals of ten seconds
--   that ended then), first, whole, "between" (lists of histograms as JSON, see events/histograms.py). Most requests first.
SELECT cluster_id, engine, model, path, sum(n)::BIGINT AS n, sum(n_failed)::BIGINT AS n_failed,
    sum(n_aborted)::BIGINT AS n_aborted, sum(n_tokens)::BIGINT AS n_tokens, min(ts_ns) AS begin_ns,
    max(ts_ns) AS end_ns, list("first") AS first, list(whole) AS whole, list("between") AS between
FROM latencies
WHERE ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
    AND ($node::VARCHAR IS NULL OR node_id = $node)
    AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns)
    AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
GROUP BY cluster_id, engine, model, path
ORDER BY n DESC, path
LIMIT 1000
