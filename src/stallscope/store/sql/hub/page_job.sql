-- Question: which job does a link of the page open?
-- Parameters: key: cluster and id of the job, joined by a colon.
-- Columns: all columns of jobs.
SELECT * EXCLUDE (tenant) FROM jobs WHERE coalesce(cluster_id, '') || ':' || job = $key AND n_ranks > 0
