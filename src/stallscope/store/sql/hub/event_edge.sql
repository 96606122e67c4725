-- Question: from which time on do enough rows exist for a page of events?
-- Parameters: cluster, node, rank, op, name, causal_chain_id, from_ns, to_ns (NULL: any); before_ns: the newest time
--   to be shown, NULL: the newest row; max_rows.
-- Columns: edge_ns: the oldest time of the page, NULL without rows; newest_ns.
SELECT min(ts_ns) AS edge_ns, max(ts_ns) AS newest_ns FROM (
    SELECT ts_ns FROM events
    WHERE ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
        AND ($node::VARCHAR IS NULL OR node_id = $node)
        AND ($rank::INTEGER IS NULL OR rank = $rank)
        AND ($op::VARCHAR IS NULL OR op = $op)
        AND ($name::VARCHAR IS NULL OR name = $name)
        AND ($causal_chain_id::VARCHAR IS NULL OR causal_chain_id = $causal_chain_id)
        AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns)
        AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
        AND ($before_ns::BIGINT IS NULL OR ts_ns <= $before_ns)
    ORDER BY ts_ns DESC LIMIT $max_rows
)
