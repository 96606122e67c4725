-- Question: which jobs has the continuous diagnosis examined, and what is the answer on each?
-- Parameters: cluster, from_ns, to_ns (NULL: any); max_rows.
-- Columns: all columns of jobs.
SELECT * EXCLUDE (tenant) FROM jobs
WHERE n_ranks > 0 -- 0: its processes have joined another job
    AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
    AND ($from_ns::BIGINT IS NULL OR coalesce(ended_ns, last_ns, epoch_ns(updated_at)) >= $from_ns)
    AND ($to_ns::BIGINT IS NULL OR coalesce(begin_ns, epoch_ns(updated_at)) < $to_ns)
ORDER BY ended_ns IS NULL DESC, last_ns DESC NULLS LAST, job
LIMIT $max_rows
