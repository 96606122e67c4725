-- Question: how much GPU time was lost in a window, and on which GPUs?
-- Parameters: cluster, from_ns, to_ns (NULL: any), now_ns: the end of open incidents.
-- Columns: verdict_id, cluster_id, node_id, rank, kind, cause, state, since_ns, until_ns, gpu_seconds, is_lower_bound,
--   at_most_gpu_seconds (NULL without a range), gpu_model, provider: of its machine, otherwise of the whole cluster if
--   the cluster has one kind; owner_...: labels of its owner; NULL where unknown.
WITH incidents AS (
    SELECT verdict_id, coalesce(cluster_id, '') AS cluster_id, node_id, rank, kind, cause, state,
        coalesce(since_ns, epoch_ns(opened_at)) AS since_ns,
        coalesce(until_ns, epoch_ns(closed_at), epoch_ns(updated_at), $now_ns::BIGINT) AS until_ns,
        gpu_seconds, coalesce(is_lower_bound, false) AS is_lower_bound, at_most_gpu_seconds, COLUMNS('owner_.*')
    FROM verdicts WHERE gpu_seconds > 0 OR at_most_gpu_seconds > 0
), whole AS (
    SELECT coalesce(cluster_id, '') AS cluster_id,
        CASE WHEN count(DISTINCT gpu_model) = 1 THEN any_value(gpu_model) END AS gpu_model,
        CASE WHEN count(DISTINCT provider) = 1 THEN any_value(provider) END AS provider
    FROM nodes GROUP BY ALL
)
SELECT i.*, coalesce(n.gpu_model, w.gpu_model) AS gpu_model, coalesce(n.provider, w.provider) AS provider
FROM incidents i
LEFT JOIN nodes n ON coalesce(n.cluster_id, '') = i.cluster_id AND n.node_id = i.node_id
LEFT JOIN whole w ON w.cluster_id = i.cluster_id
WHERE ($cluster::VARCHAR IS NULL OR i.cluster_id = $cluster)
    AND ($from_ns::BIGINT IS NULL OR i.until_ns >= $from_ns)
    AND ($to_ns::BIGINT IS NULL OR i.since_ns < $to_ns)
ORDER BY i.since_ns, i.verdict_id
