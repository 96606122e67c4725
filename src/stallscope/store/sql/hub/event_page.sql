-- Question: which events are there between two times, the newest first?
-- Parameters: cluster, node, rank, op, name, causal_chain_id (NULL: any); edge_ns, newest_ns: both ends included;
--   n_skipped: rows of the newest time that were already shown; max_rows.
-- Columns: ts_ns, cluster_id, node_id, rank, name, op, comm_hash, seq, step, pid, duration_ns, count_bytes,
--   value_double, value_text, causal_chain_id, attrs.
SELECT ts_ns, cluster_id, node_id, rank, name, op, comm_hash, seq, step, pid, duration_ns, count_bytes,
    value_double, value_text, causal_chain_id, attrs
FROM events
WHERE ts_ns >= $edge_ns AND ts_ns <= $newest_ns
    AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
    AND ($node::VARCHAR IS NULL OR node_id = $node)
    AND ($rank::INTEGER IS NULL OR rank = $rank)
    AND ($op::VARCHAR IS NULL OR op = $op)
    AND ($name::VARCHAR IS NULL OR name = $name)
    AND ($causal_chain_id::VARCHAR IS NULL OR causal_chain_id = $causal_chain_id)
ORDER BY ts_ns DESC, node_id, rank, name, op, comm_hash, seq, pid, tid, received_at, value_double, attrs
LIMIT $max_rows OFFSET $n_skipped
