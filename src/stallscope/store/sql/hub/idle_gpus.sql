-- Question: which GPUs are held without use now?
-- Parameters: cluster, node (NULL: any); fresh_ns: GPUs without a later row are left out; max_rows.
-- Columns: cluster_id, node_id, holder, reason, gpus (list), n_gpus, since_ns, until_ns (last report), gpu_seconds,
--   owner_...: labels of the owner; gpu_model, provider: of the machine, NULL where unknown.
WITH latest AS (
    SELECT *, row_number() OVER (PARTITION BY cluster_id, node_id, holder, gpu ORDER BY ts_ns DESC) AS n
    FROM idle_gpus
    WHERE ts_ns >= $fresh_ns::BIGINT
        AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
        AND ($node::VARCHAR IS NULL OR node_id = $node)
), held AS (
    SELECT cluster_id, node_id, holder, reason, list(coalesce(gpu, '') ORDER BY gpu) AS gpus, count(*) AS n_gpus,
        min(since_ns) AS since_ns, max(ts_ns) AS until_ns, sum(ts_ns - since_ns) / 1e9 AS gpu_seconds,
        any_value(COLUMNS('owner_.*'))
    FROM latest WHERE n = 1 AND is_idle = 1 GROUP BY cluster_id, node_id, holder, reason
)
SELECT h.*, m.gpu_model, m.provider FROM held h
LEFT JOIN nodes m ON m.cluster_id IS NOT DISTINCT FROM h.cluster_id AND m.node_id = h.node_id
ORDER BY gpu_seconds DESC, node_id, holder
LIMIT $max_rows
