-- Question: how late was each rank of a job, and how long did it wait, in each of many short intervals?
-- Parameters: from_ns, to_ns; bucket_ns: length of an interval.
-- Columns: rank, bucket, late_ns: largest lateness by the senders' clocks; wait_ns: longest wait; comm_hash, seq: the
--   round with the largest lateness.
WITH arrivals AS (
    SELECT comm_hash, seq, CASE WHEN rank >= 0 THEN rank ELSE comm_rank END AS rank, ts_ns, late_ns,
        CASE WHEN wait_enter_ns > 0 THEN wait_leave_ns - wait_enter_ns END AS wait_ns
    FROM collectives
    WHERE op NOT IN ('send', 'recv') AND comm_hash IS NOT NULL
        AND ts_ns >= $from_ns AND ts_ns < $to_ns
), medians AS (
    SELECT comm_hash, seq, quantile_disc(ts_ns, 0.5) AS median_ns FROM arrivals WHERE late_ns IS NULL GROUP BY ALL
), lateness AS (
    SELECT rank, comm_hash, seq, wait_ns, coalesce(ts_ns - late_ns, median_ns) AS round_ns,
        coalesce(late_ns, ts_ns - median_ns) AS late_ns
    FROM arrivals LEFT JOIN medians USING (comm_hash, seq) WHERE rank >= 0
)
SELECT rank, (round_ns - $from_ns) // $bucket_ns AS bucket, max(late_ns) AS late_ns, max(wait_ns) AS wait_ns,
    arg_max(comm_hash, late_ns) AS comm_hash, arg_max(seq, late_ns) AS seq
FROM lateness GROUP BY ALL
