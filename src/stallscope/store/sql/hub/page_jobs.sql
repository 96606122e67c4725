-- Question: which jobs does the page list?
-- Parameters: since_ns: of their last data; also: ids of jobs that are listed in any case.
-- Columns: all columns of jobs.
SELECT * EXCLUDE (tenant) FROM jobs
WHERE n_ranks > 0
    AND (coalesce(ended_ns, last_ns, epoch_ns(updated_at)) >= $since_ns OR list_contains($also::VARCHAR[], job))
ORDER BY ended_ns IS NULL DESC, coalesce(last_ns, epoch_ns(updated_at)) DESC, job
LIMIT 2000
