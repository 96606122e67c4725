-- Question: which clusters are there, how many machines has each, and when did it last send something?
-- Columns: cluster_id, n_nodes, last_seen (UTC).
SELECT cluster_id, count(*) AS n_nodes, max(last_seen) AS last_seen
FROM nodes GROUP BY cluster_id ORDER BY cluster_id
