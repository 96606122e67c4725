-- Question: how large is a job that has sent nothing for long?
-- Parameters: cluster, comm.
-- Columns: n_ranks, n_nodes, last_ns, op; one row, of NULL where nothing is stored.
SELECT max(nranks) AS n_ranks, count(DISTINCT node_id) AS n_nodes, max(ts_ns) AS last_ns, any_value(op) AS op
FROM collectives WHERE cluster_id = $cluster AND comm_hash = $comm
