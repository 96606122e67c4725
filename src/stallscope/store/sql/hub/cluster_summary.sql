-- Question: which clusters exist, how large is each cluster, when did it last send rows, and which verdicts are open?
-- Parameters: cluster (NULL: all).
-- Columns: cluster_id, n_nodes, n_ranks (different ranks seen), n_gpus (NULL where no node reports it), gpu_models (list),
--   providers (list), first_seen, last_seen (UTC), n_open_verdicts.
WITH members AS (
    SELECT cluster_id, rank FROM collectives WHERE rank IS NOT NULL
    UNION ALL SELECT cluster_id, rank FROM processes WHERE rank IS NOT NULL
), ranks AS (
    SELECT coalesce(cluster_id, '') AS cluster_id, count(DISTINCT rank) AS n_ranks FROM members GROUP BY ALL
), opened AS (
    SELECT coalesce(cluster_id, '') AS cluster_id, count(*) AS n_open FROM verdicts WHERE state = 'open' GROUP BY ALL
), machines AS (
    SELECT coalesce(cluster_id, '') AS cluster_id, count(*) AS n_nodes, sum(n_gpus) AS n_gpus,
        list_sort(list(DISTINCT gpu_model) FILTER (WHERE gpu_model IS NOT NULL)) AS gpu_models,
        list_sort(list(DISTINCT provider) FILTER (WHERE provider IS NOT NULL)) AS providers,
        min(first_seen) AS first_seen, max(last_seen) AS last_seen
    FROM nodes GROUP BY ALL
)
SELECT m.cluster_id, n_nodes, coalesce(n_ranks, 0) AS n_ranks, n_gpus, coalesce(gpu_models, []) AS gpu_models,
    coalesce(providers, []) AS providers, first_seen, last_seen, coalesce(n_open, 0) AS n_open_verdicts
FROM machines m LEFT JOIN ranks r ON r.cluster_id = m.cluster_id LEFT JOIN opened o ON o.cluster_id = m.cluster_id
WHERE ($cluster::VARCHAR IS NULL OR m.cluster_id = $cluster)
ORDER BY m.cluster_id
