-- Question: in each sealed file, how late was each rank in the rounds whose lateness is known?
-- Parameters: min_late_ns: from which lateness on a rank counts as late.
-- Columns: path, cluster_id, node_id, rank; n_rounds; late_ns: their sum; max_late_ns; n_late: rounds in which it was
--   late by more than min_late_ns; n_unmatched: its rows of rounds that were not complete when they were sealed.
-- sealed_files: the files' rows with their path (store/hub/lateness.py).
SELECT path, cluster_id, node_id, rank, count(late_ns) AS n_rounds, sum(late_ns)::DECIMAL(38, 0) AS late_ns,
    max(late_ns) AS max_late_ns, count(*) FILTER (WHERE late_ns > $min_late_ns) AS n_late,
    count(*) FILTER (WHERE late_ns IS NULL AND comm_hash IS NOT NULL AND seq IS NOT NULL) AS n_unmatched
FROM sealed_files WHERE rank IS NOT NULL AND ts_ns > 0 AND op NOT IN ('send', 'recv')
GROUP BY ALL
