-- Question: which verdicts match, the newest first?
-- Parameters: cluster, node, rank, kind, severity, state, verdict_id, from_ns, to_ns (NULL: any); max_rows.
-- Columns: all columns of verdicts.
SELECT * EXCLUDE (tenant) FROM verdicts
WHERE ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
    AND ($node::VARCHAR IS NULL OR node_id = $node OR list_contains(from_json(nodes, '["VARCHAR"]'), $node))
    AND ($rank::INTEGER IS NULL OR rank = $rank OR list_contains(from_json(ranks, '["INTEGER"]'), $rank))
    AND ($kind::VARCHAR IS NULL OR kind = $kind)
    AND ($severity::VARCHAR IS NULL OR severity = $severity)
    AND ($state::VARCHAR IS NULL OR state = $state)
    AND ($verdict_id::VARCHAR IS NULL OR verdict_id = $verdict_id)
    AND ($from_ns::BIGINT IS NULL OR coalesce(until_ns, epoch_ns(updated_at)) >= $from_ns)
    AND ($to_ns::BIGINT IS NULL OR coalesce(since_ns, epoch_ns(opened_at)) < $to_ns)
ORDER BY state = 'open' DESC, updated_at DESC, verdict_id
LIMIT $max_rows
