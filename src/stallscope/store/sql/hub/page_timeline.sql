-- Question: what did some processes do in a short window?
-- Parameters: ranks: of the job; pids: "machine pid" of the same processes;
--   from_ns, to_ns; max_rows: the longest and the first of each kind.
-- Columns: kind: arrival, wait, offcpu, call; rank, or node_id and pid; ts_ns, duration_ns, name.
WITH rows AS (
    SELECT 'arrival' AS kind, CASE WHEN rank >= 0 THEN rank ELSE comm_rank END AS rank, node_id, pid, ts_ns, 0 AS duration_ns, op AS name
    FROM collectives WHERE list_contains($ranks, CASE WHEN rank >= 0 THEN rank ELSE comm_rank END) AND ts_ns >= $from_ns AND ts_ns < $to_ns
    UNION ALL
    SELECT DISTINCT 'wait', CASE WHEN rank >= 0 THEN rank ELSE comm_rank END, node_id, pid, wait_enter_ns, wait_leave_ns - wait_enter_ns, 'wait'
    FROM collectives WHERE list_contains($ranks, CASE WHEN rank >= 0 THEN rank ELSE comm_rank END) AND wait_enter_ns > 0
        AND wait_leave_ns >= $from_ns AND wait_enter_ns < $to_ns AND ts_ns >= $from_ns
    UNION ALL
    SELECT 'offcpu', NULL, node_id, pid, ts_ns, duration_ns, category
    FROM offcpu WHERE list_contains($pids, node_id || ' ' || pid::VARCHAR) AND ts_ns < $to_ns
        AND ts_ns + coalesce(duration_ns, 0) >= $from_ns
    UNION ALL
    SELECT 'call', NULL, node_id, pid, ts_ns, duration_ns, coalesce(symbol, op)
    FROM calls WHERE list_contains($pids, node_id || ' ' || pid::VARCHAR) AND ts_ns < $to_ns
        AND ts_ns + coalesce(duration_ns, 0) >= $from_ns
)
SELECT * FROM rows QUALIFY row_number() OVER (PARTITION BY kind ORDER BY duration_ns DESC, ts_ns) <= $max_rows
ORDER BY ts_ns
