-- Question: which processes use NCCL, or have loaded another communication library?
-- Parameters: cluster, node (NULL: any), max_rows.
-- Columns: cluster_id, node_id, pid, rank, local_rank, nranks, device, comm (command name), n_communicators,
--   n_collectives, libraries (communication libraries that it has loaded), first_seen_ns, last_seen_ns: its first and last collective, or when it was first seen; ended_ns.
WITH entered AS (
    SELECT cluster_id, node_id, pid, any_value(rank) AS rank, any_value(local_rank) AS local_rank,
        max(nranks) AS nranks, any_value(device) AS device, count(*) AS n_collectives,
        count(DISTINCT comm_hash) AS n_communicators, min(ts_ns) AS first_ns, max(ts_ns) AS last_ns
    FROM collectives WHERE pid IS NOT NULL GROUP BY cluster_id, node_id, pid
), joined AS (
    SELECT cluster_id, node_id, pid, count(DISTINCT comm_hash) AS n_communicators, min(ts_ns) AS first_ns
    FROM communicators GROUP BY cluster_id, node_id, pid
), told AS (
    SELECT cluster_id, node_id, pid, any_value(rank) AS rank, any_value(local_rank) AS local_rank,
        max(nranks) AS nranks, any_value(device) AS device, any_value(comm) AS comm,
        arg_max(libraries, length(libraries)) AS libraries, min(ts_ns) AS first_ns,
        max(nullif(ended_ns, -1)) AS ended_ns
    FROM processes GROUP BY cluster_id, node_id, pid
), keys AS (
    SELECT cluster_id, node_id, pid FROM entered UNION SELECT cluster_id, node_id, pid FROM joined
    UNION SELECT cluster_id, node_id, pid FROM told WHERE libraries NOT IN ('', 'nccl', 'rccl')
)
SELECT k.cluster_id, k.node_id, k.pid, coalesce(t.rank, e.rank)::INTEGER AS rank,
    coalesce(t.local_rank, e.local_rank)::INTEGER AS local_rank, coalesce(t.nranks, e.nranks)::INTEGER AS nranks,
    coalesce(t.device, e.device)::INTEGER AS device, t.comm, t.libraries, coalesce(j.n_communicators, e.n_communicators, 0)
    AS n_communicators, coalesce(e.n_collectives, 0) AS n_collectives,
    coalesce(e.first_ns, j.first_ns, t.first_ns) AS first_seen_ns, e.last_ns AS last_seen_ns, t.ended_ns
FROM keys k
LEFT JOIN entered e ON e.cluster_id IS NOT DISTINCT FROM k.cluster_id AND e.node_id = k.node_id AND e.pid = k.pid
LEFT JOIN joined j ON j.cluster_id IS NOT DISTINCT FROM k.cluster_id AND j.node_id = k.node_id AND j.pid = k.pid
LEFT JOIN told t ON t.cluster_id IS NOT DISTINCT FROM k.cluster_id AND t.node_id = k.node_id AND t.pid = k.pid
WHERE ($cluster::VARCHAR IS NULL OR k.cluster_id = $cluster) AND ($node::VARCHAR IS NULL OR k.node_id = $node)
ORDER BY k.cluster_id, rank, k.node_id, k.pid LIMIT $max_rows
