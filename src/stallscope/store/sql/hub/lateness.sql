-- Question: how late was each rank in the rounds it shared with others?
-- Parameters: cluster (NULL: any), from_ns, to_ns (NULL: any), min_late_ns: from which lateness on a rank counts as late.
-- Columns: cluster_id, node_id, rank, n_rounds, lag_ns: mean of arrival minus the round's typical arrival by the
--   senders' clocks; max_late_ns; n_late: rounds in which it was late by more than min_late_ns.
-- Of a file that lies in the window as a whole, sealed_lateness has the sums (store/hub/lateness.py), and unmatched the
-- rows of rounds that were not complete; collectives has the other files and the hot rows. A round whose lateness was
-- set when it was complete keeps its lateness. In other rounds the typical arrival is the mean without the first and the
-- last to arrive (of two ranks: the earlier): a median of millions of rounds takes seconds.
WITH rounds AS (
    SELECT cluster_id, node_id, rank, comm_hash, seq, ts_ns, late_ns FROM collectives
    WHERE rank IS NOT NULL AND ts_ns > 0 AND op NOT IN ('send', 'recv')
        AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
        AND ($from_ns::BIGINT IS NULL OR ts_ns >= $from_ns)
        AND ($to_ns::BIGINT IS NULL OR ts_ns < $to_ns)
), known AS (
    SELECT cluster_id, node_id, rank, count(*) AS n_rounds, sum(late_ns)::DECIMAL(38, 0) AS late_ns,
        max(late_ns) AS max_late_ns, count(*) FILTER (WHERE late_ns > $min_late_ns) AS n_late
    FROM rounds WHERE late_ns IS NOT NULL GROUP BY ALL
), open_rows AS (
    SELECT cluster_id, node_id, rank, comm_hash, seq, ts_ns FROM rounds
    WHERE late_ns IS NULL AND comm_hash IS NOT NULL AND seq IS NOT NULL
    UNION ALL
    SELECT cluster_id, node_id, rank, comm_hash, seq, ts_ns FROM unmatched
    WHERE $cluster::VARCHAR IS NULL OR cluster_id = $cluster
), met AS (
    SELECT cluster_id, list(node_id) AS nodes, list(rank) AS ranks, list(ts_ns) AS arrivals,
        CASE WHEN count(*) > 2 THEN ((sum(ts_ns) - min(ts_ns) - max(ts_ns)) // (count(*) - 2))::BIGINT
        ELSE min(ts_ns) END AS usual_ns
    FROM open_rows GROUP BY cluster_id, comm_hash, seq HAVING count(*) > 1
), apart AS (
    SELECT cluster_id, unnest(nodes) AS node_id, unnest(ranks) AS rank, unnest(arrivals) - usual_ns AS late_ns FROM met
), computed AS (
    SELECT cluster_id, node_id, rank, count(*) AS n_rounds, sum(late_ns)::DECIMAL(38, 0) AS late_ns,
        max(late_ns) AS max_late_ns, count(*) FILTER (WHERE late_ns > $min_late_ns) AS n_late
    FROM apart GROUP BY ALL
), sealed AS (
    SELECT cluster_id, node_id, rank, n_rounds, late_ns, max_late_ns, n_late FROM sealed_lateness
    WHERE n_rounds > 0 AND ($cluster::VARCHAR IS NULL OR cluster_id = $cluster)
), together AS (FROM known UNION ALL FROM computed UNION ALL FROM sealed)
SELECT cluster_id, node_id, rank, sum(n_rounds)::BIGINT AS n_rounds, sum(late_ns) / sum(n_rounds) AS lag_ns,
    max(max_late_ns)::BIGINT AS max_late_ns, sum(n_late)::BIGINT AS n_late
FROM together GROUP BY ALL ORDER BY cluster_id, rank, node_id
